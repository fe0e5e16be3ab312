"""The tensors of a block by ggml's names: what must be there, and how it becomes LayerParams."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax.model import maps
from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig, ModelError
from minfer_jax.model.params import Experts, LayerParams, Linear, Mlp
from minfer_jax.model.tensors import Tensors
from minfer_jax.quant.prologue import LayerNorm, Norm, RmsNorm

QKV = ("attn_q", "attn_k", "attn_v")


def check(t: Tensors, prefix: str, cfg: ModelConfig, arch: Arch) -> None:
    """Note what is wrong with the tensors of a block; `prefix` is "blk.0." or such."""
    widths = (
        cfg.n_head * cfg.head_dim,
        cfg.n_head_kv * cfg.head_dim,
        cfg.n_head_kv * cfg.value_dim,
    )
    out = cfg.n_head * cfg.value_dim
    if t.has(f"{prefix}attn_qkv.weight"):
        maps.check(t, f"{prefix}attn_qkv", sum(widths), cfg.n_embd)
        if _apart_biases(t, prefix):
            for name, width in zip(QKV, widths, strict=True):
                t.check(f"{prefix}{name}.bias", (width,))
    else:
        for name, width in zip(QKV, widths, strict=True):
            maps.check(t, f"{prefix}{name}", width, cfg.n_embd)
    if arch.attn_gate:
        maps.check(t, f"{prefix}attn_gate", out, cfg.n_embd)
    if arch.attn_sinks:
        t.check(f"{prefix}attn_sinks.weight", (cfg.n_head,))
    maps.check(t, f"{prefix}attn_output", cfg.n_embd, out)
    for name in (arch.attn_norm, arch.ffn_norm, arch.post_attn_norm, arch.post_ffn_norm):
        if name is not None:
            check_norm(t, f"{prefix}{name}", (cfg.n_embd,), arch, optional=name in arch.optional)
    if arch.qk_norm:
        for name, n in (("attn_q_norm", cfg.n_head), ("attn_k_norm", cfg.n_head_kv)):
            shapes = {
                "head": (cfg.head_dim,),
                "heads": (n, cfg.head_dim),
                "width": (n * cfg.head_dim,),
            }
            shape = shapes[arch.qk_norm]
            check_norm(t, f"{prefix}{name}", shape, arch, optional=name in arch.optional)
    if t.has(f"{prefix}ffn_gate_inp.weight"):
        _check_experts(t, prefix, cfg)
    else:
        _check_mlp(t, prefix, "", cfg.n_ff, cfg, gated=arch.gated)


def check_norm(
    t: Tensors, name: str, shape: tuple[int, ...], arch: Arch, *, optional: bool = False
) -> None:
    """Note what is wrong with a norm; `optional` if it may be missing."""
    if optional and not t.has(f"{name}.weight"):
        return
    t.check(f"{name}.weight", shape)
    if arch.layer_norm and t.has(f"{name}.bias"):
        t.check(f"{name}.bias", shape)


def _check_mlp(
    t: Tensors, prefix: str, end: str, n_ff: int, cfg: ModelConfig, *, gated: bool
) -> None:
    gate, up, down = (f"{prefix}ffn_{name}{end}" for name in ("gate", "up", "down"))
    fused = gated and _is_fused(t, gate, up, n_ff)
    if gated and not fused:
        maps.check(t, gate, n_ff, cfg.n_embd)
    maps.check(t, up, 2 * n_ff if fused else n_ff, cfg.n_embd)
    maps.check(t, down, cfg.n_embd, n_ff)


def _is_fused(t: Tensors, gate: str, up: str, n_ff: int) -> bool:
    """Whether one tensor holds gate | up (Phi 3, GLM 4)."""
    info = t.file.tensors.get(f"{up}.weight")
    return not t.has(f"{gate}.weight") and info is not None and info.shape[0] == 2 * n_ff


def _check_experts(t: Tensors, prefix: str, cfg: ModelConfig) -> None:
    if cfg.router is None:
        raise ModelError(
            f"{prefix}ffn_gate_inp.weight is there, but no key {cfg.arch}.expert_count above 0"
        )
    n_expert = cfg.router.n_expert
    maps.check(t, f"{prefix}ffn_gate_inp", n_expert, cfg.n_embd)
    if t.has(f"{prefix}exp_probs_b.bias"):
        t.check(f"{prefix}exp_probs_b.bias", (n_expert,))
    # Their width is that of the file: several keys may hold it, and some files have none of them.
    down = t.file.tensors.get(f"{prefix}ffn_down_exps.weight")
    n_ff = cfg.n_ff if down is None else down.shape[-1]
    for name in _expert_up(t, prefix):
        n = 2 * n_ff if name.endswith("gate_up_exps") else n_ff
        maps.check_experts(t, name, n_expert, n, cfg.n_embd)
    maps.check_experts(t, f"{prefix}ffn_down_exps", n_expert, cfg.n_embd, n_ff)
    if _has_shared(t, prefix):
        down = t.file.tensors.get(f"{prefix}ffn_down_shexp.weight")
        n_ff = cfg.n_ff if down is None else down.shape[-1]
        _check_mlp(t, prefix, "_shexp", n_ff, cfg, gated=True)
    if t.has(f"{prefix}ffn_gate_inp_shexp.weight"):
        t.check(f"{prefix}ffn_gate_inp_shexp.weight", (cfg.n_embd,))


def _has_shared(t: Tensors, prefix: str) -> bool:
    """Whether a block has a shared expert, be it only a part of one."""
    return any(t.has(f"{prefix}ffn_{name}_shexp.weight") for name in ("gate", "up", "down"))


def _expert_up(t: Tensors, prefix: str) -> list[str]:
    """The maps before the gate, in one tensor or two."""
    fused = f"{prefix}ffn_gate_up_exps"
    if t.has(f"{fused}.weight"):
        return [fused]
    return [f"{prefix}ffn_gate_exps", f"{prefix}ffn_up_exps"]


def load(t: Tensors, layers: list[int], cfg: ModelConfig, arch: Arch) -> LayerParams:
    """The weights of some layers that are alike, stacked."""
    prefixes = [f"blk.{i}." for i in layers]
    first = prefixes[0]

    def norm(name: str | None, eps: float | None = None) -> Norm | None:
        if name is None or not t.has(f"{first}{name}.weight"):
            return None
        eps = cfg.norm_eps if eps is None else eps
        weight = _stacked(t, prefixes, f"{name}.weight")
        if not arch.layer_norm:
            return RmsNorm(weight=weight, eps=eps)
        return LayerNorm(weight=weight, bias=_stacked_if(t, prefixes, f"{name}.bias"), eps=eps)

    def linears(*parts: str, scale_bias: bool = False) -> tuple[Linear, ...]:
        names = [[prefix + part for part in parts] for prefix in prefixes]
        return maps.load(t, names, scale_bias=scale_bias)

    gate = ("attn_gate",) if arch.attn_gate else ()
    if t.has(f"{first}attn_qkv.weight"):
        qkv = (_fused_qkv(t, prefixes), *(linears(*gate) if gate else ()))
    else:
        qkv = linears(*QKV, *gate)
    return LayerParams(
        attn_norm=norm(arch.attn_norm),
        qkv=qkv,
        gated=arch.attn_gate,
        q_norm=norm("attn_q_norm") if arch.qk_norm else None,
        k_norm=norm("attn_k_norm") if arch.qk_norm else None,
        sinks=_stacked(t, prefixes, "attn_sinks.weight") if arch.attn_sinks else None,
        attn_output=linears("attn_output")[0],
        post_attn_norm=norm(arch.post_attn_norm, arch.post_norm_eps),
        ffn_norm=norm(arch.ffn_norm),
        mlp=_experts(t, prefixes, cfg)
        if t.has(f"{first}ffn_gate_inp.weight")
        else _mlp(t, prefixes),
        post_ffn_norm=norm(arch.post_ffn_norm, arch.post_norm_eps),
    )


def _stacked(t: Tensors, prefixes: list[str], name: str) -> Array:
    """A vector of each layer."""
    return jnp.asarray(np.stack([t.vector(prefix + name) for prefix in prefixes]))


def _stacked_if(t: Tensors, prefixes: list[str], name: str) -> Array | None:
    """The same where the layers have it."""
    return _stacked(t, prefixes, name) if t.has(prefixes[0] + name) else None


def _fused_qkv(t: Tensors, prefixes: list[str]) -> Linear:
    """q, k and v in one tensor; old files keep the three biases apart (create_tensor_qkv)."""
    (fused,) = maps.load(t, [[f"{prefix}attn_qkv"] for prefix in prefixes])
    if _apart_biases(t, prefixes[0]):
        rows = [[t.vector(f"{prefix}{name}.bias") for name in QKV] for prefix in prefixes]
        bias = jnp.asarray(np.stack([np.concatenate(row) for row in rows]))
        fused = dataclasses.replace(fused, bias=bias)
    return fused


def _apart_biases(t: Tensors, prefix: str) -> bool:
    """Whether the fused map of a block has biases apart, be it one of three."""
    names = (f"{prefix}{name}.bias" for name in QKV)
    return not t.has(f"{prefix}attn_qkv.bias") and any(map(t.has, names))


def _mlp(t: Tensors, prefixes: list[str], end: str = "") -> Mlp:
    """An MLP of each layer; where `check` wanted no gate it has none, or one beside up."""
    parts = [f"ffn_{name}{end}" for name in ("gate", "up")]
    if f"{prefixes[0]}{parts[0]}.weight" not in t.used:  # a gate that is there may be a stray
        parts = parts[1:]
    names = [[prefix + part for part in parts] for prefix in prefixes]
    down = [[f"{prefix}ffn_down{end}"] for prefix in prefixes]
    width = sum(t.file.tensors[f"{name}.weight"].shape[0] for name in names[0])
    (down_map,) = maps.load(t, down, scale_bias=True)
    return Mlp(
        up=maps.load(t, names, scale_bias=True),
        down=down_map,
        gated=width == 2 * down_map.weight.shape[1],
    )


def _experts(t: Tensors, prefixes: list[str], cfg: ModelConfig) -> Experts:
    assert cfg.router is not None
    n_expert, first = cfg.router.n_expert, prefixes[0]
    return Experts(
        router=maps.load(t, [[f"{p}ffn_gate_inp"] for p in prefixes])[0],
        choice_bias=_stacked_if(t, prefixes, "exp_probs_b.bias"),
        up=maps.load_experts(t, [_expert_up(t, p) for p in prefixes], n_expert),
        down=maps.load_experts(t, [[f"{p}ffn_down_exps"] for p in prefixes], n_expert)[0],
        shared=_mlp(t, prefixes, "_shexp") if _has_shared(t, first) else None,
        shared_gate=_stacked_if(t, prefixes, "ffn_gate_inp_shexp.weight"),
    )
