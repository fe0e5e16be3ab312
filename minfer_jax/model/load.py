"""From a GGUF file to ModelConfig and Params.

Tensors become Linear and norm arrays by ggml's names; every missing or mis-shaped one is reported
at once. Weights are packed as they are read, and the file's pages are given back, so that the peak
is one copy of the file plus the largest plane of a stack.
"""

import dataclasses
import logging
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from minfer_jax import memory
from minfer_jax.gguf import GGUFFile
from minfer_jax.model import precision as precisions
from minfer_jax.model import registry, rope
from minfer_jax.model.archs.base import Arch, read_config
from minfer_jax.model.config import ModelConfig, ModelError
from minfer_jax.model.keys import Keys
from minfer_jax.model.params import LayerParams, Linear, Params
from minfer_jax.model.tensors import Tensors
from minfer_jax.quant.prologue import RmsNorm

log = logging.getLogger("minfer_jax")

# In files but not in the computation: calibration of activations, a classifier's head (llama.cpp
# reads neither).
UNUSED_SUFFIXES = (".input_scale",)
UNUSED = frozenset({"cls.output.weight", "cls.output.bias"})
QKV = ("attn_q", "attn_k", "attn_v")
EXTRAS = ("scale", "bias")


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
        on_bytes: called with the size of each weight once it is read, for a progress bar.

    Raises:
        ModelError: the architecture is not supported, or keys or tensors are missing, mis-shaped or
            of a type that cannot be read. The message begins with the file's path.
        ValueError: there is no such precision.
    """
    cfg = read_model_config(file, precision)
    try:
        params = _load_params(Tensors(file, on_bytes), cfg, registry.find(cfg.arch))
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    memory.trim()
    return cfg, params


def read_model_config(file: GGUFFile, precision: str = "default") -> ModelConfig:
    """The configuration alone, without reading a weight. Errors as for `load_model`."""
    rounding, cache_dtype = precisions.roundings(precision)
    try:
        arch = registry.find(file.architecture)
        cfg = read_config(arch, Keys(file.metadata, arch.name), _n_vocab(file))
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    return dataclasses.replace(cfg, precision=precision, rounding=rounding, cache_dtype=cache_dtype)


def _n_vocab(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        found = "no such tensor" if info is None else f"shape {list(info.shape)}"
        raise ModelError(f"token_embd.weight: found {found}, expected [vocabulary, width]")
    return info.shape[0]


def _load_params(t: Tensors, cfg: ModelConfig, arch: Arch) -> Params:
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
    return Params(
        token_embd=token_embd,
        groups=tuple(_load_group(t, layers, arch, cfg) for layers in groups),
        output_norm=RmsNorm(weight=jnp.asarray(t.vector("output_norm.weight")), eps=cfg.norm_eps),
        output=Linear(weight=head, **extras),
        rope=tuple(jnp.asarray(rope.frequencies(spec, factors)) for spec in cfg.ropes),
        order=_order(groups),
    )


def _check_layer(t: Tensors, prefix: str, cfg: ModelConfig, arch: Arch) -> None:
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    if t.has(f"{prefix}attn_qkv.weight"):
        _check_linear(t, f"{prefix}attn_qkv", q + 2 * kv, cfg.n_embd)
        for name, width in zip(QKV, (q, kv, kv), strict=True):
            if t.has(f"{prefix}{name}.bias"):
                t.check(f"{prefix}{name}.bias", (width,))
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


def _check_linear(t: Tensors, name: str, n: int, k: int) -> None:
    t.check(f"{name}.weight", (n, k))
    _check_extras(t, name, n)


def _check_extras(t: Tensors, name: str, n: int) -> None:
    for extra, shape in (("bias", (n,)), ("scale", (1,))):
        if t.has(f"{name}.{extra}"):
            t.check(f"{name}.{extra}", shape)


def _groups(t: Tensors, cfg: ModelConfig) -> list[list[int]]:
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


def _load_group(t: Tensors, layers: list[int], arch: Arch, cfg: ModelConfig) -> LayerParams:
    def norm(name: str) -> RmsNorm:
        weight = jnp.asarray(np.stack([t.vector(f"blk.{i}.{name}.weight") for i in layers]))
        return RmsNorm(weight=weight, eps=cfg.norm_eps)

    def norm_if(name: str) -> RmsNorm | None:
        return norm(name) if name in arch.norms else None

    def linears(*parts: str, scale_bias: bool = False) -> tuple[Linear, ...]:
        return _linears(t, [[f"blk.{i}.{p}" for p in parts] for i in layers], scale_bias)

    fused = t.has(f"blk.{layers[0]}.attn_qkv.weight")
    return LayerParams(
        attn_norm=norm("attn_norm"),
        qkv=_fused_qkv(t, layers) if fused else linears(*QKV),
        q_norm=norm_if("attn_q_norm"),
        k_norm=norm_if("attn_k_norm"),
        attn_output=linears("attn_output")[0],
        post_attn_norm=norm_if("post_attention_norm"),
        ffn_norm=norm("ffn_norm"),
        gate_up=linears("ffn_gate", "ffn_up", scale_bias=True),
        ffn_down=linears("ffn_down", scale_bias=True)[0],
        post_ffn_norm=norm_if("post_ffw_norm"),
    )


def _fused_qkv(t: Tensors, layers: list[int]) -> tuple[Linear, ...]:
    """q, k and v in one tensor; old files keep the three biases apart (create_tensor_qkv)."""
    (fused,) = _linears(t, [[f"blk.{i}.attn_qkv"] for i in layers], scale_bias=False)
    if fused.bias is None and t.has(f"blk.{layers[0]}.attn_q.bias"):
        rows = [[t.vector(f"blk.{i}.{name}.bias") for name in QKV] for i in layers]
        bias = jnp.asarray(np.stack([np.concatenate(row) for row in rows]))
        fused = dataclasses.replace(fused, bias=bias)
    return (fused,)


def _linears(t: Tensors, names: list[list[str]], scale_bias: bool) -> tuple[Linear, ...]:
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


def _warn_of_unused(t: Tensors) -> None:
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
