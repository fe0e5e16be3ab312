"""smollm3: llama's block, every fourth layer without RoPE."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import without_rope_every

ARCH = Arch(
    name="smollm3", rope_interleaved=True, adapt=lambda cfg, keys: without_rope_every(cfg, 4)
)
