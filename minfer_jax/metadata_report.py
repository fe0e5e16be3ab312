"""What `--meta` shows about a file and a loaded model, and the bar shown while one loads."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax import progress
from minfer_jax.gguf import GGUFFile
from minfer_jax.gguf_types import GGML_TYPES

if TYPE_CHECKING:
    from minfer_jax.engine import Engine

_LONG = 200  # characters of a value


def metadata(file: GGUFFile) -> str:
    """Every key with its value (long arrays abridged), and the tensors by type."""
    lines = [f"  {key} = {_value(value)}" for key, value in file.metadata.items()]
    by_type: dict[str, tuple[int, int]] = {}
    for info in file.tensors.values():
        name = GGML_TYPES[info.ggml_type].name
        count, size = by_type.get(name, (0, 0))
        by_type[name] = count + 1, size + info.nbytes
    lines.extend(
        f"  {count} tensors of {name}, {size / 1e6:.1f} MB"
        for name, (count, size) in sorted(by_type.items(), key=lambda row: -row[1][1])
    )
    return "\n".join(lines)


def memory(engine: "Engine") -> str:
    """Bytes of the weights, and of the KV state for each kind of layer."""
    from minfer_jax.model import kv_state  # loads jax, which the other reports need not

    lines = [
        f"  weights {engine.params.nbytes / 1e6:.1f} MB, KV state {engine.kv_bytes / 1e6:.1f} MB "
        f"({engine.n_ctx} positions, {engine.cfg.cache_dtype})"
    ]
    for name, kind in (("full", kv_state.FULL), ("sliding", kv_state.SLIDING)):
        n_layers, n_slots, n_bytes = engine.kv_layers(kind)
        if n_layers:
            lines.append(
                f"  {n_layers} layers of {name} attention: {n_slots} slots each, "
                f"{n_bytes / 1e6:.1f} MB"
            )
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, list | np.ndarray):
        items = [_scalar(v) for v in value[:5]]
        if len(value) > 8:
            items += ["...", *(_scalar(v) for v in value[-3:])]
        else:
            items += [_scalar(v) for v in value[5:]]
        return f"({len(value)}) [{', '.join(items)}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({len(text)} characters)"


def loading_bar(file: GGUFFile) -> AbstractContextManager[Callable[[int], None]]:
    """A function that takes the bytes just read; on a terminal it draws a bar after a second."""
    total = sum(info.nbytes for info in file.tensors.values())
    return progress.bar(total, "B", "Loading", scaled=True)
