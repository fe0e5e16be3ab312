"""stablelm: layer norms; without an ffn_norm (StableLM 2 12B) attention and MLP side by side."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(
    name="stablelm",
    rope_interleaved=False,
    layer_norm=True,
    qk_norm="heads",
    optional=frozenset({"ffn_norm", "attn_q_norm", "attn_k_norm"}),
)
