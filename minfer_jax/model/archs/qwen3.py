"""qwen3: qwen2's block with an RMS norm on every query and key head, before RoPE."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="qwen3", rope_interleaved=False, qk_norm="head")
