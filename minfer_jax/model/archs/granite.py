"""granite: llama's block with four multipliers."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The multipliers (that of attention is common to all); RoPE, unless the file says no."""
    cfg = dataclasses.replace(
        cfg,
        embedding_scale=keys.number("embedding_scale", 0.0) or 1.0,
        residual_scale=keys.number("residual_scale", 0.0) or 1.0,
        logit_scale=1.0 / keys.number("logit_scale", minimum=0.0, above=True),
    )
    if keys.boolean("rope.scaling.finetuned", True):
        return cfg
    layers = tuple(dataclasses.replace(spec, rope=None) for spec in cfg.layers)
    return dataclasses.replace(cfg, layers=layers)


ARCH = Arch(name="granite", rope_interleaved=True, adapt=adapt)
