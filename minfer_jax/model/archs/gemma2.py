"""gemma2: every other layer slides; soft caps on scores and logits; norms on both sides."""

import dataclasses
import math

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import local_rope, with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys

N_LAYER_27B = 46  # the one size whose attention scale comes from the width, not from the head


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Scales, caps (those of llama.cpp where the file names none) and the sliding layers."""
    head = max(cfg.n_embd // cfg.n_head, 1) if cfg.n_layer == N_LAYER_27B else cfg.head_dim
    cfg = dataclasses.replace(
        cfg,
        embedding_scale=math.sqrt(cfg.n_embd),
        attention_scale=1.0 / math.sqrt(head),
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
