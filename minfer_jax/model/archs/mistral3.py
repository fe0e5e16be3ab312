"""mistral3: llama's block; Ministral 3 scales queries with the logarithm of the position."""

import dataclasses

from minfer_jax.model.archs.base import Arch, original_context
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Read the attention temperature; its floor is the original context."""
    scale = keys.number("attention.temperature_scale", 0.0)
    floor = original_context(keys, cfg.n_ctx_train)
    return dataclasses.replace(cfg, attention_temperature=(scale, floor))


ARCH = Arch(name="mistral3", rope_interleaved=True, yarn_keys=True, adapt=adapt)
