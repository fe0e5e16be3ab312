"""Hands out the tensors of a file by name, packed for the device, and keeps account of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from minfer_jax.gguf import GGUFFile, TensorInfo
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.quant import qtensor
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.qtensor import QTensor

F32 = 0


@dataclass
class Tensors:
    """The tensors of a file, and what came of asking for them.

    Attributes:
        file: an open GGUF file.
        on_bytes: called with the size of each weight once it is read.
        problems: what `check` found wrong.
        used: names that were checked.
        expanded: by type without a packed form, bytes of memory beyond those of the file.
        by_layer: the tensors of each block by prefix, such as "blk.0.".
    """

    file: GGUFFile
    on_bytes: Callable[[int], None]
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    expanded: dict[str, int] = field(default_factory=dict)
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
        elif info.shape != shape:
            self.problems.append(f"{name} has shape {list(info.shape)}, expected {list(shape)}")
        elif info.ggml_type not in FORMATS and not _can_expand(info.ggml_type):
            kind = GGML_TYPES[info.ggml_type].name
            known = ", ".join(sorted(f.name for f in FORMATS.values()))
            self.problems.append(f"{name} has type {kind}, which cannot be read; packed: {known}")

    def kind(self, name: str) -> tuple[int, bool, bool]:
        """What maps that share a stack have in common: their type, and which extras they have."""
        return (
            self.file.tensors[f"{name}.weight"].ggml_type,
            self.has(f"{name}.scale"),
            self.has(f"{name}.bias"),
        )

    def vector(self, name: str) -> np.ndarray:
        """A small tensor as float32."""
        return self._expand(name).reshape(self.file.tensors[name].shape)

    def weights(
        self, names: Sequence[Sequence[str]], *, stacked: bool = True, n_expert: int = 0
    ) -> QTensor:
        """Tensors of one type: the outer sequence stacks layers, the inner one rows.

        Of experts, tensors [E, N, K], the stack is of L * E weights.
        """
        flat = [name for parts in names for name in parts]
        ggml_type = self.file.tensors[flat[0]].ggml_type
        if ggml_type in FORMATS:
            read = self.file.raw
        else:
            read = self._expanded_bytes
            infos = [self.file.tensors[name] for name in flat]
            extra = sum(4 * math.prod(info.shape) - info.nbytes for info in infos)
            kind = GGML_TYPES[ggml_type].name
            self.expanded[kind] = self.expanded.get(kind, 0) + extra
            ggml_type = F32
        if not stacked:
            packed = qtensor.from_blocks(read(flat[0]), ggml_type)
            self._done(flat)()
            return packed
        if not n_expert:
            raws = [[read(name) for name in parts] for parts in names]
            return qtensor.stack_blocks(raws, ggml_type, done=self._done(flat))
        layers = [[read(name) for name in parts] for parts in names]
        raws = [[whole[e] for whole in wholes] for wholes in layers for e in range(n_expert)]
        # A tensor is done with after its last expert.
        read_parts = [
            name if e == n_expert - 1 else None
            for parts in names
            for e in range(n_expert)
            for name in parts
        ]
        return qtensor.stack_blocks(raws, ggml_type, done=self._done(read_parts))

    def _expanded_bytes(self, name: str) -> np.ndarray:
        shape = self.file.tensors[name].shape
        return self._expand(name).reshape(shape).view(np.uint8)

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

    def _expand(self, name: str) -> np.ndarray:
        """A tensor as float32, rows as they lie in the file."""
        raw, ggml_type = self.file.raw(name), self.file.tensors[name].ggml_type
        if ggml_type == F32:
            return raw.view(np.float32)
        gguf_py = _gguf_py()
        values = gguf_py.quants.dequantize(raw, gguf_py.GGMLQuantizationType(ggml_type))
        return np.ascontiguousarray(values, np.float32)


def _can_expand(ggml_type: int) -> bool:
    """Whether gguf-py can decode a type."""
    gguf_py = _gguf_py()
    return ggml_type in gguf_py.GGMLQuantizationType.__members__.values() and (
        gguf_py.GGMLQuantizationType(ggml_type) in gguf_py.quants._type_traits
    )


def _gguf_py() -> ModuleType:
    """Imported when first needed: most models never need it, and it takes 0.07 s."""
    import gguf

    return gguf
