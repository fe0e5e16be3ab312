"""The device that a command asks for: found, or told in one line what there is in its place."""

import os
import subprocess
import sys
from importlib import metadata

import jax
import pytest

from minfer_jax import bench, chat, device, generate
from minfer_jax.bench_rows import backend, kernels
from minfer_jax.device import DeviceError
from minfer_jax.model.load import read_model_config
from tests.helpers import tiny_models

PLATFORMS = "jax_platforms"
VARIABLES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """What a test sets is gone after it."""
    before = jax.config.values[PLATFORMS]
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what it was is restored
        monkeypatch.delenv(name)
    yield
    jax.config.update(PLATFORMS, before)


@pytest.fixture
def finds(monkeypatch):
    """Has jax find what is given, or raise it."""

    def use(found: str | Exception) -> None:
        def default_backend() -> str:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(jax, "default_backend", default_backend)

    return use


@pytest.fixture
def has(monkeypatch):
    """Has these packages be installed, and no others."""

    def use(**versions: str) -> None:
        def version(package: str) -> str:
            if package.replace("-", "_") not in versions:
                raise metadata.PackageNotFoundError(package)
            return versions[package.replace("-", "_")]

        monkeypatch.setattr(metadata, "version", version)

    return use


def refused(name: str, kernels: str = "auto") -> str:
    with pytest.raises(DeviceError) as caught:
        device.use(name, kernels)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_gpu_s_memory_is_taken_as_it_is_needed(finds):
    finds("cpu")
    device.use("auto")
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    assert found == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.9"}


@pytest.mark.parametrize("name", VARIABLES)
def test_unless_the_user_says_how(finds, monkeypatch, name):
    """jaxlib refuses the old and the new name of the fraction together."""
    finds("cpu")
    monkeypatch.setenv(name, "x")
    device.use("auto")
    assert [v for v in VARIABLES if v in os.environ] == [name]


@pytest.mark.parametrize(
    ("name", "platforms", "found"), [("gpu", "cuda,cpu", "gpu"), ("metal", "mps,cpu", "mps")]
)
def test_an_accelerator_that_is_there(finds, name, platforms, found):
    finds(found)
    device.use(name)
    assert jax.config.values[PLATFORMS] == platforms
    device.use("auto")
    assert jax.config.values[PLATFORMS] == platforms
    device.use("cpu")
    assert jax.config.values[PLATFORMS] == "cpu"


def test_none_is_found_and_no_plugin(finds, has):
    before = jax.config.values[PLATFORMS]
    has(jax="1.0")
    finds("cpu")
    said = refused("gpu")
    assert "finds no CUDA device, only cpu, and no plugin for one is installed" in said
    assert "pip install 'minfer-jax[cuda]'" in said
    said = refused("metal")
    assert "finds no Apple GPU" in said and "pip install 'minfer-jax[metal]'" in said
    assert jax.config.values[PLATFORMS] == before, "whoever goes on does so with what there is"


def test_none_is_found_by_a_plugin(finds, has):
    has(jax_cuda12_plugin="0.10.2")
    why = "Unable to initialize backend 'cuda': no driver"
    finds(RuntimeError(f"{why} (set JAX_PLATFORMS='' to choose)\nmore"))
    said = refused("gpu")
    assert f"though jax-cuda12-plugin 0.10.2 is installed ({why}): nvidia-smi" in said
    assert "pip install" not in said
    finds("cpu")
    assert "only cpu, though jax-cuda12-plugin 0.10.2 is installed: nvidia-smi" in refused("gpu")


def test_a_list_of_platforms_of_which_none_is_there(finds):
    finds(AssertionError())
    jax.config.update(PLATFORMS, "cuda")
    assert refused("auto") == "jax finds no device, see JAX_PLATFORMS: none of cuda is there"
    finds(RuntimeError("Backend 'bogus' is not known (set JAX_PLATFORMS='' to choose)"))
    assert refused("auto").endswith("see JAX_PLATFORMS: Backend 'bogus' is not known")


def test_pallas_kernels_need_a_cuda_device(finds):
    finds("cpu")
    assert "--kernels pallas needs a CUDA device, and jax has found cpu" in refused(
        "auto", "pallas"
    )
    assert "found cpu" in refused("cpu", "pallas")
    finds("gpu")
    device.use("auto", "pallas")


@pytest.mark.parametrize("command", [generate, chat, bench])
@pytest.mark.parametrize(
    ("flags", "said"),
    [("--device gpu", "no CUDA device"), ("--kernels pallas", "needs a CUDA device")],
)
def test_a_command_says_so_before_it_looks_for_a_model(
    finds, has, command, flags, said, capsys, logging_as_it_was
):
    has()
    finds("cpu")
    assert command.main(["command", *flags.split(), "no-such-model"]) == 1
    ran = capsys.readouterr()
    assert ran.out == ""
    assert [said in line for line in ran.err.splitlines()] == [True]


def test_a_device_can_be_chosen_when_a_command_is_loaded():
    """Nothing of it has made jax look for one by then, and a flag goes before the environment."""
    code = """
import jax
import minfer_jax.generate, minfer_jax.chat, minfer_jax.bench
from minfer_jax import device
device.use("cpu")
print(jax.devices()[0].platform)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "no-such-platform"},
    )
    assert (run.returncode, run.stdout) == (0, "cpu\n"), run.stderr


def test_layers_stand_one_by_one_on_a_gpu_alone(finds, tmp_path):
    file = tiny_models.save(tmp_path, tiny_models.tiny_model("llama"))
    for found, unrolled in (("cpu", False), ("gpu", True), ("mps", True)):
        finds(found)
        assert read_model_config(file).unrolled is unrolled


@pytest.mark.parametrize(
    ("found", "called", "chosen"),
    [
        ("gpu", "CUDA", {"auto": "pallas", "pallas": "pallas", "xla": "xla"}),
        ("mps", "Metal", {"auto": "xla", "xla": "xla"}),
        ("cpu", "CPU", {"xla": "xla"}),
    ],
)
def test_the_bench_says_what_it_runs_on(finds, found, called, chosen):
    finds(found)
    assert backend() == called
    assert {choice: kernels(choice) for choice in chosen} == chosen
