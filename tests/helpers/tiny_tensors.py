"""The tensors of tiny models.

A tensor's values depend on the seed and its name alone, and on nothing that numpy might change:
PCG64's raw output is part of its promise, and the rest is exact arithmetic.
"""

import zlib

import gguf
import numpy as np

from minfer_jax.gguf_types import TYPE_IDS
from minfer_jax.model.registry import ARCHS
from tests.helpers.gguf_builder import Tensor, dense
from tests.helpers.random_blocks import random_blocks
from tests.helpers.tiny_options import QK_NORMS, QKV, Options


def encode(values: np.ndarray, kind: str) -> Tensor:
    """A matrix as a tensor of a type that gguf-py can quantise to."""
    ggml_type = gguf.GGMLQuantizationType[kind]
    return int(ggml_type), values.shape, gguf.quants.quantize(values, ggml_type).tobytes()


def tensors(o: Options) -> dict[str, Tensor]:
    q, kv = o.heads
    out = {"token_embd.weight": _matrix(o, "token_embd", (o.n_vocab, o.width), 0.3)}
    arch = ARCHS[o.arch]
    _add_norm(out, o, "output_norm", (o.width,))
    if not o.tied:
        _add_map(out, o, "output", (o.n_vocab, o.width), own="output")
    elif "output" in o.biases:
        out["output.bias"] = dense(_vector(o, "output.bias", o.n_vocab, 0.0))
    for name in ("rope_factors_short", "rope_factors_long") if o.long_factors else ():
        factors = _uniform(o.seed, f"{name}.weight", (q // o.n_head // 2,))
        out[f"{name}.weight"] = dense(2.5 + factors)
    if o.rope_factors:
        factors = _uniform(o.seed, "rope_freqs.weight", (q // o.n_head // 2,))
        out["rope_freqs.weight"] = dense(2.5 + factors)
    for i in range(o.n_layer):
        prefix = f"blk.{i}."
        for name, shape in _norms(o).items():
            _add_norm(out, o, prefix + name, shape)
        sparse = o.n_expert and i >= o.dense_layers
        maps = {
            **dict(zip(QKV, [(q, o.width), (kv, o.width), (kv, o.width)], strict=True)),
            "attn_output": (o.width, q),
            **({"attn_gate": (q, o.width)} if arch.attn_gate else {}),
            **(_experts(o) if sparse else _mlp(o, "", o.n_ff, gated=arch.gated)),
        }
        for name, shape in maps.items():
            _add_map(out, o, prefix + name, shape, own=name)
        if arch.attn_sinks:
            name = f"{prefix}attn_sinks.weight"
            out[name] = dense(_vector(o, name, o.n_head, 1.0))
        if sparse and o.choice_bias:
            name = f"{prefix}exp_probs_b.bias"
            out[name] = dense(_vector(o, name, o.n_expert, 0.0))
        if sparse and o.shared_gate:
            name = f"{prefix}ffn_gate_inp_shexp.weight"
            out[name] = dense(_vector(o, name, o.width, 0.0))
        if o.fused_qkv:
            _fuse(out, prefix, QKV, "attn_qkv")
        if o.fused_up and not sparse:
            _fuse(out, prefix, ("ffn_gate", "ffn_up"), "ffn_up")
    return out


def _norms(o: Options) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's norms by name; the two that llama has come first."""
    arch = ARCHS[o.arch]
    names = {arch.attn_norm, arch.ffn_norm, arch.post_attn_norm, arch.post_ffn_norm} - {None}
    shapes: dict[str, tuple[int, ...]] = {str(name): (o.width,) for name in names}
    if arch.qk_norm:
        h = o.heads[0] // o.n_head
        for name, n in zip(QK_NORMS, (o.n_head, o.n_head_kv), strict=True):
            shapes[name] = {"head": (h,), "heads": (n, h), "width": (n * h,)}[arch.qk_norm]
    order = sorted(shapes, key=lambda name: (name not in ("attn_norm", "ffn_norm"), name))
    return {name: shapes[name] for name in order if name not in o.no_norms}


def _mlp(o: Options, end: str, n_ff: int, *, gated: bool = True) -> dict[str, tuple[int, ...]]:
    up = {f"ffn_gate{end}": (n_ff, o.width)} if gated else {}
    return up | {f"ffn_up{end}": (n_ff, o.width), f"ffn_down{end}": (o.width, n_ff)}


def _experts(o: Options) -> dict[str, tuple[int, ...]]:
    maps: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (o.n_expert, o.width)}
    for name, (n, k) in _mlp(o, "_exps", o.n_ff).items():
        maps[name] = (o.n_expert, n, k)
    return maps | (_mlp(o, "_shexp", o.n_ff_shared) if o.n_ff_shared else {})


def _fuse(out: dict[str, Tensor], prefix: str, names: tuple[str, ...], into: str) -> None:
    for end in ("weight", "bias"):
        parts = [out.pop(f"{prefix}{name}.{end}", None) for name in names]
        if parts[0] is not None:
            out[f"{prefix}{into}.{end}"] = _side_by_side(parts)


def _add_norm(out: dict[str, Tensor], o: Options, name: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    out[f"{name}.weight"] = dense(_vector(o, f"{name}.weight", size, 1.0).reshape(shape))
    arch = ARCHS[o.arch]
    if arch.layer_norm and arch.name not in ("cohere2", "command-r") and len(shape) == 1:
        out[f"{name}.bias"] = dense(_vector(o, f"{name}.bias", size, 0.0))


def _add_map(
    out: dict[str, Tensor], o: Options, name: str, shape: tuple[int, ...], *, own: str
) -> None:
    """Add a matrix, and its bias and scale where they are wanted for maps of its `own` name."""
    # Queries and keys are large, so that attention has preferences.
    gain = 2.0 if own in ("attn_q", "attn_k", "output") else 1.0
    out[f"{name}.weight"] = _matrix(o, name, shape, gain / np.sqrt(shape[-1]))
    if own in o.biases:
        bias = _vector(o, f"{name}.bias", int(np.prod(shape[:-1])), 0.0)
        out[f"{name}.bias"] = dense(bias.reshape(shape[:-1]))
    if own in o.scales:
        n = 1 if len(shape) == 2 else shape[0]  # one for each expert
        out[f"{name}.scale"] = dense(_vector(o, f"{name}.scale", n, 1.25))


def _side_by_side(parts: list[Tensor | None]) -> Tensor:
    present = [part for part in parts if part is not None]
    kind, shape, _ = present[0]
    n = sum(part[1][0] for part in present)
    return kind, (n, *shape[1:]), b"".join(part[2] for part in present)


def _matrix(o: Options, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    kind = "F32" if name.endswith("ffn_gate_inp") else o.types.get(name, o.weight_type)
    try:
        return encode(_uniform(o.seed, f"{name}.weight", shape) * np.float32(std), kind)
    except NotImplementedError:  # gguf-py only reads this type
        rng = np.random.Generator(_bits(o.seed, f"{name}.weight"))
        blocks = random_blocks(kind, (int(np.prod(shape[:-1])), shape[-1]), rng, std)
        return TYPE_IDS[kind], shape, blocks.tobytes()


def _vector(o: Options, name: str, n: int, mean: float) -> np.ndarray:
    return np.float32(mean) + np.float32(0.2) * _uniform(o.seed, name, (n,))


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32, uniform with mean 0 and variance 1."""
    raw = _bits(seed, name).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((2.0 * unit - 1.0) * np.sqrt(3.0)).astype(np.float32).reshape(shape)


def _bits(seed: int, name: str) -> np.random.PCG64:
    return np.random.PCG64([seed, zlib.crc32(name.encode())])
