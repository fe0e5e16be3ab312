"""Choosing the next token: pure steps on logits, and the two chains that run them."""

from minfer_jax.sampling.args import WINDOW, WINDOW_EXTENDED, ExtendedArgs, SamplerArgs
from minfer_jax.sampling.chain import sample
from minfer_jax.sampling.extended import sample_extended
from minfer_jax.sampling.order import SAMPLERS, samplers_from
from minfer_jax.sampling.params import SamplingParams
from minfer_jax.sampling.state import SamplerState, init_state

__all__ = [
    "SAMPLERS",
    "WINDOW",
    "WINDOW_EXTENDED",
    "ExtendedArgs",
    "SamplerArgs",
    "SamplerState",
    "SamplingParams",
    "init_state",
    "sample",
    "sample_extended",
    "samplers_from",
]
