"""gemma3: sliding and full layers, each with its RoPE base; norms on both sides of a sub-layer."""

import dataclasses
import math

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys
from minfer_jax.model.rope import RopeSpec

N_LAYER_27B = 62  # the one size whose attention scale comes from the width, not from the head


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Scales, the sliding pattern (by default five of six layers), the local RoPE (unstretched)."""
    head = max(cfg.n_embd // cfg.n_head, 1) if cfg.n_layer == N_LAYER_27B else cfg.head_dim
    cfg = dataclasses.replace(
        cfg,
        embedding_scale=math.sqrt(cfg.n_embd),
        attention_scale=1.0 / math.sqrt(head),
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
