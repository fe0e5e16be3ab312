"""Settings that every test runs under."""

import os

# Before jax is imported: two CPU devices, to test sharding, and not the user's compile cache.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("MINFER_COMPILE_CACHE", "off")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
