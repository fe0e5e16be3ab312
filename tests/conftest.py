"""Settings that every test runs under."""

import os

# Before jax is imported: two CPU devices, to test sharding, and not the user's compile cache.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("MINFER_COMPILE_CACHE", "off")

import jax
import pytest

from minfer_jax import compile_cache
from minfer_jax.compile_cache import EVERYTHING
from minfer_jax.quant import native
from tests.helpers.jax_settings import compile_cache_of

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every implementation of the product and of attention that runs here: plain XLA, and the kernels
# for each instruction set of this machine.
XLA = "xla"
KERNELS = native.available()


@pytest.fixture(scope="module")
def one_compile_cache(tmp_path_factory):
    """One compile cache for all runs of a module, in this process and in others."""
    with pytest.MonkeyPatch.context() as patch, compile_cache_of(None):
        patch.setenv(compile_cache.VARIABLE, str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="module")
def shared_compiles(tmp_path_factory):
    """A fresh engine finds in jax's cache what an engine like it has compiled before."""
    with compile_cache_of(str(tmp_path_factory.mktemp("compiled")), **EVERYTHING):
        yield


def _use(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(native.VARIABLE, native.OFF if name == XLA else name)
    assert native.isa() == (None if name == XLA else name)
    return name


@pytest.fixture(params=(XLA, *KERNELS))
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the one in use; what is compiled for one must not be taken for another."""
    return _use(request.param, monkeypatch)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, of the kernels alone."""
    return _use(request.param, monkeypatch)
