"""Adapters for tiny models, and the models that they make."""

from collections.abc import Mapping

import jax
import numpy as np

from minfer_jax.gguf import GGUFFile
from minfer_jax.model import lora
from minfer_jax.model.lora import Adapter, Pair
from minfer_jax.model.tensors import Tensors
from tests.helpers.gguf_builder import Tensor, dense


def random_adapter(
    shapes: Mapping[str, lora.Shape], rank: int = 3, *, seed: int = 0, alpha: float = 4.0
) -> Adapter:
    """An adapter that changes much."""
    adapter = lora.fresh(shapes, rank, jax.random.key(seed), alpha=alpha)
    keys = jax.random.split(jax.random.key(seed + 1), len(adapter.pairs))
    pairs = {
        name: Pair(a=pair.a, b=0.5 * jax.random.normal(key, pair.b.shape))
        for key, (name, pair) in zip(keys, adapter.pairs.items(), strict=True)
    }
    return Adapter(pairs=pairs, alpha=alpha)


def merged(
    base: GGUFFile, adapters: list[Adapter], scales: list[float]
) -> dict[str, Tensor | None]:
    """The tensors that adapters make of a model's, by the formula, in numpy."""
    t = Tensors(base, lambda n: None)
    out: dict[str, Tensor | None] = {}
    for name in {name for adapter in adapters for name in adapter.pairs}:
        weight = t.vector(name).astype(np.float64)
        for adapter, scale in zip(adapters, scales, strict=True):
            if (pair := adapter.pairs.get(name)) is not None:
                a, b = np.asarray(pair.a, np.float64), np.asarray(pair.b, np.float64)
                delta = a @ b.T if name == lora.EMBEDDING else b @ a
                weight += scale * (adapter.alpha / b.shape[1] if adapter.alpha else 1.0) * delta
        out[name] = dense(weight.astype(np.float32))
    return out
