"""olmo2: OLMo 2 and 3; no norm before a sub-layer, one after it, and one over all heads at once."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """OLMo 3: three of four layers slide, and rotate without YaRN."""
    local = dataclasses.replace(cfg.ropes[0], freq_scale=1.0, yarn=None, magnitude=1.0)
    return with_window(cfg, keys, period=4, window=0, local=local)


ARCH = Arch(
    name="olmo2",
    rope_interleaved=False,
    attn_norm=None,
    ffn_norm=None,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    qk_norm="width",
    adapt=adapt,
)
