"""gemma3: sliding and full layers, each with its RoPE base; norms on both sides of a sub-layer."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_gemma_scales, with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys
from minfer_jax.model.rope import RopeSpec


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Scales, the sliding pattern (by default five of six layers), the local RoPE (unstretched)."""
    cfg = dataclasses.replace(
        with_gemma_scales(cfg, n_layer_27b=62),
        final_softcap=keys.number("final_logit_softcapping", 0.0),
    )
    return with_window(
        cfg,
        keys,
        period=6,
        window=0,
        local=RopeSpec(
            base=keys.number("rope.freq_base_swa", 10000.0, minimum=0.0, above=True),
            dims=cfg.ropes[0].dims,
        ),
    )


ARCH = Arch(
    name="gemma3",
    rope_interleaved=False,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    qk_norm="head",
    activation="gelu",
    adapt=adapt,
)
