"""The Pallas product for few rows: against its plain twin, and in the program for CUDA."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.pallas import matmul, matvec, unpack
from minfer_jax.pallas.matvec import Config
from minfer_jax.quant import xla
from minfer_jax.quant.formats import FORMATS, Format
from minfer_jax.quant.formats.base import column_places
from minfer_jax.quant.matmul import Arithmetic, few_rows, qmatmul
from minfer_jax.quant.prologue import RmsNorm
from minfer_jax.quant.qtensor import QTensor, from_blocks, stack_blocks
from tests.helpers.cuda_programs import CUSTOM_CALL, calls, planes, produced, stand_in
from tests.test_formats import blocks_of

F32 = jnp.dtype("float32")
KNOWN = [pytest.param(fmt, id=fmt.name) for fmt in FORMATS.values() if fmt.grid is None]
REFUSED = [pytest.param(fmt, id=fmt.name) for fmt in FORMATS.values() if fmt.grid is not None]
NAMED = {fmt.name: fmt for fmt in FORMATS.values()}
BOUND = 3e-6  # of the largest number; both sum a few hundred terms in float32, in another order


def weight(fmt: Format, n: int, k: int) -> QTensor:
    """The second of a stack of two."""
    blocks = [blocks_of(fmt, n, k, seed) for seed in (1, 2)]
    return stack_blocks([[b] for b in blocks], fmt.ggml_type).at(1)


def activations(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


def assert_near_the_twin(w: QTensor, m: int, config: Config | None = None) -> None:
    x = activations(m, w.shape[1])
    quick = {"xla_backend_optimization_level": 0}  # most of the time goes into compiling
    kernel = functools.partial(matvec.matvec, config=config, interpret=True)
    found = jax.jit(kernel, compiler_options=quick)(x, w)
    expected = np.asarray(xla.dot(x, xla.dequantize(w, F32)))
    assert found.dtype == F32
    np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND * np.abs(expected).max())


@pytest.mark.parametrize("fmt", KNOWN)
def test_every_format_in_a_stack_split_and_with_outputs_that_blocks_share(fmt: Format):
    # 3 tiles in blocks of 2; 32 units, or 1024 columns of plain floats, in 2 x 2 blocks
    units = 8 if fmt.widths else 128
    assert_near_the_twin(weight(fmt, 44, 512), 1, Config(tiles=2, units=units, split=2))


@pytest.mark.parametrize("m", [3, 8])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_a_few_rows_by_the_default(name: str, m: int):
    assert_near_the_twin(weight(NAMED[name], 64, 256), m)


@pytest.mark.parametrize("split", [1, 4])
def test_units_beyond_the_weight_count_nothing(split: int):
    w = from_blocks(blocks_of(NAMED["Q5_1"], 32, 9 * 32), NAMED["Q5_1"].ggml_type)
    assert_near_the_twin(w, 2, Config(tiles=1, units=8, split=split))


@pytest.mark.parametrize("fmt", REFUSED)
def test_grids_are_refused_with_the_reason(fmt: Format, caplog: pytest.LogCaptureFixture):
    w = from_blocks(blocks_of(fmt, 16, 256), fmt.ggml_type)
    words = f"{fmt.name} looks its weights up in a grid, which the Pallas kernels do not"
    assert matvec.supports(w) == matmul.supports(w) == words
    caplog.set_level(logging.DEBUG, "minfer_jax")
    lowered = program(1, w, "cuda")
    assert words in caplog.text
    assert matvec.NAME not in lowered.as_text()


@pytest.mark.parametrize("fmt", KNOWN)
def test_every_other_format_is_taken(fmt: Format):
    w = from_blocks(blocks_of(fmt, 16, 256), fmt.ggml_type)
    assert matvec.supports(w) is matmul.supports(w) is None


def program(m: int, w: QTensor, platform: str) -> jax.stages.Lowered:
    """qmatmul with all that can surround it, lowered."""
    n, k = w.shape
    norm = RmsNorm(weight=jnp.ones(k), eps=1e-6)

    def product(x: jax.Array, plus: jax.Array, w: QTensor) -> jax.Array:
        post = RmsNorm(weight=jnp.ones(n), eps=1e-6)
        how = Arithmetic(many="bfloat16", kernels="pallas")
        return qmatmul(x, w, how, prologue=norm, post=post, plus=plus)

    x, plus = jax.ShapeDtypeStruct((m, k), F32), jax.ShapeDtypeStruct((m, n), F32)
    return jax.jit(product).trace(x, plus, w).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(("m", "name"), [(1, matvec.NAME), (8, matvec.NAME), (9, matmul.NAME)])
def test_the_program_for_cuda_holds_the_kernel_and_copies_no_plane(m: int, name: str):
    w = stand_in(NAMED["Q4_K"], 512, 1024, 3)
    lowered = program(m, w, "cuda")
    assert calls(lowered, name) == 1
    others = [(op, shape) for op, shape in produced(lowered) if op != CUSTOM_CALL]
    assert max(math.prod(shape) for _, shape in others) < math.prod(planes(w)[0])
    assert not [op for op, shape in others if shape[-3:] in planes(w)]


def test_a_sliced_plane_would_be_seen():
    w = stand_in(NAMED["Q4_K"], 512, 1024, 3)
    sliced = jax.jit(lambda w: w.own(w.scale)).trace(w).lower(lowering_platforms=("cuda",))
    assert [op for op, shape in produced(sliced) if shape[-3:] in planes(w)]


@pytest.mark.parametrize("m", [1, 9])
def test_the_program_for_a_cpu_holds_none(m: int):
    text = program(m, stand_in(NAMED["Q4_K"], 64, 256, 2), "cpu").as_text()
    assert matvec.NAME not in text and matmul.NAME not in text and "triton" not in text


def test_few_rows_are_those_of_the_kernel():
    assert few_rows("pallas") == matvec.MOST_ROWS == 8


# [N, K] of SmolLM2, Gemma 3, MXFP4's gpt-oss, a 7B and a vocabulary.
REAL = [
    ("Q4_1", 576, 576, 1),
    ("Q4_1", 1536, 576, 4),
    ("Q5_0", 640, 2048, 1),
    ("Q8_0", 262144, 640, 1),
    ("MXFP4", 2880, 2880, 1),
    ("Q4_K", 4096, 4096, 1),
    ("Q4_K", 14336, 4096, 8),
    ("Q6_K", 4096, 14336, 1),
    ("F16", 4096, 4096, 1),
]


@pytest.mark.parametrize(("name", "n", "k", "m"), REAL)
def test_block_sizes_are_legal_at_real_shapes(name: str, n: int, k: int, m: int):
    w = stand_in(NAMED[name], n, k, 2)
    x = jax.ShapeDtypeStruct((m, k), F32)
    lowered = jax.jit(matvec.matvec).trace(x, w).lower(lowering_platforms=("cuda",))
    assert calls(lowered, matvec.NAME) == 1


def test_outputs_and_units_are_spread_over_the_device():
    def programs(n: int, k: int) -> int:
        w = stand_in(NAMED["Q4_K"], n, k, 1)
        config = matvec.default(1, w)
        units = k // 32
        steps = -(-units // config.units)
        assert -(-steps // config.split) * config.split * config.units <= units * 17 / 16
        return unpack.tiles(w) // config.tiles * config.split

    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096), (1024, 14336), (1024, 4096)):
        assert 256 <= programs(n, k) <= matvec.PROGRAMS
    assert programs(65536, 4096) == 65536 // 32  # enough without splitting


def test_sizes_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match="units is 12, expected a power of two"):
        Config(tiles=1, units=12, split=1)
    w = from_blocks(blocks_of(NAMED["Q4_0"], 20, 256), NAMED["Q4_0"].ggml_type)
    with pytest.raises(ValueError, match=r"tiles is 4, but the weight \[N=20\] has 2"):
        matvec.matvec(activations(1, 256), w, config=Config(tiles=4, units=8, split=1))
    stack = stack_blocks([[blocks_of(NAMED["Q4_0"], 20, 256)]], NAMED["Q4_0"].ggml_type)
    with pytest.raises(ValueError, match=r"the weight is a stack, .* call .at\(layer\)"):
        matvec.matvec(activations(1, 256), stack)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_x_is_brought_into_the_order_of_words_and_fields(width: int, whole: bool):
    fmt = next(f for f in FORMATS.values() if f.widths == (width,) and f.grid is None)
    w = stand_in(fmt, 16, 256, 1)
    spread = width if whole else 1
    columns = jnp.arange(256.0)[None]
    rows = unpack.arranged(columns, w, spread, fields_first=False, pad=0)[0].astype(int)
    flipped = unpack.arranged(columns, w, spread, fields_first=True, pad=1)[0].astype(int)
    np.testing.assert_array_equal(flipped[:, :-1], rows.T)
    assert not flipped[:, -1].any()
    words, shifts = map(np.asarray, column_places(width))
    for row, own in enumerate(np.asarray(rows)):
        assert set(own // 32) == {row // spread}
        assert set(words[own % 32] % spread) == {row % spread}
        same = rows[row % spread] % 32  # all rows of a word have their fields at the same shifts
        np.testing.assert_array_equal(shifts[own % 32], shifts[np.asarray(same)])
