"""ernie4_5-moe: ernie4_5 with experts in most layers, chosen with a bias."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="ernie4_5-moe", rope_interleaved=True)
