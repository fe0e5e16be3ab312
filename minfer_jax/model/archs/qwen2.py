"""qwen2: Qwen 2 and 2.5 and their distillates; biases on q, k and v come with the file."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="qwen2", rope_interleaved=False)
