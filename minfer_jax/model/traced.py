"""The model with its values laid open: any of them by name, replaced or edited, differentiated.

    logits, state, values = forward_traced(
        params, ids, positions, state, cfg=cfg,
        names="blk.*.attn_out", patches={"blk.3.residual": Add(direction)},
    )

All is pure, and arrays may be traced: under jit they are arguments, and vmap runs over prompts (one
sequence each) or over patches. Names and functions are static. Which names there are, and of which
shapes, is in `names`.
"""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward_tapped
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.names import Value, matching, values
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Patch, check_size, resolved, tap_of
from minfer_jax.model.tap import Captured, Kept, Places, Tap

MAX_BYTES = 2**31  # of what one call keeps, unless told


def forward_traced(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
    names: str | Iterable[str] = (),
    patches: Mapping[str, Patch] | None = None,
    embeddings: Float[Array, "B P D"] | None = None,
    differentiable: bool = True,
    max_bytes: int = MAX_BYTES,
) -> tuple[Float[Array, "B T V"], KVState, Captured]:
    """`forward` of all rows, with the values that were asked for.

    Nothing is fused here. With a cache of float32 at the highest precision the numbers are those of
    `forward` but for rounding; elsewhere products and cache round as they do there.

    Args:
        params, token_ids, positions, kv_state, cfg: as for `forward`.
        names: patterns of the values to return.
        patches: by patterns: what is put in place of values, which all later ones then follow from.
            A value is returned as it is after its patch.
        embeddings: what the first P rows are instead of the embeddings of their tokens: a soft
            prompt. "embd" is after that.
        differentiable: static; in a form that reverse mode can follow, in which XLA copies the
            cache in every layer. A q8_0 cache needs it False.
        max_bytes: static; of values that are returned, at most.

    Returns:
        (float32 logits, the new KV state, values by full name).

    Raises:
        ValueError: as for `forward`; a pattern matches nothing; a patch does not fit its value, or
            has a second one; what is asked for is too large; there are more embeddings than rows.
    """
    known = known_values(params, cfg, token_ids.shape, kv_state)
    tap, places = _tap(known, cfg, names, patches or {}, embeddings, max_bytes)
    logits, kv_state, kept = forward_tapped(
        params, token_ids, positions, kv_state, tap, cfg=cfg, differentiable=differentiable
    )
    return logits, kv_state, Captured(stacks=kept, places=places)


def gradients(
    loss: Callable[[Array], Array],
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
    names: str | Iterable[str],
    patches: Mapping[str, Patch] | None = None,
    embeddings: Float[Array, "B P D"] | None = None,
) -> tuple[Array, Captured, Captured]:
    """A loss on the logits, and its derivative with respect to values.

    That of a value is how the loss changes when something is added to it, and all that follows from
    it changes with it. To differentiate with respect to a patch, an embedding or a weight, use
    jax.grad over `forward_traced`.

    Args:
        loss: of logits [B, T, V], a scalar.
        params, token_ids, positions, kv_state, cfg, patches, embeddings: as for `forward_traced`.
        names: patterns of the values.

    Returns:
        (loss, the values by full name, the derivatives by full name).

    Raises:
        ValueError: as for `forward_traced`, or a value holds integers.
    """
    known = known_values(params, cfg, token_ids.shape, kv_state)
    tap, places = _tap(known, cfg, names, patches or {}, embeddings, MAX_BYTES)
    if whole := [name for name, (key, _) in places if tap.kept[key].dtype == "int32"]:
        raise ValueError(f"{whole[0]} holds integers, which have no derivative: leave it out")

    def of(deltas: Kept) -> tuple[Array, Kept]:
        logits, _, kept = forward_tapped(
            *(params, token_ids, positions, kv_state, tap.plus(deltas)),
            cfg=cfg,
            differentiable=True,
        )
        return loss(logits), kept

    zeros = {key: jnp.zeros((rows.n, *key[1]), rows.dtype) for key, rows in tap.kept.items()}
    (value, kept), slopes = jax.value_and_grad(of, has_aux=True)(zeros)
    return value, Captured(stacks=kept, places=places), Captured(stacks=slopes, places=places)


def _tap(
    known: Mapping[str, Value],
    cfg: ModelConfig,
    names: str | Iterable[str],
    patches: Mapping[str, Patch],
    embeddings: Float[Array, "B P D"] | None,
    max_bytes: int,
) -> tuple[Tap, Places]:
    """What `tap_of` gives for patterns; embeddings come before a patch of "embd"."""
    every = list(known)
    keep = matching(names, every)
    check_size((known[name] for name in keep), max_bytes)
    return tap_of(known, cfg.n_layer, keep, _prompt(embeddings), resolved(patches, every))


def _prompt(embeddings: Float[Array, "B P D"] | None) -> dict[str, Patch]:
    """Embeddings of the first rows, as a patch."""
    if embeddings is None:
        return {}

    def put(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        (b, t, d), found = x.shape, embeddings.shape
        if len(found) != 3 or (found[0], found[2]) != (b, d) or found[1] > t:
            raise ValueError(f"embeddings are {list(found)}, expected [B={b}, up to T={t}, D={d}]")
        return x.at[:, : found[1]].set(embeddings)

    return {"embd": put}


def known_values(
    params: Params, cfg: ModelConfig, shape: tuple[int, ...], kv_state: KVState
) -> dict[str, Value]:
    """All values of a call with ids of this shape on such a state."""
    full, sliding = (held.shape[1] for held in kv_state.positions)
    return values(params, cfg, batch=shape[0], t=shape[1], slots=(full, sliding))
