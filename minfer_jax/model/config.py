"""The static description of a model, read from GGUF metadata; and typed access to that metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax.model.rope import RopeSpec


class ModelError(ValueError):
    """The file cannot be run: a key or tensor is missing, wrong or unsupported. One line."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer.

    Attributes:
        sliding: attends to the last `window` positions only, and caches no more than it needs.
        rope: index into ModelConfig.ropes and Params.rope, or None where the layer does not rotate.
    """

    sliding: bool = False
    rope: int | None = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model that a compiled program depends on; hashable.

    Attributes:
        arch: `general.architecture`.
        n_layer, n_embd, n_ff, n_vocab: layers L, model width D, feed-forward width F, vocabulary V.
        n_head, n_head_kv: query heads N and kv heads K.
        head_dim: H, of queries, keys and values.
        n_ctx_train: the longest context the model was made for, tokens.
        layers: one LayerSpec a layer.
        window: positions that a sliding layer sees, itself included; 0 where no layer slides.
        norm_eps: epsilon of every RMS norm.
        ropes: the rotations that LayerSpec.rope picks from.
        rope_interleaved: RoPE pairs are (2i, 2i + 1); otherwise (i, i + dims / 2).
        activation: "silu" or "gelu" (tanh form), of the gate.
        embedding_scale: factor on the token embeddings.
        attention_scale: factor on q . k.
        attention_temperature: (scale, floor): queries are multiplied by
            1 + scale * ln(1 + position // floor); (0, 1) leaves them alone (Llama 4, Ministral 3).
        final_softcap: c in c * tanh(logits / c), or 0 for none.
        precision: "highest" or "default", as asked for at load.
        dtype: what activations and dequantised weights are rounded to in products of many rows.
        cache_dtype: what keys and values are rounded to.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx_train: int
    layers: tuple[LayerSpec, ...]
    window: int = 0
    norm_eps: float
    ropes: tuple[RopeSpec, ...]
    rope_interleaved: bool
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float
    attention_temperature: tuple[float, int] = (0.0, 1)
    final_softcap: float = 0.0
    precision: str = "highest"
    dtype: str = "float32"
    cache_dtype: str = "float32"


_MISSING: Any = object()


@dataclass(frozen=True)
class Keys:
    """Metadata of one architecture: `keys.integer("block_count")` reads `<arch>.block_count`.

    Every getter raises ModelError when the key is missing and has no default, or has another type.
    """

    metadata: Mapping[str, Any]
    arch: str

    def integer(self, name: str, default: int = _MISSING, *, minimum: int = 0) -> int:
        """A whole number of at least `minimum`; an array stands for its one common value."""
        value = self._single(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(
                f"{self._key(name)} is {value!r}, expected a whole number >= {minimum}"
            )
        return value

    def number(self, name: str, default: float = _MISSING) -> float:
        """A finite number."""
        value = self._single(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ModelError(f"{self._key(name)} is {value!r}, expected a finite number")
        return float(value)

    def text(self, name: str, default: str = _MISSING) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._key(name)} is {value!r}, expected a string")
        return value

    def array(self, name: str) -> np.ndarray | None:
        """An array of numbers or booleans, or None where the key is absent or a single value."""
        value = self._get(name, None)
        return value if isinstance(value, np.ndarray) else None

    def _key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def _get(self, name: str, default: Any) -> Any:
        value = self.metadata.get(self._key(name), default)
        if value is _MISSING:
            raise ModelError(
                f"the file has no key {self._key(name)}, which this architecture needs"
            )
        return value

    def _single(self, name: str, default: Any) -> Any:
        value = self._get(name, default)
        if not isinstance(value, np.ndarray):
            return value
        distinct = np.unique(value)
        if len(distinct) != 1:
            raise ModelError(
                f"{self._key(name)} differs from layer to layer ({value[:4].tolist()}...), "
                "which is not supported: expected one value for all layers"
            )
        return distinct[0].item()
