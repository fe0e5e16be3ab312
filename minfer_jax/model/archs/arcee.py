"""arcee: llama's block; the MLP has no gate, its activation is a squared ReLU."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="arcee", rope_interleaved=True, activation="relu2", gated=False)
