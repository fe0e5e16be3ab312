"""granite: llama's block with four multipliers; some files are not rotated."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_multipliers, without_rope_every
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys


def adapt(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """The multipliers, and no RoPE where the file says so."""
    cfg = with_multipliers(cfg, keys)
    return cfg if keys.boolean("rope.scaling.finetuned", True) else without_rope_every(cfg, 1)


ARCH = Arch(name="granite", rope_interleaved=True, adapt=adapt)
