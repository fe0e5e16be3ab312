"""The kernels for Arm, cross-compiled and run by an emulator: skipped where there is neither.

apt-get install g++-aarch64-linux-gnu qemu-user-static
"""

import shutil
from pathlib import Path

import pytest

from tests.helpers.native_build import BOUNDS, beyond, check_program, errors

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.mark.kernels
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}",
)
@pytest.mark.timeout(900)  # two compilations of half a minute each on an idle core
def test_neon_equals_portable(tmp_path: Path):
    flags = ("-march=armv8.2-a+dotprod",)
    program = check_program(COMPILER, tmp_path, "neon", flags, link=("-static",))
    found = errors([EMULATOR, program], timeout=300)
    assert found.keys() == {kind for kind in BOUNDS if "bfloat16" not in kind}
    assert not beyond(found)
