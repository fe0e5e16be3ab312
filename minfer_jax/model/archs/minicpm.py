"""minicpm: llama's block with granite's multipliers."""

import dataclasses
import math

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The multipliers; files from before there were keys for them have those of MiniCPM 1."""
    residual = keys.number("residual_scale", 1.4 / math.sqrt(cfg.n_layer))
    logits = keys.number("logit_scale", 256.0 / cfg.n_embd, minimum=0.0, above=True)
    return dataclasses.replace(
        cfg,
        embedding_scale=keys.number("embedding_scale", 12.0) or 1.0,
        residual_scale=residual or 1.0,
        logit_scale=1.0 / logits,
    )


ARCH = Arch(name="minicpm", rope_interleaved=True, adapt=adapt)
