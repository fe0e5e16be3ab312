"""From a GGUF file to ModelConfig and Params.

Tensors become Linear and norm arrays by ggml's names; every missing or mis-shaped one is reported
at once. Weights are packed as they are read, and the file's pages are given back, so that the peak
is one copy of the file plus the largest tensor.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import gguf as gguf_py
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax import memory
from minfer_jax.gguf import GGUFFile, TensorInfo
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.model import precision as precisions
from minfer_jax.model import registry, rope
from minfer_jax.model.archs.base import Arch, read_config
from minfer_jax.model.config import Keys, ModelConfig, ModelError
from minfer_jax.model.params import LayerParams, Linear, Params
from minfer_jax.quant import qtensor
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.qtensor import QTensor

log = logging.getLogger("minfer_jax")

# In files but not in the computation: calibration of activations, a classifier's head (llama.cpp
# reads neither).
UNUSED_SUFFIXES = (".input_scale",)
UNUSED = frozenset({"cls.output.weight", "cls.output.bias"})
QKV = ("attn_q", "attn_k", "attn_v")
EXTRAS = ("scale", "bias")
F32 = 0


def load_model(
    file: GGUFFile,
    *,
    precision: str = "default",
    on_bytes: Callable[[int], None] = lambda n: None,
) -> tuple[ModelConfig, Params]:
    """Read configuration and weights.

    Args:
        file: an open GGUF file.
        precision: "highest" or "default".
        on_bytes: called with the size of each tensor once it is loaded, for a progress bar.

    Raises:
        ModelError: the architecture is not supported, or keys or tensors are missing, mis-shaped or
            of a type that cannot be read. The message begins with the file's path.
        ValueError: there is no such precision.
    """
    cfg = read_model_config(file, precision)
    try:
        params = _load_params(_Tensors(file, on_bytes), cfg, registry.find(cfg.arch))
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    memory.trim()
    return cfg, params


def read_model_config(file: GGUFFile, precision: str = "default") -> ModelConfig:
    """The configuration alone, without reading a weight. Errors as for `load_model`."""
    dtype, cache_dtype = precisions.dtypes(precision)
    try:
        arch = registry.find(file.architecture)
        cfg = read_config(arch, Keys(file.metadata, arch.name), _n_vocab(file))
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    return dataclasses.replace(cfg, precision=precision, dtype=dtype, cache_dtype=cache_dtype)


def _n_vocab(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        found = "no such tensor" if info is None else f"shape {list(info.shape)}"
        raise ModelError(f"token_embd.weight: found {found}, expected [vocabulary, width]")
    return info.shape[0]


@dataclass
class _Tensors:
    """Hands out tensors by name, checks shapes, and remembers problems and what was used."""

    file: GGUFFile
    on_bytes: Callable[[int], None]
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    expanded: dict[str, int] = field(default_factory=dict)  # type name -> bytes beyond the file's

    def __post_init__(self) -> None:
        self.by_layer: dict[str, list[tuple[str, TensorInfo]]] = {}
        for name, info in self.file.tensors.items():
            if name.startswith("blk."):
                prefix = ".".join(name.split(".")[:2]) + "."
                self.by_layer.setdefault(prefix, []).append((name, info))

    def has(self, name: str) -> bool:
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

    def weights(self, names: Sequence[Sequence[str]], *, stacked: bool = True) -> QTensor:
        """Tensors of one type: the outer sequence stacks layers, the inner one rows."""
        flat = [name for parts in names for name in parts]
        ggml_type = self.file.tensors[flat[0]].ggml_type
        if ggml_type in FORMATS:
            raws = [[self.file.raw(name) for name in parts] for parts in names]
        else:
            raws = [[self._expand(name).view(np.uint8) for name in parts] for parts in names]
            infos = [self.file.tensors[name] for name in flat]
            extra = sum(4 * math.prod(info.shape) - info.nbytes for info in infos)
            kind = GGML_TYPES[ggml_type].name
            self.expanded[kind] = self.expanded.get(kind, 0) + extra
            ggml_type = F32
        if stacked:
            packed = qtensor.stack_blocks(raws, ggml_type, done=self._done(flat))
        else:
            packed = qtensor.from_blocks(raws[0][0], ggml_type)
            self._done(flat)()
        return packed

    def _done(self, names: Sequence[str]) -> Callable[[], None]:
        """To be called after each tensor was copied: gives its pages back, reports its size."""
        rest = iter(names)

        def done() -> None:
            name = next(rest)
            self.file.release(name)
            self.on_bytes(self.file.tensors[name].nbytes)

        return done

    def _expand(self, name: str) -> np.ndarray:
        kind = gguf_py.GGMLQuantizationType(self.file.tensors[name].ggml_type)
        values = gguf_py.quants.dequantize(self.file.raw(name), kind)
        return np.ascontiguousarray(values, np.float32)


def _can_expand(ggml_type: int) -> bool:
    """Whether gguf-py can decode a type."""
    return ggml_type in gguf_py.GGMLQuantizationType.__members__.values() and (
        gguf_py.GGMLQuantizationType(ggml_type) in gguf_py.quants._type_traits  # pyright: ignore
    )


def _load_params(t: _Tensors, cfg: ModelConfig, arch: Arch) -> Params:
    tied = not t.has("output.weight")
    pairs = cfg.ropes[0].dims // 2

    # First everything is checked, so that a broken file is refused at once and with all that is
    # wrong.
    t.check("token_embd.weight", (cfg.n_vocab, cfg.n_embd))
    t.check("output_norm.weight", (cfg.n_embd,))
    if tied:
        _check_extras(t, "output", cfg.n_vocab)
    else:
        _check_linear(t, "output", cfg.n_vocab, cfg.n_embd)
    if t.has("rope_freqs.weight"):
        t.check("rope_freqs.weight", (pairs,))
    for i in range(cfg.n_layer):
        _check_layer(t, f"blk.{i}.", cfg, arch)
    if t.problems:
        more = f" (and {len(t.problems) - 8} more)" if len(t.problems) > 8 else ""
        raise ModelError("; ".join(t.problems[:8]) + more)
    _warn_of_unused(t)

    groups = _groups(t, cfg)
    token_embd = t.weights([["token_embd.weight"]], stacked=False)
    head = token_embd if tied else t.weights([["output.weight"]], stacked=False)
    extras = {e: jnp.asarray(t.vector(f"output.{e}")) for e in EXTRAS if t.has(f"output.{e}")}
    factors = t.vector("rope_freqs.weight") if t.has("rope_freqs.weight") else None
    params = Params(
        token_embd=token_embd,
        groups=tuple(_load_group(t, layers, arch) for layers in groups),
        output_norm=jnp.asarray(t.vector("output_norm.weight")),
        output=Linear(weight=head, **extras),
        rope=tuple(jnp.asarray(rope.frequencies(spec, factors)) for spec in cfg.ropes),
        order=_order(groups),
    )
    for kind, extra in t.expanded.items():
        log.warning(
            "%s has no packed form yet: kept as float32, %.0f MB more than in the file",
            kind,
            extra / 1e6,
        )
    return params


def _check_layer(t: _Tensors, prefix: str, cfg: ModelConfig, arch: Arch) -> None:
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    if t.has(f"{prefix}attn_qkv.weight"):
        _check_linear(t, f"{prefix}attn_qkv", q + 2 * kv, cfg.n_embd)
    else:
        for name, width in zip(QKV, (q, kv, kv), strict=True):
            _check_linear(t, f"{prefix}{name}", width, cfg.n_embd)
    _check_linear(t, f"{prefix}attn_output", cfg.n_embd, q)
    _check_linear(t, f"{prefix}ffn_gate", cfg.n_ff, cfg.n_embd)
    _check_linear(t, f"{prefix}ffn_up", cfg.n_ff, cfg.n_embd)
    _check_linear(t, f"{prefix}ffn_down", cfg.n_embd, cfg.n_ff)
    for norm in ("attn_norm", "ffn_norm", *sorted(arch.norms)):
        per_head = norm in ("attn_q_norm", "attn_k_norm")
        t.check(f"{prefix}{norm}.weight", (cfg.head_dim if per_head else cfg.n_embd,))


def _check_linear(t: _Tensors, name: str, n: int, k: int) -> None:
    t.check(f"{name}.weight", (n, k))
    _check_extras(t, name, n)


def _check_extras(t: _Tensors, name: str, n: int) -> None:
    for extra, shape in (("bias", (n,)), ("scale", (1,))):
        if t.has(f"{name}.{extra}"):
            t.check(f"{name}.{extra}", shape)


def _groups(t: _Tensors, cfg: ModelConfig) -> list[list[int]]:
    """Layers that are alike, in the order in which the first of each group appears."""
    groups: dict[object, list[int]] = {}
    for i, spec in enumerate(cfg.layers):
        prefix = f"blk.{i}."
        tensors = {
            (name.removeprefix(prefix), info.ggml_type)
            for name, info in t.by_layer.get(prefix, ())
            if name in t.used
        }
        groups.setdefault((spec, frozenset(tensors)), []).append(i)
    return list(groups.values())


def _order(groups: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """(group, index in the group) of every layer."""
    places = {i: (g, j) for g, layers in enumerate(groups) for j, i in enumerate(layers)}
    return tuple(places[i] for i in range(len(places)))


def _load_group(t: _Tensors, layers: list[int], arch: Arch) -> LayerParams:
    def norm(name: str) -> Array:
        return jnp.asarray(np.stack([t.vector(f"blk.{i}.{name}.weight") for i in layers]))

    def norm_if(name: str) -> Array | None:
        return norm(name) if name in arch.norms else None

    def linears(*parts: str, scale_bias: bool = False) -> tuple[Linear, ...]:
        return _linears(t, [[f"blk.{i}.{p}" for p in parts] for i in layers], scale_bias)

    fused = t.has(f"blk.{layers[0]}.attn_qkv.weight")
    return LayerParams(
        attn_norm=norm("attn_norm"),
        qkv=linears("attn_qkv") if fused else linears(*QKV),
        q_norm=norm_if("attn_q_norm"),
        k_norm=norm_if("attn_k_norm"),
        attn_output=linears("attn_output")[0],
        post_attn_norm=norm_if("post_attention_norm"),
        ffn_norm=norm("ffn_norm"),
        gate_up=linears("ffn_gate", "ffn_up", scale_bias=True),
        ffn_down=linears("ffn_down", scale_bias=True)[0],
        post_ffn_norm=norm_if("post_ffw_norm"),
    )


def _linears(t: _Tensors, names: list[list[str]], scale_bias: bool) -> tuple[Linear, ...]:
    """Linear maps of one input, for every layer of a group.

    Args:
        t: where they come from.
        names: for each layer the maps whose outputs lie side by side.
        scale_bias: the scale multiplies the bias too: llama.cpp's build_ffn scales after it adds
            the bias, where its attention scales before.

    Returns:
        One stacked Linear for all maps if they are of one kind, else one for each.
    """
    if len({t.kind(name) for name in names[0]}) > 1:
        columns = zip(*names, strict=True)
        return tuple(_linears(t, [[name] for name in column], scale_bias)[0] for column in columns)
    _, has_scale, has_bias = t.kind(names[0][0])
    weight = t.weights([[f"{name}.weight" for name in parts] for parts in names])

    def extra(which: str) -> np.ndarray:
        """[layers, N]; a single value is repeated for the rows of its map."""
        rows = [
            [
                np.broadcast_to(
                    t.vector(f"{name}.{which}"), t.file.tensors[f"{name}.weight"].shape[:1]
                )
                for name in parts
            ]
            for parts in names
        ]
        return np.stack([np.concatenate(row) for row in rows])

    scale = extra("scale") if has_scale else None
    bias = extra("bias") if has_bias else None
    if scale is not None and bias is not None and scale_bias:
        bias = bias * scale
    return (
        Linear(
            weight=weight,
            scale=None if scale is None else jnp.asarray(scale),
            bias=None if bias is None else jnp.asarray(bias),
        ),
    )


def _warn_of_unused(t: _Tensors) -> None:
    unused = [
        name
        for name in t.file.tensors
        if name not in t.used and name not in UNUSED and not name.endswith(UNUSED_SUFFIXES)
    ]
    if unused:
        log.warning(
            "%s: %d tensors are not used by architecture %s: %s%s",
            t.file.path,
            len(unused),
            t.file.architecture,
            ", ".join(unused[:5]),
            ", ..." if len(unused) > 5 else "",
        )
