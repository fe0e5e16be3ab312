"""gpt-oss: experts with biases, attention sinks, every other layer slides."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import local_rope, with_window
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The sliding layers."""
    return with_window(cfg, keys, period=2, local=local_rope(cfg, keys))


ARCH = Arch(
    name="gpt-oss",
    rope_interleaved=False,
    ffn_norm="post_attention_norm",
    attn_sinks=True,
    activation="swiglu_oai",
    gating="softmax_weight",
    normalize=False,
    adapt=adapt,
)
