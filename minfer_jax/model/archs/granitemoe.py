"""granitemoe: granite with experts; always rotated (llama.cpp reads no switch here)."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_multipliers

ARCH = Arch(name="granitemoe", rope_interleaved=True, adapt=with_multipliers)
