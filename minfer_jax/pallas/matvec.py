"""The quantised product for a few rows of x on CUDA, in float32, from the packed words.

Its plain twin is `quant/xla.py`, `matvec`. Decode waits for memory, so every word is read once, and
what is done with it must take less time than reading it. In this file M is rows of x, J tiles of 16
outputs, U units of 32 columns.

A program takes some tiles and a range of units. Its tensors are [tiles, units, 16]: Triton gives
a thread 4 outputs of a tile side by side, 16 bytes a load, so that 4 threads read the 64 bytes of a
word of all 16 outputs, and the words of a unit, written out one after another, complete the lines.
All fields of a unit lie in one thread: its scale is applied once, after 32 multiply-adds, and the
sum over units is left to the end. x comes with a column's units side by side [M, 32, U], so a
load of it is one sector; the threads of a tile share it through the cache, and several tiles are
taken at a time so that it is loaded less often than it is used. A field costs a mask, a
subtraction, and a multiply-add a row of x. Values of a code book are gathered from 64 bytes that
stay in the first-level cache: a load instead of the ten integer operations of a choice among 16.

Where there are too few outputs to fill a device, the units are split among programs, and XLA adds
their parts in a fixed order.
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

NAME = "minfer_matvec"
MOST_ROWS = 8  # of x: the sums of one more would not fit into the registers
PROGRAMS = 1024  # about eight for each of the 100 to 140 processors of a large device
_SPREAD = 1  # a row of the planes is a unit


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes, powers of two but for `split`.

    Attributes:
        tiles: of 16 outputs that a program takes.
        units: of 32 columns that it takes at a time; of plain floats, columns.
        split: programs that share a tile's units.
        warps: of 32 threads.
    """

    tiles: int
    units: int
    split: int
    warps: int = 4

    def __post_init__(self) -> None:
        if self.split < 1:
            raise ValueError(f"split is {self.split}, expected 1 or more")
        for name in ("tiles", "units", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value}, expected a power of two")


def supports(w: QTensor) -> str | None:
    """Why there is no kernel for such a weight, or None if there is."""
    return unpack.supports(w)


def case(m: int, w: QTensor) -> str:
    """What the best block sizes depend on, as blocks.json words it."""
    n, k = w.shape
    return f"{w.fmt.name} {n}x{k} rows {m}"


def default(m: int, w: QTensor) -> Config:
    """Block sizes by a rule of thumb.

    A thread keeps 2 sums for each row of x and each of its outputs x units: 8 of those for up to 4
    rows of x, else 4, which is 64 registers; fewer where a weight is too small for a device. Both
    the units at a time and the split are as large as they can be without padding too much.
    """
    count, tiles = unpack.rows(w, _SPREAD), unpack.tiles(w)
    units = next((size for size in (32, 16, 8) if -count % size <= count // 8), 4)
    steps = -(-count // units)
    own = min((64 if m <= 4 else 32) // units, unpack.power_below(max(1, tiles * steps // 256)))
    own = min(own, unpack.power_below(tiles))
    most = min(steps, max(1, PROGRAMS // -(-tiles // own)))
    split = next(size for size in range(most, 0, -1) if -steps % size <= steps // 16)
    return Config(tiles=own, units=units, split=split)


# Traced and lowered once for a shape, however many layers call it.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def matvec(
    x: Float[Array, "M K"],
    w: QTensor,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """x times the transposed weight, summed in float32; see `quant/xla.py`, `matvec`.

    Args:
        x: activations of up to MOST_ROWS rows.
        w: a weight that `supports` takes; of a stack, with its layer.
        config: block sizes; None for the table's, or the default.
        interpret: run it as plain operations, on any device.

    Raises:
        ValueError: the block sizes do not fit the weight.
    """
    m, n = len(x), w.shape[0]
    if config is None:
        config = blocks.chosen("matvec", case(m, w), default(m, w))
    tiles = unpack.tiles(w)
    if config.tiles > tiles:
        raise ValueError(f"tiles is {config.tiles}, but the weight [N={n}] has {tiles}")
    count = unpack.rows(w, _SPREAD)
    steps = -(-count // (config.units * config.split))
    pad = steps * config.units * config.split - count
    x = unpack.arranged(x.astype(jnp.float32), w, _SPREAD, fields_first=True, pad=pad)
    sums = None
    if w.low is not None:  # weight = ... + low, so the sums of x over groups belong to it
        sums = x.reshape(m, unpack.groups(w.fmt), -1, x.shape[-1]).sum(2)
    parts = pl.pallas_call(
        functools.partial(_kernel, config=config, steps=steps, tiles=tiles, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((config.split, m, tiles, TILE), jnp.float32),
        grid=(-(-tiles // config.tiles), config.split),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=interpret,
        name=NAME,
    )(x, sums, unpack.table(w.fmt), unpack.references(w))
    out = parts[0] if config.split == 1 else parts.sum(0)
    return out.reshape(m, -1)[:, :n]


def _kernel(
    x: Any,
    sums: Any,
    table: Any,
    w: QTensor,
    out: Any,
    *,
    config: Config,
    steps: int,
    tiles: int,
    interpret: bool,
) -> None:
    """Of x [M, fields, rows], sums [M, groups, rows] and the planes; out [split, M, J, 16]."""
    m, each = x.shape[:2]
    shape = (config.tiles, config.units, TILE)
    part = pl.program_id(1)
    tile0 = pl.program_id(0) * config.tiles
    if tiles % config.tiles:  # the last programs may share tiles: they write the same
        tile0 = jnp.minimum(tile0, tiles - config.tiles)
    fma = _fma_interpreted if interpret else _fma
    tile, unit, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))

    def step(t: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
        row0 = (part * steps + t) * config.units
        place = unpack.Place(tile=tile0 + tile, row=row0 + unit, lane=lane)
        place = unpack.within(w, place, _SPREAD, config.units * config.split * steps)
        here = pl.ds(row0, config.units)
        done = list(total)
        first = 0
        for g, group in enumerate(unpack.groups_at(w, table, place, _SPREAD)):
            partial = [jnp.zeros(shape, jnp.float32)] * m
            for field, q in enumerate(group.integers, first):
                for i in range(m):
                    own = jnp.broadcast_to(_along_units(x[i, field, here]), shape)
                    partial[i] = fma(q, own, partial[i])
            first += each // unpack.groups(w.fmt)
            for i in range(m):
                value = partial[i] if group.scale is None else partial[i] * group.scale
                if group.low is not None:
                    value = value + group.low * _along_units(sums[i, g, here])
                done[i] = done[i] + value
        return tuple(done)

    total = lax.fori_loop(0, steps, step, (jnp.zeros(shape, jnp.float32),) * m)
    for i in range(m):
        out[part, i, pl.ds(tile0, config.tiles), :] = jnp.sum(total[i], axis=1)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c in one instruction, for which there is no primitive; Triton may make two of it."""
    (out,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=(a, b, c),
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=(jax.ShapeDtypeStruct(c.shape, jnp.float32),),
    )
    return out


def _fma_interpreted(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _along_units(values: Float[Array, " units"]) -> Float[Array, "1 units 1"]:
    return values[None, :, None]
