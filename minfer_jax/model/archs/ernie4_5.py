"""ernie4_5: llama's block."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="ernie4_5", rope_interleaved=True)
