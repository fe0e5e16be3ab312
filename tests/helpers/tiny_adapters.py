"""Adapters for tiny models, and the models that they make."""

from collections.abc import Mapping

import jax.numpy as jnp
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
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, (n, k) in shapes.items():
        a, out = ((n, rank), k) if name == lora.EMBEDDING else ((rank, k), n)
        halves = rng.uniform(-1, 1, a) / np.sqrt(k), rng.normal(0, 0.5, (out, rank))
        a, b = (jnp.asarray(half, jnp.float32) for half in halves)
        pairs[name] = Pair(a=a, b=b)
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
