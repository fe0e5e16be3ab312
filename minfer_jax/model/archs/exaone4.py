"""exaone4: norms after the sub-layers alone; in the large model the full layers do not rotate."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys

N_LAYER_32B = 64  # the one size that has sliding layers


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The sliding layers, three of four: they alone rotate."""
    if cfg.n_layer != N_LAYER_32B:
        return cfg
    return with_window(cfg, keys, period=4, window=4096, local=None, full=None)


ARCH = Arch(
    name="exaone4",
    rope_interleaved=False,
    attn_norm=None,
    ffn_norm=None,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
    qk_norm="head",
    adapt=adapt,
)
