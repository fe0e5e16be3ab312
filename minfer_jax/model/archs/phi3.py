"""phi3: Phi 3 and 4; qkv and gate-up may be fused, and RoPE has factors for two lengths."""

from minfer_jax.model.archs.base import Arch

# The key attention.sliding_window is set in many files, but llama.cpp lets no layer slide.
ARCH = Arch(name="phi3", rope_interleaved=False)
