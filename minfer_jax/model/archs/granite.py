"""granite: llama's block with four multipliers."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_multipliers

ARCH = Arch(name="granite", rope_interleaved=True, adapt=with_multipliers)
