"""The quantised weight: a frozen pytree of planes with a static format and shape."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax import memory
from minfer_jax.quant.formats import FORMATS, Format, HostPlanes
from minfer_jax.quant.formats.base import TILE

# Rows are unpacked and transposed in pieces of about this size: they stay in cache.
_CHUNK_BYTES = 1 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QTensor:
    """A weight of N rows (outputs) and K columns (contraction), packed; or a stack of them.

    What the planes hold, and the formula of a weight, is at the head of `quant/formats/base.py`.
    The following holds:

        shape == (N, K), and K % fmt.block == 0
        bits[i].shape == (tiles, K * fmt.widths[i] // 32, 16), uint32, with 16 * tiles >= N
        scale.shape == low.shape == (tiles, K // fmt.super_block, 16)
        sub.shape == sublow.shape == (tiles, K // fmt.group, 16)
        high.shape == (tiles, K // 32, 16)
        dense.shape == (tiles, K, 16), and every other plane is absent, if fmt has no widths

    A stack has a leading axis on every plane, and the shape of one weight; `layer` says which of
    them is meant. It stays an index until the product reads the planes, so that no weight is ever
    copied out of its stack.
    """

    fmt: Format = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})
    bits: tuple[Array, ...] = ()
    scale: Array | None = None
    sub: Array | None = None
    low: Array | None = None
    sublow: Array | None = None
    high: Array | None = None
    dense: Array | None = None
    layer: Array | None = None

    def at(self, layer: int | Array) -> "QTensor":
        """One weight of a stack."""
        return dataclasses.replace(self, layer=jnp.asarray(layer, jnp.uint32))

    def own(self, plane: Array) -> Array:
        """The part of a plane that belongs to this weight."""
        if self.layer is None:
            return plane
        return jax.lax.dynamic_index_in_dim(plane, self.layer, axis=0, keepdims=False)

    @property
    def stacked(self) -> bool:
        """Whether it is a stack of weights."""
        plane = self.bits[0] if self.dense is None else self.dense
        return plane.ndim == 4

    @property
    def unit(self) -> int:
        """Columns that a product handles at a time: 32, or a divisor for plain floats of odd K."""
        return 32 if self.fmt.widths else math.gcd(self.shape[1], 32)


_PLANES = tuple(f.name for f in dataclasses.fields(HostPlanes))


def from_blocks(raw: np.ndarray, ggml_type: int) -> QTensor:
    """Unpack the rows of a GGUF tensor into planes.

    Args:
        raw: uint8 [N, bytes a row], as in the file (may be a view on a memory map).
        ggml_type: the tensor's type; a key of FORMATS.

    Returns:
        The packed weight, [N, K].
    """
    return _pack([[raw]], FORMATS[ggml_type], lambda: None, stacked=False)


def stack_blocks(
    raws: Sequence[Sequence[np.ndarray]],
    ggml_type: int,
    *,
    done: Callable[[], None] = lambda: None,
) -> QTensor:
    """Unpack tensors of one format into one weight, as a stack of layers.

    Args:
        raws: for each of L layers the same number of uint8 [N_i, bytes a row], whose rows are put
            side by side, N in all.
        ggml_type: the type of all of them; a key of FORMATS.
        done: called after each tensor was copied, in order.

    Returns:
        A packed weight whose planes have a leading axis L; its shape is that of one layer, (N, K).
    """
    return _pack(raws, FORMATS[ggml_type], done, stacked=True)


def _pack(
    raws: Sequence[Sequence[np.ndarray]],
    fmt: Format,
    done: Callable[[], None],
    *,
    stacked: bool,
) -> QTensor:
    n = sum(len(raw) for raw in raws[0])
    row_bytes = raws[0][0].shape[1]
    blocks = row_bytes // fmt.block_bytes
    rows = max(TILE, _CHUNK_BYTES // row_bytes // TILE * TILE)
    planes: dict[str, list[np.ndarray]] = {}
    for layer, parts in enumerate(raws):
        at = 0
        for raw in parts:
            for start in range(0, len(raw), rows):
                piece = raw[start : start + rows].reshape(-1, blocks, fmt.block_bytes)
                named = _named(fmt.unpack(piece))
                if not planes:
                    lead = (len(raws), -(-n // TILE)) if stacked else (-(-n // TILE),)
                    planes = {
                        name: [
                            _zeros((*lead, math.prod(a.shape[1:]), TILE), a.dtype) for a in arrays
                        ]
                        for name, arrays in named.items()
                    }
                for name, arrays in named.items():
                    for whole, a in zip(planes[name], arrays, strict=True):
                        _put(whole[layer] if stacked else whole, at, a)
                at += len(piece)
            done()
    device = {name: tuple(map(jax.device_put, arrays)) for name, arrays in planes.items()}
    jax.block_until_ready(device)  # a GPU has copies: the host's go before it makes more
    return QTensor(
        fmt=fmt,
        shape=(n, blocks * fmt.block),
        bits=device.pop("bits", ()),
        **{name: arrays[0] for name, arrays in device.items()},
    )


def _put(tiles: np.ndarray, at: int, rows: np.ndarray) -> None:
    """Write rows [n, blocks, ...] into tiles [tiles, R, 16], from output `at` on."""
    tiles = tiles.reshape(len(tiles), *rows.shape[1:], TILE)
    while len(rows):
        tile, lane = divmod(at, TILE)
        if lane or len(rows) < TILE:
            n = min(TILE - lane, len(rows))
            tiles[tile, ..., lane : lane + n] = np.moveaxis(rows[:n], 0, -1)
        else:
            n = len(rows) // TILE * TILE
            whole = rows[:n].reshape(-1, TILE, *rows.shape[1:])
            tiles[tile : tile + len(whole)] = np.moveaxis(whole, 1, -1)
        at, rows = at + n, rows[n:]


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros on pages of their own: aligned, so that a CPU device takes them as they are."""
    pages = memory.large_pages(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def _named(planes: HostPlanes) -> dict[str, Sequence[np.ndarray]]:
    """The planes that are present, each as a sequence."""
    named = {name: getattr(planes, name) for name in _PLANES}
    return {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in named.items()
        if value is not None and len(value)
    }
