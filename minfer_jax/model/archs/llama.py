"""llama: Llama 1 to 3, Mistral, SmolLM and many more that share the block."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="llama", rope_interleaved=True)
