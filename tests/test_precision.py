"""What the names of precision mean on this machine, and for a file."""

from pathlib import Path

import jax
import pytest

from minfer_jax import host
from minfer_jax.model import precision
from minfer_jax.quant import native
from minfer_jax.quant.matmul import EXACT, Arithmetic
from tests.helpers.tiny_models import load, tiny_model


def test_highest_precision_is_float32():
    assert precision.arithmetic("highest") == EXACT


@pytest.mark.parametrize(("has_bf16", "many"), [(True, "bfloat16"), (False, "float32")])
def test_default_precision_is_what_is_fast(
    has_bf16: bool, many: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    flags = frozenset({"avx512_bf16"} if has_bf16 else {"avx2"})
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    monkeypatch.setenv(native.VARIABLE, native.OFF)
    assert precision.arithmetic("default") == Arithmetic(few="int16", many=many)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert precision.arithmetic("default") == Arithmetic(few="int16", many="bfloat16")


def test_default_precision_is_what_the_kernels_have(kernels: str):
    many = "bfloat16" if kernels == "avx512" else "float32"
    assert precision.arithmetic("default") == Arithmetic(few="int16", many=many)


@pytest.mark.parametrize("weight_type", ["Q8_0", "F16"])
def test_default_precision_is_in_the_configuration(tmp_path: Path, weight_type: str):
    cfg, _ = load(tmp_path, tiny_model("llama", weight_type=weight_type), "default")
    arithmetic = precision.arithmetic("default")
    if weight_type == "F16":  # bfloat16 factors would lose what the file holds
        arithmetic = Arithmetic(few="int16", many="float32")
    assert (cfg.precision, cfg.arithmetic, cfg.cache_dtype) == ("default", arithmetic, "float16")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("model name\t: avx512_bf16\n", False),
        ("flags\t\t: xavx512_bf16\n", False),
        ("", False),
    ],
)
def test_bf16_as_the_system_tells(text: str, expected: bool, tmp_path: Path):
    (tmp_path / "cpuinfo").write_text(text)
    flags = host.cpu_flags(tmp_path / "cpuinfo")
    assert bool(flags & precision.BF16_FLAGS) is expected


def test_bf16_where_the_system_does_not_say(tmp_path: Path):
    assert host.cpu_flags(tmp_path / "nothing") == frozenset()
