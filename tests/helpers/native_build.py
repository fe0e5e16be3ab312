"""Compiles native_check.cpp with the kernels of an instruction set, and runs it."""

import subprocess
from pathlib import Path

from tests.test_layering import PACKAGE, ROOT

SOURCES = ROOT / PACKAGE / "quant" / "native"
CHECK = ROOT / "tests" / "helpers" / "native_check.cpp"


def compiled(compiler: str, out: Path, *args: str) -> str:
    """The path of what a compiler made of its arguments; fails the test where it makes nothing."""
    command = [compiler, "-std=c++17", "-O1", f"-I{SOURCES}", *args, "-o", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    return str(out)


def check_program(
    compiler: str,
    folder: Path,
    name: str,
    flags: tuple[str, ...],
    checks: tuple[str, ...] = (),
    link: tuple[str, ...] = (),
) -> str:
    """The path of the program that checks one instruction set beside the portable kernels.

    Args:
        compiler: its command.
        folder: where to put what is compiled.
        name: of the instruction set, as in CMakeLists.txt.
        flags: that choose it.
        checks: further flags for it and for the program, not for the portable kernels.
        link: flags for the program alone.
    """
    table = f"-DMINFER_TABLE=k{name.capitalize()}"
    kernels = str(SOURCES / "kernels.cpp")
    portable = ("-DMINFER_ISA=portable", "-DMINFER_TABLE=kPortable")
    parts = [
        compiled(compiler, folder / f"{isa}.o", "-c", *args, kernels)
        for isa, args in (
            ("portable", portable),
            (name, (*flags, *checks, f"-DMINFER_ISA={name}", table)),
        )
    ]
    return compiled(compiler, folder / "check", *checks, *link, table, str(CHECK), *parts)


def errors(command: list[str], timeout: float) -> dict[str, float]:
    """What the program prints: the largest error of each kind, over the largest value."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr
    lines = (line.split(": ") for line in run.stdout.splitlines())
    return {kind: float(value) for kind, value in lines}


# The largest errors there may be: of sums in float32, of activations in 16 bits, of factors in
# bfloat16; a cache's values may be rounded to their other neighbour. Measured: 3.1e-6, 3.8e-5,
# 1.7e-2 (attention, else 5.0e-3), 6.8e-5 and 3e-4.
BOUNDS = {
    "few": 2e-6,
    "many": 6e-6,
    "rounded": 8e-5,
    "bfloat16": 1e-2,
    "experts float32": 2e-6,
    "experts rounded": 8e-5,
    "experts bfloat16": 1e-2,
    "attention": 6e-6,
    "attention bfloat16": 3e-2,
    "step": 2e-4,
    "step's cache": 1e-2,
}


def beyond(found: dict[str, float]) -> dict[str, float]:
    """Those that are larger than BOUNDS, or no numbers."""
    return {kind: value for kind, value in found.items() if not value <= BOUNDS[kind]}
