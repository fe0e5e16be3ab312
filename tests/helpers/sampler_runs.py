"""What the extended sampler leaves of some logits, as probabilities; compiled once for tests."""

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from minfer_jax.sampling import (
    WINDOW_EXTENDED,
    ExtendedArgs,
    SamplerState,
    SamplingParams,
    init_state,
    sample_extended,
)
from minfer_jax.sampling.args import all_tokens, packed
from minfer_jax.sampling.candidates import everything, largest
from minfer_jax.sampling.chain import FEW
from minfer_jax.sampling.extended import allowed, bound_steps, run_all, run_few, run_wide

TRACED: list[tuple[int, ...]] = []
"""Shapes of the logits that `draw_extended` was traced for."""


def draw_extended(
    logits: jax.Array,
    state: SamplerState,
    args: ExtendedArgs,
    mask: jax.Array | None = None,
    *,
    few: int = FEW,
) -> tuple[jax.Array, SamplerState]:
    """`sample_extended`, compiled once for whether or not there is a mask."""
    if mask is None:
        mask = jnp.tile(all_tokens(logits.shape[1]), (logits.shape[0], 1))
    return _draw(logits, state, args, mask, few)


@partial(jax.jit, static_argnums=4)
def _draw(
    logits: jax.Array, state: SamplerState, args: ExtendedArgs, mask: jax.Array, few: int
) -> tuple[jax.Array, SamplerState]:
    TRACED.append(logits.shape)
    return sample_extended(logits, state, args, mask, few=few)


@partial(jax.jit, static_argnames="n")
def left_by_extended(
    logits: jax.Array, state: SamplerState, args: ExtendedArgs, n: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Probabilities ``[B, V]`` by the steps on n candidates, or all, and which rows to trust."""
    steps = bound_steps(state, args)
    begin, logits = run_wide(steps, args.order, allowed(logits, args, None))
    if n:
        left = run_few(steps, args.order, begin, largest(logits, n))
    else:
        left = everything(run_all(steps, args.order, begin, logits))
    rows = jnp.arange(logits.shape[0])[:, None]
    probabilities = jnp.zeros_like(logits).at[rows, left.ids].set(jax.nn.softmax(left.logits))
    return probabilities, left.complete & left.decided


def given(
    params: SamplingParams,
    n_vocab: int,
    recent: Sequence[int] = (),
    breakers: Collection[int] = (),
    **options: float,
) -> tuple[SamplerState, ExtendedArgs]:
    """State and values of one row; options are those of `init_state`."""
    breaks = packed(np.isin(np.arange(n_vocab), list(breakers)))
    state = init_state(params, recent, window=WINDOW_EXTENDED, **options)  # pyright: ignore
    args = params.extended_arrays(bias=np.zeros(n_vocab, np.float32), breakers=breaks)
    return state, args
