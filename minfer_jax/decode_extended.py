"""The extended form of decode: every step of the sampler in any order, a bias and a mask on tokens,
and how likely each token was. What is asked for is data: one program serves all of it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from minfer_jax.burst import BURST, Burst, drawing
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.sampling import ExtendedArgs, SamplerState, sample_extended
from minfer_jax.sampling.logprobs import logprobs

N_TOP = 20  # of the likeliest tokens, how many can be asked for


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call of the extended form is given beside tokens.

    Attributes:
        sampling: the sampler's values.
        mask: of the tokens that may be drawn: bit i of word w is token 32 w + i.
        logprobs: whether log-probabilities are wanted.
    """

    sampling: ExtendedArgs
    mask: UInt32[Array, "B words"]
    logprobs: Bool[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Details:
    """What there is to say of each token that was drawn.

    Attributes:
        logprob: its logarithm of probability, of the model's logits as they are; 0 unless asked.
        top_ids: the likeliest tokens in its place, in descending order.
        top_logprobs: theirs.
        mu: the sampler's bound of surprise after it (mirostat).
    """

    logprob: Float[Array, "B BURST"]
    top_ids: Int[Array, "B BURST top"]
    top_logprobs: Float[Array, "B BURST top"]
    mu: Float[Array, "B BURST"]


def decode_extended(
    params: Params,
    token_ids: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    kv_state: KVState,
    sampler: SamplerState,
    asked: Asked,
    burst: Burst,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Int[Array, "B BURST"], Int[Array, "B 1"], Details, SamplerState]:
    """As `decode`; the mask holds for every token of the call, so under one that changes it is 1.

    Returns:
        (KV state, the tokens drawn with -1 after them, the last of each row, their details,
        sampler).
    """
    n_batch, n_top = token_ids.shape[0], min(N_TOP, cfg.n_vocab)

    def draw(logits: Array, step: Array, kept: tuple) -> tuple[Array, tuple]:
        details, sampler = kept
        token, sampler = sample_extended(logits, sampler, asked.sampling, asked.mask)
        none = jax.tree.map(lambda a: jnp.zeros((n_batch, *a.shape[2:]), a.dtype), details)
        of_token, ids, of_ids = lax.cond(
            asked.logprobs,
            lambda: logprobs(logits, token, n_top),
            lambda: (none.logprob, none.top_ids, none.top_logprobs),
        )
        new = Details(logprob=of_token, top_ids=ids, top_logprobs=of_ids, mu=sampler.mu)
        put = lambda a, x: lax.dynamic_update_index_in_dim(a, x, step, 1)  # noqa: E731
        return token, (jax.tree.map(put, details, new), sampler)

    nothing = jnp.zeros((n_batch, BURST), jnp.float32)
    several = jnp.zeros((n_batch, BURST, n_top), jnp.float32)
    details = Details(
        logprob=nothing, top_ids=several.astype(jnp.int32), top_logprobs=several, mu=nothing
    )
    kv_state, tokens, last, kept = drawing(
        params, token_ids, positions, kv_state, burst, draw, (details, sampler), cfg=cfg
    )
    return kv_state, tokens, last, *kept
