"""Choosing the next token: pure steps on logits, and the chain that runs them."""

from minfer_jax.sampling.chain import sample
from minfer_jax.sampling.params import SamplerArgs, SamplingParams
from minfer_jax.sampling.state import SamplerState, init_state

__all__ = ["SamplerArgs", "SamplerState", "SamplingParams", "init_state", "sample"]
