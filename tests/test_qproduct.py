"""The product with a packed weight, against float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.quant import xla
from minfer_jax.quant.formats import FORMATS, Format
from minfer_jax.quant.matmul import MATVEC_ROWS, qmatmul
from minfer_jax.quant.qtensor import QTensor, from_blocks, stack_blocks
from tests.test_formats import ALL, PACKED, blocks_of, reference

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
MANY = MATVEC_ROWS + 1

# Error over the size of a random result, as norms. Measured on x86: 3e-7, 4e-7 and 2.4e-3 (two
# factors of 8 bits).
BOUNDS = {"matvec": 1e-6, "float32": 2e-6, "bfloat16": 4e-3}

# [N, K] of real models, and odd ones.
SHAPES = [
    pytest.param(576, 1536, id="smollm2-135m-down"),
    pytest.param(640, 2048, id="gemma3-270m-down"),
    pytest.param(128, 896, id="qwen2.5-0.5b-key"),
    pytest.param(1024, 1024, id="qwen3-0.6b-value"),
    pytest.param(7, 256, id="seven-rows"),
    pytest.param(193, 576, id="193-rows"),
    pytest.param(1, 512, id="one-row"),
]

product = jax.jit(qmatmul, static_argnums=2)


def weight(fmt: Format, n: int, k: int) -> tuple[QTensor, np.ndarray]:
    """Packed, and as float64 [N, K]."""
    raw = blocks_of(fmt, n, k)
    return from_blocks(raw, fmt.ggml_type), reference(raw, fmt).astype(np.float64)


def activations(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def error(found: jax.Array, x: np.ndarray, exact: np.ndarray) -> float:
    """The error of x [..., K] times exact [N, K], over what random factors of this size give."""
    expected = x @ exact.T
    assert found.dtype == F32
    assert found.shape == expected.shape
    size = np.linalg.norm(x) * np.linalg.norm(exact) / np.sqrt(x.shape[-1])
    return float(np.linalg.norm(np.asarray(found) - expected) / size)


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (MANY, F32), (MANY, BF16)], ids=str)
def test_product_of_every_format(fmt: Format, rows: int, dtype: jnp.dtype):
    w, exact = weight(fmt, 193, 512)
    x = activations(rows, 512)
    path = dtype.name if rows > MATVEC_ROWS else "matvec"
    assert error(product(jnp.asarray(x), w, dtype), x, exact) <= BOUNDS[path]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_product_of_every_shape(n: int, k: int, name: str):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == name)
    if k % fmt.block:
        fmt = FORMATS[8]  # Q8_0, as quantisers do where K-quants do not fit
    w, exact = weight(fmt, n, k)
    x = activations(33, k)
    for rows, dtype in ((1, F32), (33, F32), (33, BF16)):
        path = dtype.name if rows > MATVEC_ROWS else "matvec"
        found = product(jnp.asarray(x[:rows]), w, dtype)
        assert error(found, x[:rows], exact) <= BOUNDS[path]


@pytest.mark.parametrize(("ggml_type", "rows"), [(1, 2), (6, 3), (12, MATVEC_ROWS)])
def test_a_few_rows_of_x(ggml_type: int, rows: int):
    w, exact = weight(FORMATS[ggml_type], 16, 256)
    x = activations(rows, 256)
    together = product(jnp.asarray(x), w, BF16)  # a few rows are float32 whatever is asked
    assert error(together, x, exact) <= BOUNDS["matvec"]
    alone = [product(jnp.asarray(x[i : i + 1]), w, F32)[0] for i in range(rows)]
    np.testing.assert_allclose(np.asarray(together), np.stack(alone), rtol=0, atol=1e-4)


@pytest.mark.parametrize("fmt", PACKED)
def test_activations_far_from_zero(fmt: Format):
    # Zero and minimum are taken out of the sum over a group: what cancels there must not show.
    w, exact = weight(fmt, 16, 512)
    x = (10.0 + activations(1, 512)).astype(np.float32)
    off = np.abs(np.asarray(product(jnp.asarray(x), w, F32)) - x @ exact.T)
    assert np.all(off <= 1e-6 * (np.abs(x) @ np.abs(exact).T))


@pytest.mark.parametrize("k", [1, 20, 48])
def test_plain_floats_of_any_width(k: int):
    w, exact = weight(FORMATS[0], 5, k)
    for rows in (1, MANY):
        x = activations(rows, k)
        assert error(product(jnp.asarray(x), w, F32), x, exact) <= BOUNDS["float32"]


def test_leading_axes_are_kept():
    w, exact = weight(FORMATS[2], 7, 64)
    x = activations(2, 3, 64)
    assert error(product(jnp.asarray(x), w, F32), x, exact) <= BOUNDS["float32"]
    assert error(product(jnp.asarray(x[0, 0]), w, F32), x[0, 0], exact) <= BOUNDS["matvec"]


@pytest.mark.parametrize("fmt", ALL)
def test_rows_are_looked_up(fmt: Format):
    w, exact = weight(fmt, 193, 256)
    ids = np.array([0, 192, 5, 5, 17], np.int32)
    found = jax.jit(xla.rows)(w, jnp.asarray(ids))
    np.testing.assert_array_equal(np.asarray(found, np.float64), exact[ids])


def test_wrong_width_is_refused():
    w, _ = weight(FORMATS[2], 7, 64)
    with pytest.raises(ValueError, match=r"x has 32 columns.*N=7, K=64.* needs 64"):
        qmatmul(jnp.zeros((1, 32), F32), w, F32)


@pytest.mark.parametrize(
    ("ggml_type", "rows"), [(1, 1), (8, 1), (10, 1), (13, 1), (0, MANY), (6, MANY), (14, MANY)]
)
def test_a_layer_of_a_stack_equals_the_layer_alone(ggml_type: int, rows: int):
    fmt = FORMATS[ggml_type]
    raws = [blocks_of(fmt, 24, 256, seed=i) for i in range(3)]
    stack = stack_blocks([[raw] for raw in raws], fmt.ggml_type)
    x = jnp.asarray(activations(rows, 256))
    of_layer = jax.jit(lambda x, w, i: qmatmul(x, w.at(i), F32))
    for i, raw in enumerate(raws):
        alone = np.asarray(product(x, from_blocks(raw, fmt.ggml_type), F32))
        found = np.asarray(of_layer(x, stack, jnp.int32(i)))
        np.testing.assert_allclose(found, alone, rtol=0, atol=2e-6 * np.abs(alone).max())


@pytest.mark.parametrize(("ggml_type", "rows"), [(0, 1), (8, 2), (14, MANY)])  # F32, Q8_0, Q6_K
def test_gradient_with_respect_to_x(ggml_type: int, rows: int):
    w, _ = weight(FORMATS[ggml_type], 9, 256)
    x, direction, c = activations(rows, 256), activations(rows, 256)[::-1], activations(rows, 9)

    @jax.jit
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(product(x, w, F32) * 0.05) * c)

    slope = float(jnp.vdot(jax.jit(jax.grad(loss))(jnp.asarray(x)), jnp.asarray(direction)))
    step = 1e-2
    ahead, back = (loss(jnp.asarray(x + s * step * direction)) for s in (1, -1))
    assert slope == pytest.approx(float(ahead - back) / (2 * step), rel=2e-3)


BUFFER = re.compile(r"\b(f64|f32|bf16|f16|[su](?:8|16|32|64))\[([\d,]*)\]")


def buffers(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """Type and size of all that the program writes to memory: what is inside a fusion is not."""
    text = compiled.as_text()
    assert text is not None
    fused = set(re.findall(r"\bfusion\(.*calls=%?([\w.-]+)", text))
    found = []
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif " = " in line and name not in fused:
            result = line.split(" = ", 1)[1].split("(")[0]
            for kind, dims in BUFFER.findall(result):
                found.append((kind, int(np.prod([int(d) for d in dims.split(",") if d]))))
    return found


@pytest.mark.parametrize("ggml_type", [2, 12])  # Q4_0, Q4_K
def test_matvec_writes_no_dequantised_weight(ggml_type: int):
    n, k = 256, 1024
    stack = stack_blocks([[blocks_of(FORMATS[ggml_type], n, k)]] * 2, ggml_type)
    x = jnp.zeros((1, k), F32)

    @jax.jit
    def one(x: jax.Array, w: QTensor, i: jax.Array) -> jax.Array:
        return qmatmul(x, w.at(i), F32)

    compiled = one.lower(x, stack, jnp.int32(1)).compile()
    written = buffers(compiled)
    assert ("u32", 2 * n * k // 8) in written, "the parameter itself: the text is read rightly"
    assert not [b for b in written if b[0] in ("f64", "f32", "bf16", "f16") and b[1] >= n * k // 8]
    # Nor does it copy the layer out of its stack.
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < n * k // 2

    dequantised = jax.jit(xla.dequantize, static_argnums=1).lower(stack.at(1), F32).compile()
    assert ("f32", n * k) in buffers(dequantised), "such a buffer would be seen"
