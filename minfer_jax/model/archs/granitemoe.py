"""granitemoe: granite with experts."""

from minfer_jax.model.archs import granite
from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="granitemoe", rope_interleaved=True, adapt=granite.adapt)
