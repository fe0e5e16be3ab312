"""The kernels for Arm, cross-compiled and run by an emulator: skipped where there is neither.

apt-get install g++-aarch64-linux-gnu qemu-user-static
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_layering import PACKAGE, ROOT

SOURCES = ROOT / PACKAGE / "quant" / "native"
CHECK = ROOT / "tests" / "helpers" / "native_check.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

# The largest difference from the portable kernels, over the largest value. Measured: 0, 3.6e-5
# (activations in 16 bits), 1.1e-6 and 0.
BOUNDS = {"few": 2e-6, "rounded": 8e-5, "many": 4e-6, "attention": 2e-6}


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}",
)
def test_neon_equals_portable(tmp_path: Path):
    def build(out: str, *args: str) -> str:
        path = str(tmp_path / out)
        command = [COMPILER, "-std=c++17", "-O1", f"-I{SOURCES}", *args, "-o", path]
        run = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert run.returncode == 0, run.stderr
        return path

    kernels = str(SOURCES / "kernels.cpp")
    neon = "-march=armv8.2-a+dotprod"
    names = ("-DMINFER_ISA=neon", "-DMINFER_TABLE=kNeon")
    parts = [
        build("neon.o", "-c", neon, *names, kernels),
        build("portable.o", "-c", "-DMINFER_ISA=portable", "-DMINFER_TABLE=kPortable", kernels),
    ]
    program = build("check", "-static", "-DMINFER_TABLE=kNeon", str(CHECK), *parts)
    run = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert {kind for kind, _ in lines} == BOUNDS.keys()
    assert not [(kind, value) for kind, value in lines if not float(value) <= BOUNDS[kind]]
