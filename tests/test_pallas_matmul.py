"""The Pallas product for many rows: against its plain twin, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.pallas import matmul
from minfer_jax.pallas.matmul import Config
from minfer_jax.quant import xla
from minfer_jax.quant.formats import Format
from minfer_jax.quant.qtensor import QTensor, from_blocks
from tests.helpers.cuda_programs import calls, stand_in
from tests.test_formats import blocks_of
from tests.test_pallas_matvec import BOUND, KNOWN, NAMED, activations, weight

# Of the largest number. Both round the same factors and sum them in float32, in another order.
F32, BF16 = "float32", "bfloat16"


def assert_near_the_twin(w: QTensor, m: int, dtype: str, config: Config | None = None) -> None:
    x = activations(m, w.shape[1])
    quick = {"xla_backend_optimization_level": 0}  # most of the time goes into compiling
    kernel = functools.partial(matmul.matmul, dtype=dtype, config=config, interpret=True)
    found = jax.jit(kernel, compiler_options=quick)(x, w)
    factors = x.astype(dtype), xla.dequantize(w, jnp.dtype(dtype))
    expected = np.asarray(xla.dot(*factors))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND * np.abs(expected).max())


@pytest.mark.parametrize("fmt", KNOWN)
def test_every_format_in_a_stack_with_outputs_that_blocks_share(fmt: Format):
    # 3 tiles in blocks of 2, 17 rows in blocks of 16
    assert_near_the_twin(weight(fmt, 44, 256), 17, BF16, Config(rows=16, tiles=2))


@pytest.mark.parametrize("m", [17, 64, 130])
@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "IQ4_NL"])
def test_any_number_of_rows_in_float32(name: str, m: int):
    assert_near_the_twin(weight(NAMED[name], 48, 256), m, F32)


@pytest.mark.parametrize(("name", "k"), [("Q8_0", 96), ("Q5_0", 160), ("F16", 90)])
def test_columns_that_are_no_multiple_of_a_block(name: str, k: int):
    fmt = NAMED[name]
    w = from_blocks(blocks_of(fmt, 32, k), fmt.ggml_type)
    assert_near_the_twin(w, 16, F32, Config(rows=16, tiles=2, columns=64))


# [N, K] of SmolLM2, Gemma 3, MXFP4's gpt-oss and a 7B.
REAL = [
    ("Q4_1", 576, 1536, 130, BF16),
    ("Q5_0", 640, 2048, 512, BF16),
    ("MXFP4", 2880, 2880, 64, BF16),
    ("Q4_K", 14336, 4096, 512, BF16),
    ("Q4_K", 4096, 4096, 512, F32),
    ("Q6_K", 4096, 14336, 17, BF16),
    ("F16", 4096, 4096, 512, BF16),
]


@pytest.mark.parametrize(("name", "n", "k", "m", "dtype"), REAL)
def test_block_sizes_are_legal_at_real_shapes(name: str, n: int, k: int, m: int, dtype: str):
    x = jax.ShapeDtypeStruct((m, k), jnp.float32)
    kernel = functools.partial(matmul.matmul, dtype=dtype)
    traced = jax.jit(kernel).trace(x, stand_in(NAMED[name], n, k, 2))
    assert calls(traced.lower(lowering_platforms=("cuda",)), matmul.NAME) == 1


def test_float32_is_not_tf32():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    traced = jax.jit(lambda x, w: matmul.matmul(x, w, F32)).trace(
        x, stand_in(NAMED["Q4_K"], 64, 256, 2)
    )
    text = str(traced.jaxpr)
    assert "dot_general" in text and "Precision.DEFAULT" not in text
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 1


def test_sizes_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match="rows is 8, expected a power of two from 16 on"):
        Config(rows=8, tiles=1)
    w = from_blocks(blocks_of(NAMED["Q4_0"], 20, 256), NAMED["Q4_0"].ggml_type)
    with pytest.raises(ValueError, match=r"tiles is 4, but the weight \[N=20\] has 2"):
        matmul.matmul(activations(16, 256), w, F32, config=Config(rows=16, tiles=4))
