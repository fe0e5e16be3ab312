"""The kernels as jnp functions; `quant/xla.py` and `model/attention.py` say what each computes."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from minfer_jax.quant.cache import Cache, Q8Cache
from minfer_jax.quant.formats import grids
from minfer_jax.quant.formats.base import TILE
from minfer_jax.quant.prologue import Gate, Norm, Prologue, RmsNorm
from minfer_jax.quant.qtensor import QTensor


def supports(w: QTensor) -> bool:
    """Whether there is a kernel for a weight: K is a multiple of 32, as in every packed one."""
    return w.shape[1] % 32 == 0


def supports_gate(gate: Gate) -> bool:
    """Whether the kernels know an activation."""
    return gate.activation in _GATES


def supports_heads(h: int, h_v: int) -> bool:
    """Whether there is a kernel for attention with keys of H values and values of Hv."""
    return h % 16 == 0 and h_v % 16 == 0


# The numbers of `Prologue` in weight.h; 0 for none, 1 for RmsNorm.
_GATES = {"silu": 2, "gelu": 3}


def takes(prologue: Prologue | None) -> bool:
    """Whether the kernels can do this on the way into a product."""
    if isinstance(prologue, Gate):
        return supports_gate(prologue)
    return prologue is None or isinstance(prologue, RmsNorm)


def takes_post(post: Norm, w: QTensor) -> bool:
    """Whether they can norm the product: whole tiles of outputs."""
    return isinstance(post, RmsNorm) and w.shape[0] % TILE == 0


def product(
    x: Float[Array, "M width"],
    w: QTensor,
    prologue: Prologue | None = None,
    post: Norm | None = None,
    plus: Float[Array, "M N"] | None = None,
    *,
    few: bool,
    rounded: bool = False,
    bfloat16: bool = False,
) -> Float[Array, "M N"]:
    """post(prologue(x) times the weight) + plus, summed in float32.

    Args:
        x: float32.
        w: a weight that `supports` accepts.
        prologue: done to x first; one that `takes` accepts.
        post: done to the product; one that `takes_post` accepts, and of the same eps as the
            prologue, where both are norms.
        plus: added last.
        few: read the weight once, for up to 16 rows; else unpack it once, for many.
        rounded: of a few rows, what the product is taken of is rounded to 16 bits, one scale for
            32 columns.
        bfloat16: of many rows, both factors are rounded to bfloat16.
    """
    before = [] if plus is None else [plus]
    kind, eps = 0, 0.0
    if isinstance(prologue, RmsNorm):
        kind, eps = 1, prologue.eps
        before += _norm(prologue)
    elif isinstance(prologue, Gate):
        kind = _GATES[prologue.activation]
    if post is not None:
        assert isinstance(post, RmsNorm)
        assert not isinstance(prologue, RmsNorm) or post.eps == eps
        eps = post.eps
        before += _norm(post)
    return _call("minfer_product", (x.shape[0], w.shape[0]))(
        x,
        *_planes(w, before),
        format=_format(w),
        plus=plus is not None,
        post=post is not None,
        prologue=np.int32(kind),
        eps=np.float32(eps),
        few=few,
        rounded=rounded,
        bfloat16=bfloat16,
    )


def experts(
    x: Float[Array, "R width"],
    w: QTensor,
    ids: Int[Array, " P"],
    gate: Gate | None = None,
    *,
    few: int,
    rounded: bool = False,
    bfloat16: bool = False,
) -> Float[Array, "P N"]:
    """Each row times the weight of its own expert, see `quant/experts.py`; summed in float32.

    Args:
        x: float32.
        w: a stack that `supports` accepts, at the first expert.
        ids: int32, P a multiple of R; negative for a row of zeros.
        gate: done to x first; one that `supports_gate` accepts.
        few: up to so many rows of an expert, its weight is read once, else it is unpacked once.
        rounded: as for `product`, of an expert with few rows.
        bfloat16: as for `product`, of an expert with many.
    """
    return _call("minfer_experts", (ids.shape[0], w.shape[0]))(
        x,
        ids,
        *_planes(w, []),
        format=_format(w),
        prologue=np.int32(0 if gate is None else _GATES[gate.activation]),
        few=np.int64(few),
        rounded=rounded,
        bfloat16=bfloat16,
    )


def _call(target: str, shape: tuple[int, ...]) -> Callable[..., Array]:
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")


def _norm(norm: RmsNorm) -> list[Array]:
    """The stack of weights, and the row that is meant."""
    return [norm.weight, jnp.uint32(0) if norm.layer is None else norm.layer]


def _planes(w: QTensor, before: list[Array]) -> list[Array]:
    """The layer, then `before`, then the planes, in the order of product_call.h."""
    layer = jnp.uint32(0) if w.layer is None else w.layer
    tables = []
    if w.fmt.codebook is not None:
        codes = np.zeros(16, np.uint8)
        codes[: len(w.fmt.codebook)] = w.fmt.codebook
        tables.append(jnp.asarray(codes))
    if w.fmt.grid is not None:
        tables.append(jnp.asarray(grids.table(w.fmt.grid.name)))
    planes = [p for p in (w.scale, w.sub, w.low, w.sublow, w.high, w.dense) if p is not None]
    return [layer, *before, *w.bits, *planes, *tables]


_SCALE_TYPES = {None: "h", "float16": "H", "bfloat16": "B"}


def _format(w: QTensor) -> np.ndarray:
    """What a call must know of a weight beside its planes: `Format` of product_call.h."""
    fmt = w.fmt
    widths = (*fmt.widths, 0, 0)
    span, high = (0, 0) if fmt.grid is None else (fmt.grid.span, fmt.grid.high)
    values = (
        w.shape[1],
        widths[0],
        widths[1],
        fmt.group,
        fmt.super_block,
        fmt.zero,
        w.sub is not None,
        w.low is not None,
        fmt.codebook is not None,
        ord(_SCALE_TYPES[fmt.byte_scale]),
        span,
        high,
        math.frexp(fmt.factor)[1] - 1,
    )
    return np.array(values, np.int64)


def attention(
    q: Float[Array, "B T N H"],
    k: Cache,
    v: Cache,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    sinks: Float[Array, " N"] | None,
    *,
    window: int,
    scale: float,
    softcap: float,
    bfloat16: bool,
) -> Float[Array, "B T N Hv"]:
    """Causal attention over the slots that hold something; arguments as of `attend`.

    Args:
        q, k, v, layer, q_positions, k_positions, sinks: as there.
        window, scale, softcap: as in `Scoring`.
        bfloat16: the factors of both products may be rounded to bfloat16.
    """
    (k, k_scales), (v, v_scales) = _cache_planes(k), _cache_planes(v)
    return _call("minfer_attention", (*q.shape[:3], v.shape[4]))(
        q,
        k,
        v,
        layer,
        q_positions,
        k_positions,
        *k_scales,
        *v_scales,
        *_present(sinks),
        window=np.int64(window),
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        sinks=sinks is not None,
        bfloat16=bfloat16,
    )


def attention_step(
    qkv: Float[Array, "B T qkv"],
    k: Cache,
    v: Cache,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    slots: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None,
    *,
    n_head: int,
    angles: tuple[Float[Array, "B T pairs"], Float[Array, "B T pairs"]] | None,
    interleaved: bool,
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    q_factor: Float[Array, "B T"] | None,
    eps: float,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Float[Array, "B T N Hv"], Cache, Cache]:
    """All of attention for a few positions: (its output, k, v), the cache updated in place.

    Each position gets the same numbers as if it came alone.

    Args:
        qkv: what the projections give, q | k | v, of N H, K H and K Hv values.
        k, v: caches of all layers of a kind.
        layer: which of them.
        q_positions: -1 for padding.
        k_positions: the position that each slot holds once these are written.
        slots: where each key and value goes; S for nowhere.
        sinks: as for `attention`.
        n_head: N.
        angles: cosines and sines of RoPE, or None.
        interleaved: which values of a head are pairs, see `rope.rotate`.
        q_norm, k_norm: weights of the norms of each head, or None.
        q_factor: of the queries, or None.
        eps: of the norms.
        window, scale, softcap: as for `attention`.
    """
    (k, k_scales), (v, v_scales) = _cache_planes(k), _cache_planes(v)
    cache = [k, v, *k_scales, *v_scales]
    shapes = (
        jax.ShapeDtypeStruct((*qkv.shape[:2], n_head, v.shape[4]), jnp.float32),
        *(jax.ShapeDtypeStruct(plane.shape, plane.dtype) for plane in cache),
    )
    operands = (1, 2, 7, 8)[: len(cache)]  # the last two where there are scales
    aliases = {operand: result for result, operand in enumerate(operands, 1)}
    call = jax.ffi.ffi_call(
        "minfer_step", shapes, input_output_aliases=aliases, vmap_method="sequential"
    )
    out, *cache = call(
        qkv,
        k,
        v,
        layer,
        q_positions,
        k_positions,
        slots,
        *cache[2:],
        *_present(sinks, *(angles or ()), q_norm, k_norm, q_factor),
        window=np.int64(window),
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        sinks=sinks is not None,
        rotate=angles is not None,
        interleaved=interleaved,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        q_factor=q_factor is not None,
        eps=np.float32(eps),
    )
    return out, _cache_of(*cache[0::2]), _cache_of(*cache[1::2])


def _cache_planes(cache: Cache) -> tuple[Array, list[Array]]:
    """The values of a cache, and its scales where it has them."""
    return (cache.values, [cache.scales]) if isinstance(cache, Q8Cache) else (cache, [])


def _cache_of(values: Array, scales: Array | None = None) -> Cache:
    return values if scales is None else Q8Cache(values=values, scales=scales)


def _present(*vectors: Array | None) -> list[Array]:
    return [x for x in vectors if x is not None]
