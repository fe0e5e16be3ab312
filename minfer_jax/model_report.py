"""What `models info` shows about a file, which it opens but does not load."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer_jax import metadata_report
from minfer_jax.gguf import GGUFFile, TensorInfo
from minfer_jax.gguf_header import one_line
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.sources.record import sha256_of
from minfer_jax.sources.transfer import SourceError, quoted

_KEYS = (  # what it is called here, key after the architecture's name
    ("context", "context_length"),
    ("layers", "block_count"),
    ("embedding", "embedding_length"),
    ("feed_forward", "feed_forward_length"),
    ("heads", "attention.head_count"),
    ("kv_heads", "attention.head_count_kv"),
    ("experts", "expert_count"),
    ("experts_used", "expert_used_count"),
)
_KEY_TENSORS = (
    "token_embd output_norm output blk.0.attn_norm blk.0.attn_q blk.0.attn_k blk.0.attn_v "
    "blk.0.attn_qkv blk.0.attn_output blk.0.ffn_norm blk.0.ffn_gate blk.0.ffn_up blk.0.ffn_down"
).split()
_ENDINGS = ("weight", "bias")


def decimal(n_bytes: int) -> str:
    """Bytes in the decimal unit that suits them: 98.4 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"


def report(file: GGUFFile, ref: str) -> dict[str, Any]:
    """The main things about a model, as JSON can hold them; what the file does not say is absent.

    Args:
        file: An open model.
        ref: The reference that it was found by.
    """
    arch = file.get("general.architecture")
    tensors = file.tensors.values()
    n_weights = sum(math.prod(info.shape) for info in tensors)
    n_bytes = sum(info.nbytes for info in tensors)
    found = {
        "reference": ref,
        "files": [str(path) for path in file.parts],
        "size": sum(path.stat().st_size for path in file.parts),
        "architecture": arch,
        "name": file.get("general.name"),
        "parameters": n_weights,
        "quantization": _quantization(file),
        "bits_per_weight": round(n_bytes * 8 / max(n_weights, 1), 2),
        **{name: file.get(f"{arch}.{key}") for name, key in _KEYS},
        "vocabulary": _count(file.get("tokenizer.ggml.tokens")),
        "tokenizer": file.get("tokenizer.ggml.pre") or file.get("tokenizer.ggml.model"),
        "template": bool(file.get("tokenizer.chat_template")),
        "license": file.get("general.license"),
    }
    return {key: value for key, value in found.items() if _is_plain(value)}


def verify(files: Sequence[Path], digests: Sequence[str | None]) -> str:
    """Reads files whole and compares their digests.

    Args:
        files: What is read.
        digests: Their sha256 in hex; None where none is known.

    Returns:
        In words, what was found.

    Raises:
        SourceError: A file is not what it was when it was fetched.
    """
    found = [sha256_of(path) for path in files]
    for path, digest, expected in zip(files, found, digests, strict=True):
        if expected not in (None, digest):
            raise SourceError(
                f"{quoted(path)} is damaged: its sha256 is {digest}; {expected} is expected;"
                " remove it (rm) and fetch it again"
            )
    return f"{' '.join(found)} ({'not known before' if None in digests else 'as expected'})"


def as_text(found: dict[str, Any]) -> str:
    """A report, a line each."""
    first, *others = found["files"]
    shown = found | {
        "files": f"{first} and {len(others)} more" if others else first,
        "size": f"{decimal(found['size'])} ({found['size']} bytes)",
        "template": "yes" if found["template"] else "no",
    }
    return "\n".join(f"{key:<16}{one_line(str(value))}" for key, value in shown.items())


def details(file: GGUFFile) -> str:
    """All metadata, the tensors by type, and the first of each kind by name and shape."""
    named = (f"{name}.{ending}" for name in _KEY_TENSORS for ending in _ENDINGS)
    rows = [_row(file.tensors[name]) for name in named if name in file.tensors]
    return "\n".join([metadata_report.metadata(file), *rows])


def _row(info: TensorInfo) -> str:
    shape = " x ".join(map(str, info.shape))
    return f"  {info.name:<26}{GGML_TYPES[info.ggml_type].name:<8}{shape}"


def _quantization(file: GGUFFile) -> str | None:
    """The name that the file's maker gave the mix; else the type that most bytes are of."""
    from gguf import LlamaFileType  # 0.1 s to import

    number = file.get("general.file_type")
    if number in list(LlamaFileType):
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    by_type: dict[str, int] = {}
    for info in file.tensors.values():
        name = GGML_TYPES[info.ggml_type].name
        by_type[name] = by_type.get(name, 0) + info.nbytes
    return max(by_type, key=lambda name: by_type[name], default=None)


def _count(items: Any) -> int | None:
    return None if items is None else len(items)


def _is_plain(value: Any) -> bool:
    """Whether a value is there and JSON can hold it; arrays (a number a layer) are left out."""
    return isinstance(value, str | int | float | bool) or type(value) is list
