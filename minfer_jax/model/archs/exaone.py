"""exaone: EXAONE 3; llama's block, RoPE in halves."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="exaone", rope_interleaved=False)
