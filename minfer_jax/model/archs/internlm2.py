"""internlm2: llama's block."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="internlm2", rope_interleaved=True)
