"""The C++ kernels: finds the library, chooses an instruction set, registers the calls with XLA.

$MINFER_CPU_ISA forces an instruction set ("avx512", "avx2", "neon", "portable"), or "off" for plain
XLA. An install without a compiler has no library: everything then runs in plain XLA, which one line
of the log says.
"""

import ctypes
import functools
import importlib.util
import logging
import os

import jax

log = logging.getLogger("minfer_jax")

VARIABLE = "MINFER_CPU_ISA"
OFF = "off"
CALLS = ("minfer_matvec", "minfer_matmul", "minfer_attention")


class IsaError(ValueError):
    """$MINFER_CPU_ISA names what this machine or this build does not have. One line."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built library with its calls registered, or None; the log says why, once."""
    spec = importlib.util.find_spec(f"{__name__}._kernels")
    if spec is None or spec.origin is None:
        log.warning(
            "no native kernels in this install (no C++ compiler was found): using plain XLA"
        )
        return None
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError as e:
        log.warning("the native kernels do not load (%s): using plain XLA", e)
        return None
    found.minfer_choose.restype = ctypes.c_char_p
    found.minfer_bfloat16.restype = ctypes.c_bool
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(found[name]), platform="cpu")
    return found


@functools.cache
def _choose(wanted: str) -> str | None:
    if wanted == OFF or (found := library()) is None:
        return None
    name = found.minfer_choose(wanted.encode())
    if name is None:
        raise IsaError(
            f"{VARIABLE} is {wanted!r}, which this processor or this build does not have; "
            f"leave it unset for the best, or take portable or {OFF}"
        )
    return name.decode()


def isa() -> str | None:
    """The instruction set in use; None where products run in plain XLA.

    Raises:
        IsaError: $MINFER_CPU_ISA names none of this machine's.
    """
    if jax.default_backend() != "cpu":
        return None
    return _choose(os.environ.get(VARIABLE, ""))


def bfloat16() -> bool:
    """Whether the kernels multiply many rows in bfloat16."""
    found = library() if isa() else None
    return found is not None and found.minfer_bfloat16()
