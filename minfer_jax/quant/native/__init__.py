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
NAMES = ("avx512", "avx2", "neon", "portable")
CALLS = ("minfer_product", "minfer_experts", "minfer_attention", "minfer_step")


class IsaError(ValueError):
    """$MINFER_CPU_ISA names what this machine or this build does not have. One line."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built library with its calls registered, or None; the log says why, once."""
    spec = importlib.util.find_spec(f"{__name__}._kernels")
    if spec is None or spec.origin is None:
        log.warning("no native kernels in this install (they could not be built): using plain XLA")
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        calls = {name: found[name] for name in CALLS}
        found.minfer_choose.restype = ctypes.c_char_p
        found.minfer_has.restype = ctypes.c_bool
        found.minfer_bfloat16.restype = ctypes.c_bool
    except (OSError, AttributeError) as e:  # AttributeError: it is of another version
        log.warning("the native kernels do not load (%s; install again): using plain XLA", e)
        return None
    for name, call in calls.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(call), platform="cpu")
    return found


def stamp() -> tuple[int, int] | None:
    """What tells one build of the library from another; None where there is none."""
    found = library()
    if found is None:
        return None
    status = os.stat(found._name)
    return status.st_size, status.st_mtime_ns


def available() -> tuple[str, ...]:
    """The instruction sets that both this build and this processor have, the best first."""
    found = library()
    return () if found is None else tuple(n for n in NAMES if found.minfer_has(n.encode()))


def isa() -> str | None:
    """The instruction set in use; None where products run in plain XLA.

    The choice is one for the process and made anew by each call of this: a program already compiled
    runs on what was chosen last.

    Raises:
        IsaError: $MINFER_CPU_ISA names none of this machine's.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == OFF or jax.default_backend() != "cpu" or (found := library()) is None:
        return None
    name = found.minfer_choose(wanted.encode())
    if name is None:
        raise IsaError(
            f"{VARIABLE} is {wanted!r}, expected one of {', '.join((*available(), OFF))} here, "
            "or nothing for the best"
        )
    return name.decode()


def bfloat16() -> bool:
    """Whether the kernels multiply many rows in bfloat16."""
    found = library() if isa() else None
    return found is not None and found.minfer_bfloat16()
