"""glm4: a norm on each side of a sub-layer; gate and up in one tensor."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Files made for M-RoPE, which for text is RoPE, pair halves instead of neighbours."""
    if keys.array("rope.dimension_sections") is None:
        return cfg
    return dataclasses.replace(cfg, rope_interleaved=False)


ARCH = Arch(
    name="glm4",
    rope_interleaved=True,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    adapt=adapt,
)
