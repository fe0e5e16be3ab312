"""Tiny deterministic models as the bytes of GGUF files, one kind for every architecture.

    data = tiny_model("gemma3")                                   # float32, no tokenizer
    data = tiny_model("llama", weight_type="Q4_K", width=256, n_ff=256)
    data = tiny_model("llama", keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    data = tiny_text_model()                                      # with tokenizer and chat template

A tensor's values depend on the seed and its name alone, so that models which differ in one option
share all other weights; and on nothing that numpy might change: PCG64's raw output is part of its
promise, and the rest is exact arithmetic.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from minfer_jax.bpe import BYTE_CHARACTERS
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.model.registry import ARCHS
from minfer_jax.vocab import CONTROL, NORMAL
from tests.helpers.gguf_builder import Tensor, build_gguf, dense
from tests.helpers.random_blocks import TYPES, random_blocks
from tests.helpers.vocabs import tiny_bpe

QKV = ("attn_q", "attn_k", "attn_v")
MAPS = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")

# What makes a tiny model of an architecture more than llama's block.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "n_layer": 4,
        "head_dim": 24,
        "n_head_kv": 1,
        "tied": True,
        "keys": {
            "rope.freq_base": 1e6,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
    },
    "llama": {},
    "mistral3": {
        "keys": {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 8}
    },
    "qwen2": {"tied": True, "biases": QKV},
    "qwen3": {"head_dim": 32, "n_head_kv": 4},
    "smollm3": {"n_layer": 5, "tied": True},  # the fourth does not rotate
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a tiny model is made of.

    Attributes:
        arch: `general.architecture`.
        seed: of all weights.
        weight_type: ggml's name of the type of all matrices; vectors are float32.
        tied: the output is the embedding.
        fused_qkv: one tensor (and bias, and scale) for q, k and v.
        biases, scales: names of MAPS, or "output", that have one.
        rope_factors: there is a `rope_freqs.weight`.
        keys: metadata under the architecture's prefix; None takes a key out.
        metadata: metadata under full names, likewise.
        types: ggml's type of single matrices, by name without ".weight".
        tensors: tensors to put in place of others, or None to leave one out.
    """

    arch: str
    seed: int = 0
    weight_type: str = "F32"
    n_layer: int = 3
    width: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 0  # width / n_head
    n_ff: int = 96
    n_vocab: int = 96
    n_ctx: int = 256
    tied: bool = False
    fused_qkv: bool = False
    biases: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    rope_factors: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, Tensor | None] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, int]:
        """Width of all queries, and of all keys."""
        head_dim = self.head_dim or self.width // self.n_head
        return self.n_head * head_dim, self.n_head_kv * head_dim


def tiny_model(arch: str, *, seed: int = 0, weight_type: str = "F32", **overrides: Any) -> bytes:
    """A GGUF file of a few layers.

    Args:
        arch: a key of ARCHS.
        seed: of all weights.
        weight_type: ggml's name of the type of all matrices. A type that gguf-py cannot quantise to
            gets random blocks; K-quants need `width`, `n_ff` and all heads to be multiples of 256.
        overrides: other fields of Options, over those of DEFAULTS; `keys` are added to them.
    """
    chosen = DEFAULTS[arch] | overrides
    chosen["keys"] = {**DEFAULTS[arch].get("keys", {}), **overrides.get("keys", {})}
    o = Options(arch=arch, seed=seed, weight_type=weight_type, **chosen)
    tensors = {**_tensors(o), **o.tensors}
    return build_gguf(_metadata(o), {n: t for n, t in tensors.items() if t is not None})


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]


def tiny_text_model(arch: str = "llama", **overrides: Any) -> bytes:
    """A tiny model with a tokenizer and a chat template.

    The vocabulary is TEXT_CONTROL (ids 0 to 2; <|im_end|> ends a turn), the 256 bytes and what
    TEXT_MERGES make of them.
    """
    products = [merge.replace(" ", "") for merge in TEXT_MERGES]
    tokens = [*TEXT_CONTROL, *BYTE_CHARACTERS, *products]
    kinds = [CONTROL] * len(TEXT_CONTROL) + [NORMAL] * (256 + len(products))
    tokenizer = tiny_bpe(
        "gpt-2",
        tokens=tokens,
        token_type=np.array(kinds, np.int32),
        merges=TEXT_MERGES,
        bos_token_id=0,
        eos_token_id=2,
        add_bos_token=False,
    )
    metadata = {**tokenizer, "tokenizer.chat_template": CHAT_TEMPLATE}
    metadata |= overrides.pop("metadata", {})
    return tiny_model(arch, n_vocab=len(tokens), metadata=metadata, **overrides)


def save(folder: Path, data: bytes, name: str = "tiny.gguf") -> GGUFFile:
    """Write a model to a folder and open it."""
    (folder / name).write_bytes(data)
    return open_gguf(folder / name)


def load(folder: Path, data: bytes, precision: str = "highest") -> tuple[ModelConfig, Params]:
    """Write a model to a folder and load it."""
    return load_model(save(folder, data), precision=precision)


