"""The quantised product for many rows of x on CUDA: tiles dequantised on the way into the dots.

Its plain twin is `quant/xla.py`, `dequantize` followed by `dot`. In this file M is rows of x, K
contraction, N outputs, W words of a unit in the first plane.

A program takes a block of rows and of outputs, and goes through K. At each step it loads the words
of some units as a matrix [words, outputs]; their fields become float32, get their scale, are
rounded to the factors' type and joined along K to [words * fields, outputs], which is one
operand of a dot. So K runs in the order of the planes' own words and fields, and it is x whose
columns are brought into that order, within units of 32, outside. Words of an output are read by
4 outputs a thread, 16 bytes, 64 of a tile side by side. Programs that share outputs run one after
another, so that the words come from the second-level cache for all but the first block of rows.

In bfloat16 the dots are those of tensor cores, summed in float32; in float32 they are float32
throughout, without TF32. Rows beyond M repeat the last one and are not stored.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from minfer_jax.pallas import blocks, unpack
from minfer_jax.quant.formats.base import TILE
from minfer_jax.quant.qtensor import QTensor

NAME = "minfer_matmul"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, powers of two.

    Attributes:
        rows: of x that a program takes, 16 or more.
        tiles: of 16 outputs that it takes.
        columns: of the contraction at a time, 32 or more.
        warps: of 32 threads.
        stages: of loads in flight.
    """

    rows: int
    tiles: int
    columns: int = 64
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name, least in (("rows", 16), ("tiles", 1), ("columns", 32), ("warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}, expected a power of two from {least} on")


def supports(w: QTensor) -> str | None:
    """Why there is no kernel for such a weight, or None if there is."""
    return unpack.supports(w)


def case(m: int, w: QTensor, dtype: str) -> str:
    """What the best block sizes depend on, as blocks.json words it."""
    n, k = w.shape
    return f"{w.fmt.name} {n}x{k} rows {m} {dtype}"


def default(m: int, w: QTensor, dtype: str) -> Config:
    """Block sizes by a rule of thumb.

    A thread keeps 64 sums: 128 x 128 over 8 warps where there are rows and outputs enough, as x is
    read anew for every block of outputs. Float32 has no tensor cores, and every factor of its dot
    passes through registers: with more columns or sums a thread, they are spilled.
    """
    most, columns = (128, 64) if dtype == "bfloat16" else (64, 32)
    rows = min(most, max(16, pl.next_power_of_2(m)))
    tiles = min(most // TILE, unpack.power_below(unpack.tiles(w)))
    warps = 8 if 2 * rows * tiles * TILE > most * most else 4
    return Config(rows=rows, tiles=tiles, columns=columns, warps=warps)


# Traced and lowered once for a shape, however many layers call it.
@functools.partial(jax.jit, static_argnames=("dtype", "config", "interpret"))
def matmul(
    x: Float[Array, "M K"],
    w: QTensor,
    dtype: str,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """x times the transposed weight, summed in float32; see `quant/xla.py`, `dequantize` and `dot`.

    Args:
        x: activations.
        w: a weight that `supports` takes; of a stack, with its layer.
        dtype: what both factors are rounded to, "float32" or "bfloat16".
        config: block sizes; None for the table's, or the default.
        interpret: run it as plain operations, on any device.

    Raises:
        ValueError: the block sizes do not fit the weight.
    """
    m, n = len(x), w.shape[0]
    if config is None:
        config = blocks.chosen("matmul", case(m, w, dtype), default(m, w, dtype))
    tiles, spread = unpack.tiles(w), unpack.spread_of(w.fmt)
    if config.tiles > tiles:
        raise ValueError(f"tiles is {config.tiles}, but the weight [N={n}] has {tiles}")
    fields = unpack.fields(w.fmt, spread)
    block = config.columns // fields  # rows of the planes at a time
    steps = -(-unpack.rows(w, spread) // block)
    pad = steps * block - unpack.rows(w, spread)
    x = unpack.arranged(x.astype(dtype), w, spread, fields_first=False, pad=pad).reshape(m, -1)
    out = pl.pallas_call(
        functools.partial(_kernel, config=config, steps=steps, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((m, tiles * TILE), jnp.float32),
        grid=(-(-m // config.rows), -(-tiles // config.tiles)),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=NAME,
    )(x, unpack.table(w.fmt), unpack.references(w))
    return out[:, :n]


def _kernel(
    x: Any, table: Any, w: QTensor, out: Any, *, config: Config, steps: int, tiles: int
) -> None:
    """Of x [M, K in order of the planes] and the planes; out [M, 16 * tiles]."""
    m = x.shape[0]
    spread = unpack.spread_of(w.fmt)
    fields = unpack.fields(w.fmt, spread)
    block, outputs = config.columns // fields, config.tiles * TILE
    tile0 = pl.program_id(1) * config.tiles
    if tiles % config.tiles:  # the last programs may share tiles: they write the same
        tile0 = jnp.minimum(tile0, tiles - config.tiles)
    row = pl.program_id(0) * config.rows + lax.broadcasted_iota(
        jnp.int32, (config.rows, config.columns), 0
    )
    if m % config.rows:
        row = jnp.minimum(row, m - 1)
    column = lax.broadcasted_iota(jnp.int32, row.shape, 1)

    def step(t: Array, total: Array) -> Array:
        place = unpack.place_of(tile0, t * block, config.tiles, block)
        place = unpack.within(w, place, spread, steps * block)
        values = [
            value.astype(x.dtype)
            for group in unpack.groups_at(w, table, place, spread)
            for value in _scaled(group)
        ]
        factor = x[row, t * config.columns + column]
        return total + plt.dot(factor, _joined(values), precision=lax.Precision.HIGHEST)

    total = jnp.zeros((config.rows, outputs), jnp.float32)
    total = lax.fori_loop(0, steps, step, total)
    at = out.at[pl.ds(pl.program_id(0) * config.rows, config.rows), pl.ds(tile0 * TILE, outputs)]
    if m % config.rows == 0:
        plt.store(at, total)
        return
    row = pl.program_id(0) * config.rows + lax.broadcasted_iota(jnp.int32, total.shape, 0)
    plt.store(at, total, mask=row < m)


def _scaled(group: unpack.Group) -> list[Array]:
    """The weights of a group's fields."""
    values = group.integers
    if group.scale is not None:
        values = [value * group.scale for value in values]
    return values if group.low is None else [value + group.low for value in values]


def _joined(values: list[Array]) -> Array:
    """Matrices [words, outputs], a power of two of them, as one: [words * fields, outputs].

    The only way that Triton has to put tensors together is side by side, two at a time.
    """
    words, outputs = values[0].shape
    count = len(values)
    axes = 0
    while len(values) > 1:  # the first to be joined are halves apart: their bit is the highest
        half = len(values) // 2
        values = [
            jnp.stack(pair, axis=-1) for pair in zip(values[:half], values[half:], strict=True)
        ]
        axes += 1
    order = (0, *range(2, 2 + axes), 1)
    return jnp.transpose(values[0], order).reshape(words * count, outputs)
