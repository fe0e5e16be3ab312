"""qwen2moe: qwen2 with experts, and one that every token uses, behind a gate."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="qwen2moe", rope_interleaved=False, normalize=False)
