"""nemotron: layer norms; the MLP has no gate, its activation is a squared ReLU."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(
    name="nemotron", rope_interleaved=False, layer_norm=True, activation="relu2", gated=False
)
