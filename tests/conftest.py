"""Settings that every test runs under."""

import logging
import os
from contextlib import closing
from pathlib import Path

# Before jax is imported: two CPU devices, to test sharding, and not the user's compile cache.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("MINFER_COMPILE_CACHE", "off")
# Before huggingface_hub is imported: it asks for nothing that it is not told to ask for.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_XET"] = "1"
os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"

import absl.logging
import jax
import pytest

from minfer_jax import compile_cache
from minfer_jax.compile_cache import EVERYTHING
from minfer_jax.quant import native
from minfer_jax.sources import http_client
from tests.helpers.jax_settings import compile_cache_of
from tests.helpers.servers import Server

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


@pytest.fixture
def logging_as_it_was():
    """For tests that run commands in this process, which hand the logging to absl."""
    before = logging.root.level
    yield
    logging.root.removeHandler(absl.logging.get_absl_handler())
    logging.root.setLevel(before)


@pytest.fixture(scope="session")
def _compiled_by_commands(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def cache_of_commands(_compiled_by_commands):
    """As `one_compile_cache`, for all modules that run `tiny_models.command_model`."""
    with pytest.MonkeyPatch.context() as patch, compile_cache_of(None):
        patch.setenv(compile_cache.VARIABLE, _compiled_by_commands)
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


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in an account without any models; no time is lost between tries."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINFER_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr(http_client, "PAUSES", (0.0, 0.0, 0.0))
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub))
    return tmp_path / "models"


@pytest.fixture
def server():
    """A web server on this machine."""
    with closing(Server()) as running:
        yield running


@pytest.fixture
def store():
    """Where the hub's files are."""
    with closing(Server()) as running:
        yield running


@pytest.fixture
def hub(server: Server, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """`server` as huggingface_hub's server; that has read the environment when it was imported."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    return server
