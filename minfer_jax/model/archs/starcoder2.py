"""starcoder2: layer norms, biases everywhere, an MLP without a gate."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(
    name="starcoder2", rope_interleaved=False, layer_norm=True, activation="gelu", gated=False
)
