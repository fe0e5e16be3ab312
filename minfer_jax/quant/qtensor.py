"""The quantised weight: a frozen pytree of planes with a static format and shape."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax.quant.formats import FORMATS, Format, HostPlanes

# Rows are unpacked and transposed in pieces of about this size: they stay in cache.
_CHUNK_BYTES = 4 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QTensor:
    """A weight of N rows (outputs) and K columns (contraction), packed; or a stack of them.

    What the planes hold, and the formula of a weight, is at the head of `quant/formats/base.py`.
    The following holds:

        shape == (N, K), and K % fmt.block == 0
        bits[i].shape == (K * fmt.widths[i] // 32, N), uint32
        scale.shape == low.shape == (K // fmt.super_block, N)
        sub.shape == sublow.shape == (K // fmt.group, N)
        dense.shape == (K, N), and every other plane is absent, if fmt has no widths

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
    dense: Array | None = None
    layer: Array | None = None

    def at(self, layer: int | Array) -> "QTensor":
        """One weight of a stack."""
        return dataclasses.replace(self, layer=jnp.int32(layer))

    def own(self, plane: Array) -> Array:
        """The part of a plane that belongs to this weight."""
        if self.layer is None:
            return plane
        return jax.lax.dynamic_index_in_dim(plane, self.layer, axis=0, keepdims=False)

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
    return _to_device(_pack([[raw]], FORMATS[ggml_type], lambda: None), stacked=False)


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
    return _to_device(_pack(raws, FORMATS[ggml_type], done), stacked=True)


@dataclass(frozen=True)
class _Packed:
    """Host planes of L stacked weights, [L, ..., N] each."""

    fmt: Format
    shape: tuple[int, int]
    planes: dict[str, list[np.ndarray]]


def _pack(raws: Sequence[Sequence[np.ndarray]], fmt: Format, done: Callable[[], None]) -> _Packed:
    n = sum(len(raw) for raw in raws[0])
    row_bytes = raws[0][0].shape[1]
    blocks = row_bytes // fmt.block_bytes
    rows = max(1, _CHUNK_BYTES // row_bytes)
    planes: dict[str, list[np.ndarray]] = {}
    for layer, parts in enumerate(raws):
        at = 0
        for raw in parts:
            for start in range(0, len(raw), rows):
                piece = raw[start : start + rows].reshape(-1, blocks, fmt.block_bytes)
                for name, arrays in _named(fmt.unpack(piece)).items():
                    if name not in planes:
                        shapes = [(len(raws), a.shape[1], n) for a in arrays]
                        planes[name] = [
                            np.empty(s, a.dtype) for s, a in zip(shapes, arrays, strict=True)
                        ]
                    for whole, a in zip(planes[name], arrays, strict=True):
                        whole[layer, :, at : at + len(piece)] = a.T
                at += len(piece)
            done()
    return _Packed(fmt, (n, blocks * fmt.block), planes)


def _to_device(packed: _Packed, *, stacked: bool) -> QTensor:
    device = {}
    while packed.planes:  # one plane at a time is there twice
        name, arrays = packed.planes.popitem()
        device[name] = tuple(jnp.asarray(a if stacked else a[0]) for a in arrays)
    return QTensor(
        fmt=packed.fmt,
        shape=packed.shape,
        bits=device.pop("bits", ()),
        **{name: arrays[0] for name, arrays in device.items()},
    )


def _named(planes: HostPlanes) -> dict[str, Sequence[np.ndarray]]:
    """The planes that are present, each as a sequence."""
    named = {name: getattr(planes, name) for name in _PLANES}
    return {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in named.items()
        if value is not None and len(value)
    }
