"""command-r: attention and MLP side by side, layer norms without a bias, scaled logits."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The logits' scale."""
    return dataclasses.replace(cfg, logit_scale=keys.number("logit_scale", 0.0) or 1.0)


ARCH = Arch(
    name="command-r",
    rope_interleaved=True,
    layer_norm=True,
    ffn_norm=None,
    qk_norm="heads",
    optional=frozenset({"attn_q_norm", "attn_k_norm"}),
    adapt=adapt,
)
