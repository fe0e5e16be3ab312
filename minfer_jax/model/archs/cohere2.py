"""cohere2: command-r's block; three of four layers slide, and they alone rotate."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The logits' scale and the sliding layers."""
    cfg = dataclasses.replace(cfg, logit_scale=keys.number("logit_scale") or 1.0)
    return with_window(cfg, keys, period=4, local=None, full=None)


ARCH = Arch(name="cohere2", rope_interleaved=True, layer_norm=True, ffn_norm=None, adapt=adapt)
