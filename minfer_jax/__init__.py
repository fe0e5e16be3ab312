"""GGUF language models as pure JAX functions.

    import minfer_jax
    engine = minfer_jax.load("smollm2")
    for piece in engine.stream("Why is the sky blue?", max_tokens=128):
        print(piece, end="")

Submodules are imported when first used, so that what needs no jax does not wait for it.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer_jax.conversation import Conversation
    from minfer_jax.language_model import LanguageModel, load
    from minfer_jax.model.patches import Add, Replace
    from minfer_jax.tracing import Trace

_FROM = {
    "load": "language_model",
    "LanguageModel": "language_model",
    "Conversation": "conversation",
    "Add": "model.patches",
    "Replace": "model.patches",
    "Trace": "tracing",
}
_MODULES = frozenset(
    {
        "chat_template",
        "compile_cache",
        "conversation",
        "engine",
        "gguf",
        "language_model",
        "model",
        "presets",
        "quant",
        "sampling",
        "sources",
        "tokenizer",
    }
)

__all__ = ["Add", "Conversation", "LanguageModel", "Replace", "Trace", "load"]


def __getattr__(name: str) -> ModuleType | object:
    if name in _FROM:
        return getattr(importlib.import_module(f"minfer_jax.{_FROM[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"minfer_jax.{name}")
    raise AttributeError(f"module 'minfer_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, *_MODULES})