# The model as tests run it. One name for all of them, so that they share what is compiled.
run = jax.jit(forward, static_argnames=("cfg", "n_out", "differentiable"))


def encode(values: np.ndarray, kind: str) -> Tensor:
    """A matrix as a tensor of a type that gguf-py can quantise to."""
    ggml_type = gguf.GGMLQuantizationType[kind]
    return int(ggml_type), values.shape, gguf.quants.quantize(values, ggml_type).tobytes()


def _metadata(o: Options) -> dict[str, Any]:
    q, _ = o.heads
    keys = {
        "context_length": o.n_ctx,
        "embedding_length": o.width,
        "block_count": o.n_layer,
        "feed_forward_length": o.n_ff,
        "attention.head_count": o.n_head,
        "attention.head_count_kv": o.n_head_kv,
        "attention.key_length": q // o.n_head,
        "attention.value_length": q // o.n_head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": q // o.n_head,
        "rope.freq_base": 10000.0,
        "vocab_size": o.n_vocab,
    }
    metadata = {
        "general.architecture": o.arch,
        "general.name": f"tiny {o.arch}",
        "tokenizer.ggml.model": "none",
        **{f"{o.arch}.{key}": value for key, value in {**keys, **o.keys}.items()},
        **o.metadata,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def _tensors(o: Options) -> dict[str, Tensor]:
    q, kv = o.heads
    shapes = {
        **dict(zip(QKV, [(q, o.width), (kv, o.width), (kv, o.width)], strict=True)),
        "attn_output": (o.width, q),
        "ffn_gate": (o.n_ff, o.width),
        "ffn_up": (o.n_ff, o.width),
        "ffn_down": (o.width, o.n_ff),
    }
    out = {"token_embd.weight": _matrix(o, "token_embd", (o.n_vocab, o.width), 0.3)}
    out["output_norm.weight"] = dense(_vector(o, "output_norm.weight", o.width, 1.0))
    if not o.tied:
        _add_map(out, o, "output", (o.n_vocab, o.width), own="output")
    elif "output" in o.biases:
        out["output.bias"] = dense(_vector(o, "output.bias", o.n_vocab, 0.0))
    if o.rope_factors:
        factors = _uniform(o.seed, "rope_freqs.weight", (q // o.n_head // 2,))
        out["rope_freqs.weight"] = dense(2.5 + factors)
    for i in range(o.n_layer):
        prefix = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm", *sorted(ARCHS[o.arch].norms)):
            n = q // o.n_head if norm in ("attn_q_norm", "attn_k_norm") else o.width
            name = f"{prefix}{norm}.weight"
            out[name] = dense(_vector(o, name, n, 1.0))
        for name, shape in shapes.items():
            _add_map(out, o, prefix + name, shape, own=name)
        if o.fused_qkv:
            for end in ("weight", "bias"):
                parts = [out.pop(f"{prefix}{name}.{end}", None) for name in QKV]
                if parts[0] is not None:
                    out[f"{prefix}attn_qkv.{end}"] = _side_by_side(parts)
    return out


def _add_map(
    out: dict[str, Tensor], o: Options, name: str, shape: tuple[int, int], *, own: str
) -> None:
    """Add a matrix, and its bias and scale where they are wanted for maps of its `own` name."""
    # Queries and keys are large, so that attention has preferences.
    gain = 2.0 if own in ("attn_q", "attn_k", "output") else 1.0
    out[f"{name}.weight"] = _matrix(o, name, shape, gain / np.sqrt(shape[1]))
    if own in o.biases:
        out[f"{name}.bias"] = dense(_vector(o, f"{name}.bias", shape[0], 0.0))
    if own in o.scales:
        out[f"{name}.scale"] = dense(_vector(o, f"{name}.scale", 1, 1.25))


def _side_by_side(parts: list[Tensor | None]) -> Tensor:
    present = [part for part in parts if part is not None]
    kind, shape, _ = present[0]
    n = sum(part[1][0] for part in present)
    return kind, (n, *shape[1:]), b"".join(part[2] for part in present)


def _matrix(o: Options, name: str, shape: tuple[int, int], std: float) -> Tensor:
    kind = o.types.get(name, o.weight_type)
    try:
        return encode(_uniform(o.seed, f"{name}.weight", shape) * np.float32(std), kind)
    except NotImplementedError:  # gguf-py only reads this type
        rng = np.random.Generator(_bits(o.seed, f"{name}.weight"))
        blocks = random_blocks(kind, shape, rng, std)
        return TYPES[kind], shape, blocks.tobytes()


def _vector(o: Options, name: str, n: int, mean: float) -> np.ndarray:
    return np.float32(mean) + np.float32(0.2) * _uniform(o.seed, name, (n,))


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32, uniform with mean 0 and variance 1."""
    raw = _bits(seed, name).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((2.0 * unit - 1.0) * np.sqrt(3.0)).astype(np.float32).reshape(shape)


def _bits(seed: int, name: str) -> np.random.PCG64:
    return np.random.PCG64([seed, zlib.crc32(name.encode())])
