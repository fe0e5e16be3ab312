"""xverse: llama's block."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="xverse", rope_interleaved=True)
