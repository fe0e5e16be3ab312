"""Which device jax computes on: chosen, and looked for, before anything runs on one.

jax reads its list of platforms, and a GPU's allocator what is to be known of it from the
environment, when the first array or program needs them: not when jax is imported.
"""

import os
from dataclasses import dataclass
from importlib import metadata

import jax

DEVICES = ("auto", "cpu", "gpu", "metal")

# What a CUDA device's allocator is told. A command runs one model, most of whose memory is taken
# once, when it is loaded: so nothing is gained by taking three quarters of the device beforehand,
# as jax does, and the rest of it is left to the screen, or to another process. What a model may
# take is more than those three quarters: all but a tenth, for CUDA's context and libraries.
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.9"}
# Whoever has set one of these knows what the device is used for besides.
_OWN = (*_MEMORY, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")


# What a platform of jax is called, in lower case, by llama-bench.
_BACKENDS = {"cpu": "CPU", "gpu": "CUDA", "cuda": "CUDA", "mps": "Metal", "mtl": "Metal"}


class DeviceError(ValueError):
    """There is no such device, or it cannot do what is asked of it. One line."""


@dataclass(frozen=True, kw_only=True)
class _Accelerator:
    """A kind of device that needs a plugin of jax.

    Attributes:
        called: what it is.
        platform: what a plugin registers it as.
        backend: what `jax.default_backend` calls it.
        plugins: packages that bring it.
        extra: of this package, that installs one.
        needs: what else has to be there.
    """

    called: str
    platform: str
    backend: str
    plugins: tuple[str, ...]
    extra: str
    needs: str


_ACCELERATORS = {
    "gpu": _Accelerator(
        called="CUDA device",
        platform="cuda",
        backend="gpu",
        plugins=("jax-cuda13-plugin", "jax-cuda12-plugin"),
        extra="cuda",
        needs="nvidia-smi must list one, and CUDA_VISIBLE_DEVICES not hide it",
    ),
    "metal": _Accelerator(
        called="Apple GPU",
        platform="mps",
        backend="mps",
        plugins=("jax-mps",),
        extra="metal",
        needs="it takes macOS on Apple silicon, see docs/apple.md",
    ),
}


def use(name: str, kernels: str = "auto") -> None:
    """Choose the device of this process, and make sure that it is there.

    Args:
        name: one of DEVICES; "auto" is what jax chooses: an accelerator if there is one, or what
            $JAX_PLATFORMS says.
        kernels: one of `quant.kernels.CHOICES`, which the device must have.

    Raises:
        DeviceError: jax finds no such device, or the device has no such kernels.
    """
    if not any(variable in os.environ for variable in _OWN):
        os.environ.update(_MEMORY)
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif name in _ACCELERATORS:
        _use(name, _ACCELERATORS[name])
    found, why = _look()
    if not found:
        raise DeviceError(f"jax finds no device, see JAX_PLATFORMS: {why}")
    if kernels == "pallas" and found != "gpu":
        raise DeviceError(
            f"--kernels pallas needs a CUDA device, and jax has found {found}: leave it at auto"
        )


def backend_name(platform: str) -> str:
    """What llama-bench calls a platform of jax, "CPU", "CUDA" or "Metal"; another is left alone."""
    return _BACKENDS.get(platform.lower(), platform)


def _use(name: str, wanted: _Accelerator) -> None:
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", f"{wanted.platform},cpu")
    found, why = _look()
    if found == wanted.backend:
        return
    jax.config.update("jax_platforms", before)
    has = f"jax {jax.__version__} finds no {wanted.called}" + (found and f", only {found}")
    installed = [found for plugin in wanted.plugins for found in _installed(plugin)]
    if installed:
        raise DeviceError(
            f"--device {name}: {has}, though {installed[0]} is installed"
            f"{why and f' ({why})'}: {wanted.needs}"
        )
    raise DeviceError(
        f"--device {name}: {has}, and no plugin for one is installed:"
        f" pip install 'minfer-jax[{wanted.extra}]' ({wanted.needs})"
    )


def _look() -> tuple[str, str]:
    """What jax computes on from here on, "" for nothing; and why."""
    try:
        return jax.default_backend(), ""
    except RuntimeError as e:
        return "", str(e).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0]
    except AssertionError:  # so jax says that no platform of the list is there
        return "", f"none of {jax.config.values['jax_platforms']} is there"


def _installed(package: str) -> list[str]:
    """Name and version, if it is installed."""
    try:
        return [f"{package} {metadata.version(package)}"]
    except metadata.PackageNotFoundError:
        return []
