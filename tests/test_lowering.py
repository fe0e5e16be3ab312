"""Programs for devices that are not here: every model is lowered for CUDA and for Apple's GPUs.

What a program may hold is what its compiler takes. XLA's for CUDA takes all of StableHLO; but there
are no kernels of ours for it in C++, and nothing is to be computed in float64. The plugin for
Apple's GPUs takes less: see docs/apple.md.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.model.load import load_model
from minfer_jax.model.registry import ARCHS
from minfer_jax.quant import kernels
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.matmul import Arithmetic, qmatmul
from minfer_jax.quant.qtensor import from_blocks
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import short_engine

# Apple's GPUs let no program write over its arguments, of which jax warns if it is asked for.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

CUDA, METAL = "cuda", "mps"
HOLDS_BF16 = ("BF16", "MXFP4")  # the weights themselves; their scales, powers of two
# No float64, which no Apple GPU has, and no complex numbers; bfloat16 only where it is asked for.
TYPES = frozenset("i1 i8 i16 i32 ui8 ui16 ui32 f16 f32".split())
# Operations that jax-mps has handlers for (src/pjrt_plugin/ops of its source, 2026), but for those
# of linear algebra; and two of CHLO, which it takes apart or handles.
METAL_OPS = frozenset(
    "abs add and atan2 bitcast_convert broadcast_in_dim case cbrt ceil clamp compare concatenate"
    " constant convert cosine divide dot_general dynamic_slice dynamic_update_slice exponential"
    " exponential_minus_one floor gather iota is_finite log log_plus_one maximum minimum multiply"
    " negate not optimization_barrier or pad power reduce reduce_window remainder reshape return"
    " reverse round_nearest_afz round_nearest_even rsqrt scatter select shift_left"
    " shift_right_arithmetic shift_right_logical sign sine slice sort sqrt subtract tan tanh"
    " transpose while xor chlo.square chlo.top_k".split()
)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Let what is loaded and traced be that of a machine with a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def traced(folder: Path, data: bytes, *, precision: str, kernels: str = "xla") -> dict:
    """The programs of a model, by name: what traces each."""
    file = tiny_models.save(folder, data)
    model = load_model(file, precision=precision, cache_type="f16", kernels=kernels)
    assert model[0].unrolled
    return {name: recipe.trace for name, recipe in short_engine(model).recipes().items()}


def lowered(trace: Callable[[], jax.stages.Traced], *platforms: str) -> list[str]:
    """Of a program, its text for each platform."""
    once = trace()
    return [once.lower(lowering_platforms=(platform,)).as_text() for platform in platforms]


def types(program: str) -> set[str]:
    """The types of a program's numbers."""
    program = re.sub(r"= dense<[^>]*> : tensor<[^>]*>", "", program)  # attributes, not numbers
    return set(re.findall(r"tensor<(?:[\d?]+x)*([a-z]+\d*)", program))


def operations(program: str) -> set[str]:
    """Its operations, those of StableHLO without "stablehlo."."""
    found = re.findall(r"(?:^ *|= )\"?((?:stablehlo|chlo)\.\w+)", program, re.MULTILINE)
    return {name.removeprefix("stablehlo.") for name in found}


def check_for_metal(program: str, *more: str) -> None:
    assert operations(program) <= METAL_OPS
    assert types(program) <= {*TYPES, *more}


def check_for_cuda(program: str, *more: str) -> None:
    assert "custom_call" not in program
    assert types(program) <= {*TYPES, *more}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_model_goes_to_both(arch: str, tmp_path: Path):
    data = tiny_models.tiny_model(arch, weight_type="Q4_0")
    programs = traced(tmp_path, data, precision="highest")
    for name in ("prefill 8", "decode"):
        cuda, metal = lowered(programs[name], CUDA, METAL)
        check_for_cuda(cuda)
        check_for_metal(metal)


@pytest.mark.parametrize("arch", ["llama", "gpt-oss"])
def test_bfloat16_is_what_the_default_adds(arch: str, tmp_path: Path):
    data = tiny_models.tiny_model(arch, weight_type="Q4_0")
    programs = traced(tmp_path, data, precision="default")
    (cuda,) = lowered(programs["prefill 8"], CUDA)
    check_for_cuda(cuda, "bf16")
    assert "bf16" in types(cuda)


def test_the_other_programs(tmp_path: Path):
    """Every step of the sampler, log-probabilities, and the logits of all rows."""
    programs = traced(tmp_path, tiny_models.tiny_model("llama", n_layer=1), precision="highest")
    for name in ("decode extended", "logits 8"):
        cuda, metal, apple_s = lowered(programs[name], CUDA, METAL, "METAL")
        check_for_cuda(cuda)
        check_for_metal(metal)
        assert apple_s == metal, "as jax-metal names its platform: nothing depends on it"


@pytest.mark.parametrize("choice", kernels.CHOICES)
def test_the_kernels_for_a_cpu_are_in_no_other_program(choice: str, tmp_path: Path):
    data = tiny_models.tiny_model("llama", n_layer=1, weight_type="Q4_0")
    programs = traced(tmp_path, data, precision="highest", kernels=choice)
    for text in lowered(programs["decode"], CUDA, METAL):
        assert "custom_call @minfer_" not in text  # Pallas ones have the path of their source


def product(ggml_type: int, n_rows: int) -> jax.stages.Traced:
    """Of rows and a weight [32, 2 blocks] of zeros, which a program does not look at."""
    fmt = FORMATS[ggml_type]
    k = max(256, 2 * fmt.block)
    raw = np.zeros((32, k // fmt.block * fmt.block_bytes), np.uint8)
    exact = Arithmetic(kernels="xla")
    function = jax.jit(lambda x, w: qmatmul(x, w, exact))
    return function.trace(jnp.zeros((n_rows, k), jnp.float32), from_blocks(raw, ggml_type))


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: GGML_TYPES[t].name)
def test_every_type_of_weight_goes_to_both(ggml_type: int):
    more = {"bf16"} if GGML_TYPES[ggml_type].name in HOLDS_BF16 else set()
    for n_rows in (1, 16):
        cuda, metal = lowered(partial(product, ggml_type, n_rows), CUDA, METAL)
        check_for_cuda(cuda, *more)
        check_for_metal(metal, *more)
