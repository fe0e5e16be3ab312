"""qwen3moe: qwen3 with experts."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="qwen3moe", rope_interleaved=False, qk_norm="head")
