"""Tiny deterministic models as the bytes of GGUF files, one kind for every architecture.

    data = tiny_model("gemma3")                                   # float32, no tokenizer
    data = tiny_model("llama", weight_type="Q4_K", width=256, n_ff=256)
    data = tiny_model("llama", keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    data = tiny_text_model()                                      # with tokenizer and chat template

Models which differ in one option share all other weights (see `tiny_tensors.py`).
"""

from pathlib import Path
from typing import Any

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
from tests.helpers.gguf_builder import build_gguf, dense
from tests.helpers.tiny_options import DEFAULTS, Options
from tests.helpers.tiny_tensors import tensors
from tests.helpers.vocabs import tiny_bpe


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
    found = {**tensors(o), **o.tensors}
    return build_gguf(_metadata(o), {n: t for n, t in found.items() if t is not None})


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


def endless_text_model(end: float = -1e9, **overrides: Any) -> bytes:
    """A `tiny_text_model` that writes what is seen on a screen, in one line.

    Args:
        end: bias of the token that ends a turn, beside 2.0 for those that are seen.
        overrides: as there.
    """
    visible = [len(TEXT_CONTROL) + BYTE_CHARACTERS.index(chr(c)) for c in range(0x21, 0x7F)]
    bias = np.full(len(TEXT_CONTROL) + 256 + len(TEXT_MERGES), -1e9, np.float32)
    bias[visible] = bias[-len(TEXT_MERGES) :] = 2.0
    bias[TEXT_CONTROL.index("<|im_end|>")] = end
    return tiny_text_model(biases=("output",), tensors={"output.bias": dense(bias)}, **overrides)


def command_model(seed: int = 0) -> bytes:
    """One model for several files of tests of commands, which share what is compiled for it.

    Its context of 256 bounds what a command asks for. Of another seed it has other weights.
    """
    return endless_text_model(
        seed=seed, n_layer=1, n_ctx=256, n_head=2, n_head_kv=1, weight_type="F16"
    )


def save(folder: Path, data: bytes, name: str = "tiny.gguf") -> GGUFFile:
    """Write a model to a folder and open it."""
    (folder / name).write_bytes(data)
    return open_gguf(folder / name)


def load(folder: Path, data: bytes, precision: str = "highest") -> tuple[ModelConfig, Params]:
    """Write a model to a folder and load it."""
    return load_model(save(folder, data), precision=precision)


# The model as tests run it. One name for all of them, so that they share what is compiled.
run = jax.jit(forward, static_argnames=("cfg", "n_out", "differentiable"))


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
        f"attention.layer_norm_{'' if ARCHS[o.arch].layer_norm else 'rms_'}epsilon": 1e-5,
        "rope.dimension_count": q // o.n_head,
        "rope.freq_base": 10000.0,
        "vocab_size": o.n_vocab,
    }
    if o.n_expert:
        keys |= {"expert_count": o.n_expert, "expert_used_count": o.n_expert_used}
        keys |= {"expert_feed_forward_length": o.n_ff}
    metadata = {
        "general.architecture": o.arch,
        "general.name": f"tiny {o.arch}",
        "tokenizer.ggml.model": "none",
        **{f"{o.arch}.{key}": value for key, value in {**keys, **o.keys}.items()},
        **o.metadata,
    }
    return {key: value for key, value in metadata.items() if value is not None}
