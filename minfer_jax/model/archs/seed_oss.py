"""seed_oss: llama's block; the norm before the MLP is called post_attention_norm."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="seed_oss", rope_interleaved=False, ffn_norm="post_attention_norm")
