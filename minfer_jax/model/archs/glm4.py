"""glm4: a norm on each side of a sub-layer; gate and up in one tensor."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(
    name="glm4",
    rope_interleaved=True,
    post_attn_norm="post_attention_norm",
    post_ffn_norm="post_ffw_norm",
)
