"""gemma3: sliding and full layers, each with its RoPE base; norms on both sides of a sub-layer."""

import dataclasses
import math

from minfer_jax.model.archs.base import Arch, sliding_layers
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.keys import Keys
from minfer_jax.model.rope import RopeSpec

N_LAYER_27B = 62  # the one size whose attention scale comes from the width, not from the head


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Scales, the sliding pattern (by default five of six layers), the local RoPE (unstretched)."""
    head = max(cfg.n_embd // cfg.n_head, 1) if cfg.n_layer == N_LAYER_27B else cfg.head_dim
    cfg = dataclasses.replace(
        cfg,
        activation="gelu",
        embedding_scale=math.sqrt(cfg.n_embd),
        attention_scale=1.0 / math.sqrt(head),
        final_softcap=keys.number("final_logit_softcapping", 0.0),
    )
    window = min(keys.integer("attention.sliding_window", 0), cfg.n_ctx_train)
    if not window:
        return cfg
    local = RopeSpec(
        base=keys.number("rope.freq_base_swa", 10000.0, minimum=0.0, above=True),
        dims=cfg.ropes[0].dims,
    )
    return dataclasses.replace(
        cfg,
        window=window,
        ropes=(cfg.ropes[0], local),
        layers=tuple(
            LayerSpec(sliding=slides, rope=1 if slides else 0)
            for slides in sliding_layers(cfg, keys, 6)
        ),
    )


ARCH = Arch(
    name="gemma3",
    rope_interleaved=False,
    norms=frozenset({"attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"}),
    adapt=adapt,
)
