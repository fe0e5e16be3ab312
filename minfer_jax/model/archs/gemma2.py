"""gemma2: every other layer slides; soft caps on scores and logits; norms on both sides."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import local_rope, with_gemma_scales, with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Scales, caps (those of llama.cpp where the file names none) and the sliding layers."""
    cfg = dataclasses.replace(
        with_gemma_scales(cfg, n_layer_27b=46),
        attention_softcap=keys.number("attn_logit_softcapping", 50.0, minimum=0.0),
        final_softcap=keys.number("final_logit_softcapping", 30.0, minimum=0.0),
    )
    return with_window(cfg, keys, period=2, window=4096, local=local_rope(cfg, keys))


ARCH = Arch(
    name="gemma2",
    rope_interleaved=False,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    activation="gelu",
    adapt=adapt,
)
