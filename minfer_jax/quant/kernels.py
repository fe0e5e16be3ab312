"""Which kernels may be used: the question that both choosers ask.

A choice is a static part of a program: "auto" is the C++ kernels on a CPU and the Pallas kernels on
a CUDA device, "xla" is neither, "pallas" is what "auto" is on a CUDA device, whatever this process
runs on: so that a machine without one can lower the program that it would run.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from minfer_jax.quant import native

CHOICES = ("auto", "xla", "pallas")

T = TypeVar("T")


def use_native(choice: str) -> bool:
    """Whether the C++ kernels are meant, and there."""
    return choice == "auto" and native.isa() is not None


def use_pallas(choice: str) -> bool:
    """Whether a program is to hold the Pallas kernels, for the case that it is lowered for CUDA."""
    return choice == "pallas" or (choice == "auto" and jax.default_backend() == "gpu")


def on_cuda(pallas: Callable[..., T], plain: Callable[..., T], *args: object) -> T:
    """The result of `pallas` where the program is lowered for CUDA, elsewhere that of `plain`."""
    return lax.platform_dependent(*args, cuda=pallas, default=plain)
