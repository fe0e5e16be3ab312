"""The quantisers: their error beside ggml's, and what they do with weights that are out of line."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.quant.quantizers import (
    QUANTIZERS,
    can_dequantize,
    dequantize,
    largest,
    quantize,
)
from minfer_jax.quant.quantizers.fit import fit_scale, fit_scale_and_minimum
from minfer_jax.quant.quantizers.pack import pack_fields

# Root of the mean square error over that of the weights, for `samples()`, of what llama.cpp b11434
# makes of them (ggml_quantize_chunk, no importance matrix).
GGML_ERROR = {
    "F32": 0.0,
    "F16": 0.000212,
    "BF16": 0.001695,
    "Q4_0": 0.080899,
    "Q4_1": 0.075853,
    "Q5_0": 0.040663,
    "Q5_1": 0.036878,
    "Q8_0": 0.005104,
    "Q2_K": 0.289382,
    "Q3_K": 0.146223,
    "Q4_K": 0.068849,
    "Q5_K": 0.035031,
    "Q6_K": 0.017021,
    "IQ4_NL": 0.073384,
    "IQ4_XS": 0.074025,
    "MXFP4": 0.110373,
    "TQ1_0": 0.757249,
    "TQ2_0": 0.757249,
}
# The largest error of one weight, as a part of the largest weight of 256.
WORST = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.006, "Q6_K": 0.05, "Q5_K": 0.1}
WORST |= {"Q5_0": 0.07, "Q5_1": 0.06, "Q4_0": 0.14, "Q4_1": 0.12, "Q4_K": 0.16}
WORST |= {"IQ4_NL": 0.2, "IQ4_XS": 0.2, "Q3_K": 0.35, "Q2_K": 0.7, "MXFP4": 0.3}
WORST |= {"TQ1_0": 0.51, "TQ2_0": 0.51}


def samples() -> np.ndarray:
    """float32 [64, 256], nearly normal, the same with any numpy: sums of four uniform numbers."""
    uniform = (np.random.PCG64(1).random_raw(1 << 16) >> np.uint64(11)) / 2**53
    return (uniform.reshape(-1, 4) - 0.5).sum(axis=1).astype(np.float32).reshape(-1, 256)


def there_and_back(x: np.ndarray, name: str) -> np.ndarray:
    return dequantize(quantize(x, name), TYPE_IDS[name]).reshape(x.shape)


def test_every_quantiser_is_checked_here():
    assert GGML_ERROR.keys() == WORST.keys() == QUANTIZERS.keys()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_error_is_no_larger_than_ggml_s(name: str):
    x = samples()
    blocks = quantize(x, name)
    assert blocks.dtype == np.uint8
    assert blocks.shape == (GGML_TYPES[TYPE_IDS[name]].nbytes(x.size),)
    error = dequantize(blocks, TYPE_IDS[name]).reshape(x.shape) - x
    relative = np.sqrt((error.astype(np.float64) ** 2).mean() / (x.astype(np.float64) ** 2).mean())
    assert relative <= 1.02 * GGML_ERROR[name] + 1e-6
    assert relative >= 0.9 * GGML_ERROR[name], "too good to be true: is the golden value of this?"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_block_depends_on_its_own_weights_alone(name: str):
    x = samples()
    alone = np.concatenate([quantize(row, name) for row in x])
    np.testing.assert_array_equal(quantize(x, name), alone)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [0.0, 1e-42, -1e-30, 1e-9])
def test_blocks_next_to_nothing(name: str, value: float):
    back = there_and_back(np.full((2, 256), value, np.float32), name)
    np.testing.assert_allclose(back, value, atol=1e-7)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [0.25, -3.0, 65504.0, -65504.0])
def test_equal_weights(name: str, value: float):
    back = there_and_back(np.full((1, 256), value, np.float32), name)
    np.testing.assert_allclose(back, value, rtol=0.34 if name == "MXFP4" else 0.01)


def spread(x: np.ndarray) -> np.ndarray:
    """Mostly small weights, some of them very large or very small."""
    return np.sign(x) * np.abs(x) ** 3


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=30, deadline=None)
@given(
    x=arrays(np.float32, (2, 256), elements=st.floats(-30, 30, width=32), fill=st.just(0.0)),
    scale=st.sampled_from([1.0, 1e-3, 2.0]),
)
def test_no_weight_is_far_off(name: str, x: np.ndarray, scale: float):
    x = (spread(x) * scale).astype(np.float32)
    back = there_and_back(x, name)
    assert np.isfinite(back).all()
    peak = np.abs(x).max(axis=1, keepdims=True)
    # Below that, the f16 that all scales of a block hang from may be 0: 2**-25 * 128 * 32 at most.
    assert (np.abs(back - x) <= 1.001 * WORST[name] * peak + 1.3e-4).all()


def test_weights_too_large_are_named_by_a_limit():
    assert largest("F32") > largest("BF16") > 1e38
    assert {largest(name) for name in QUANTIZERS.keys() - {"F32", "BF16"}} == {65504.0}


def test_what_can_be_read():
    readable = {kind.name for i, kind in GGML_TYPES.items() if can_dequantize(i)}
    assert QUANTIZERS.keys() | {"IQ1_S", "IQ2_XXS", "NVFP4"} <= readable
    assert not readable & {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}


def test_bit_fields():
    q = np.arange(16, dtype=np.uint8).reshape(1, 16) % 4
    # Runs of two bytes: fields of byte 0 are weights 0, 2, 4, 6, those of byte 1 are 1, 3, 5, 7.
    expected = [0b10001000, 0b11011101, 0b10001000, 0b11011101]
    np.testing.assert_array_equal(pack_fields(q, 2, 2), [expected])


def test_the_scale_is_the_best_of_all_candidates():
    x = samples()[:4].reshape(-1, 16).T.copy()
    w = np.ones_like(x)
    candidates = tuple(-4 + 0.25 * i for i in range(-4, 5))

    def nearest(v: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(v), -4, 3)

    def error(scale: np.ndarray, q: np.ndarray) -> np.ndarray:
        return ((scale * q - x) ** 2).sum(axis=0)

    scale = fit_scale(x, w, nearest, candidates)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)
    tried = [nearest(x * (c / peak)) for c in candidates]
    fitted = [(x * q).sum(axis=0) / (q * q).sum(axis=0) for q in tried]
    best = np.min([error(s, q) for s, q in zip(fitted, tried, strict=True)], axis=0)
    reached = np.min([error(scale, q) for q in tried], axis=0)
    np.testing.assert_allclose(reached, best, rtol=1e-5)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_weights_that_are_nearly_all_the_same(name: str):
    """The equations for scale and minimum are close to singular then."""
    x = np.full((3, 256), 7.3, np.float32)
    x[1, ::37] = 0
    x[2, ::50] = 7.1
    np.testing.assert_allclose(there_and_back(x, name), x, atol=0.5 if name == "Q2_K" else 0.3)


def test_a_minimum_lowers_and_never_raises():
    x = np.stack([np.linspace(-1, 2, 32), np.linspace(1, 2, 32)], axis=1).astype(np.float32)
    scale, minimum = fit_scale_and_minimum(x, np.ones_like(x), 31, (31.0,))
    np.testing.assert_allclose(minimum, [1, 0], atol=1e-4)
    np.testing.assert_allclose(scale, [3 / 31, 2 / 31], rtol=0.02)
