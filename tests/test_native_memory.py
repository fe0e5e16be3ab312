"""The kernels with every access to memory checked, in shapes that do not come out even.

GCC's address sanitizer, on vectors that have the size that is needed and no byte more. For AVX-512
alone, which has the largest tiles: instrumented code for shorter registers compiles for minutes.
"""

import shutil
from pathlib import Path

import pytest

from minfer_jax.quant import native
from tests.helpers.native_build import BOUNDS, beyond, check_program, errors

# As in CMakeLists.txt.
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c"
# A call for each check, and none when a variable of a loop goes out of scope: compiled in a tenth
# of the time.
CHECKS = (
    "-fsanitize=address",
    "-fno-sanitize-address-use-after-scope",
    "--param=asan-instrumentation-with-call-threshold=0",
)


@pytest.mark.kernels
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.skipif("avx512" not in native.available(), reason="needs AVX-512")
@pytest.mark.timeout(900)  # two compilations, of some 15 s each on an idle core
def test_no_access_beyond_what_is_given(tmp_path: Path):
    program = check_program("g++", tmp_path, "avx512", tuple(AVX512.split()), checks=CHECKS)
    found = errors([program], timeout=100)
    assert found.keys() == BOUNDS.keys()
    assert not beyond(found)
