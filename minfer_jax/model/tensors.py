"""Hands out the tensors of a file by name, packed for the device, and keeps account of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from minfer_jax.gguf import GGUFFile, TensorInfo
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.quant import qtensor, xla
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.qtensor import QTensor


@dataclass
class Tensors:
    """The tensors of a file, and what came of asking for them.

    Attributes:
        file: an open GGUF file.
        on_bytes: called with the size of each weight once it is read.
        problems: what `check` found wrong.
        used: names that were checked.
        by_layer: the tensors of each block by prefix, such as "blk.0.".
    """

    file: GGUFFile
    on_bytes: Callable[[int], None]
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    by_layer: dict[str, list[tuple[str, TensorInfo]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, info in self.file.tensors.items():
            if name.startswith("blk."):
                prefix = ".".join(name.split(".")[:2]) + "."
                self.by_layer.setdefault(prefix, []).append((name, info))

    def has(self, name: str) -> bool:
        """Whether the file has such a tensor."""
        return name in self.file.tensors

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Note a problem unless the tensor is there with this shape and a type that can be read."""
        self.used.add(name)
        info = self.file.tensors.get(name)
        if info is None:
            self.problems.append(f"{name} is missing")
        elif 0 in info.shape:
            self.problems.append(f"{name} has shape {list(info.shape)}, expected one with elements")
        elif info.shape != shape:
            self.problems.append(f"{name} has shape {list(info.shape)}, expected {list(shape)}")
        elif info.ggml_type not in FORMATS:
            kind = GGML_TYPES[info.ggml_type].name
            known = ", ".join(sorted(f.name for f in FORMATS.values()))
            self.problems.append(f"{name} has type {kind}, which cannot be read; expected {known}")

    def kind(self, name: str) -> tuple[int, bool, bool]:
        """What maps that share a stack have in common: their type, and which extras they have."""
        return (
            self.file.tensors[f"{name}.weight"].ggml_type,
            self.has(f"{name}.scale"),
            self.has(f"{name}.bias"),
        )

    def vector(self, name: str) -> np.ndarray:
        """A small tensor as float32."""
        raw, info = self.file.raw(name), self.file.tensors[name]
        fmt = FORMATS[info.ggml_type]
        if fmt.widths:  # converters leave these as plain floats, but nothing forbids it
            weight = qtensor.from_blocks(raw.reshape(-1, raw.shape[-1]), info.ggml_type)
            values = np.asarray(xla.dequantize(weight, jnp.dtype(jnp.float32))).T
        else:
            planes = fmt.unpack(raw.reshape(1, -1, fmt.block_bytes))
            assert planes.dense is not None
            values = planes.dense.astype(np.float32)
        return np.ascontiguousarray(values).reshape(info.shape)

    def weights(
        self, names: Sequence[Sequence[str]], *, stacked: bool = True, n_expert: int = 0
    ) -> QTensor:
        """Tensors of one type: the outer sequence stacks layers, the inner one rows.

        Of experts, tensors [E, N, K], the stack is of L * E weights.
        """
        ggml_type = self.file.tensors[names[0][0]].ggml_type
        raws = [[self.file.raw(name) for name in parts] for parts in names]
        if n_expert:
            raws = [[whole[e] for whole in parts] for parts in raws for e in range(n_expert)]
        # A tensor is done with after its last part.
        parts = range(max(n_expert, 1))
        ends = [n if e == parts[-1] else None for some in names for e in parts for n in some]
        done = self._done(ends)
        if stacked:
            return qtensor.stack_blocks(raws, ggml_type, done=done)
        packed = qtensor.from_blocks(raws[0][0], ggml_type)
        done()
        return packed

    def _done(self, names: Sequence[str | None]) -> Callable[[], None]:
        """To be called after each part was copied, of which some end a tensor, named: gives its
        pages back, reports its size."""
        rest = iter(names)

        def done() -> None:
            name = next(rest)
            if name is not None:
                self.file.release(name)
                self.on_bytes(self.file.tensors[name].nbytes)

        return done
