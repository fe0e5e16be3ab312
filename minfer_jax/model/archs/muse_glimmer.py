"""muse-glimmer: sliding layers rotate, the others do not; a gate on attention; two epsilons."""

import dataclasses

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import local_rope, with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The embeddings' norm, the logits' scale and cap, and the sliding layers.

    The cap is 30 where the file names none; an explicit 0 switches it off.
    """
    cfg = dataclasses.replace(
        cfg,
        embedding_norm=True,
        logit_scale=keys.number("logit_scale"),
        final_softcap=keys.number("final_logit_softcapping", 30.0, minimum=0.0),
    )
    return with_window(cfg, keys, period=4, local=local_rope(cfg, keys), full=None)


ARCH = Arch(
    name="muse-glimmer",
    rope_interleaved=True,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    post_norm_eps=1e-8,  # llama.cpp: no key holds it
    qk_norm="head",
    attn_gate=True,
    adapt=adapt,
)
