"""orion: llama's block with layer norms."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="orion", rope_interleaved=False, layer_norm=True)
