"""olmoe: a mixture of many small experts; one norm over all heads of queries, one of keys."""

from minfer_jax.model.archs.base import Arch

ARCH = Arch(name="olmoe", rope_interleaved=False, qk_norm="width", normalize=False)
