"""gemma: llama's block with a GELU gate and scaled embeddings."""

import dataclasses
import math

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The embeddings' scale."""
    del keys
    return dataclasses.replace(cfg, embedding_scale=math.sqrt(cfg.n_embd))


ARCH = Arch(name="gemma", rope_interleaved=False, activation="gelu", adapt=adapt)
