"""The product with a packed weight, against float64, in every implementation that runs here."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.quant import native, xla
from minfer_jax.quant.formats import FORMATS, Format
from minfer_jax.quant.matmul import EXACT, MATVEC_ROWS, NATIVE_ROWS, Arithmetic, qmatmul
from minfer_jax.quant.prologue import Gate, Prologue, RmsNorm, applied
from minfer_jax.quant.qtensor import QTensor, from_blocks, stack_blocks
from tests.helpers.random_blocks import BLOCK_SCALES
from tests.test_formats import ALL, PACKED, blocks_of, reference

F32 = jnp.dtype("float32")
FEW, MANY = MATVEC_ROWS, NATIVE_ROWS + 1  # rows that are few, and many, for all implementations
ROUNDED, BF16 = Arithmetic(few="int16"), Arithmetic(many="bfloat16")

# Error over the size of a random result, as norms. Measured on x86: 3e-7 and 7e-7, 3e-5 (16 bits a
# unit of 32 columns) and 2.5e-3 (two factors of 8 bits).
FLOAT32, INT16, BFLOAT16 = 1e-6, 4e-5, 4e-3


def cases(implementation: str) -> list[tuple[int, Arithmetic, float]]:
    """(rows of x, arithmetic, bound) that differ; plain XLA rounds no few rows."""
    few = [] if implementation == "xla" else [(1, ROUNDED, INT16), (FEW, ROUNDED, INT16)]
    return [(1, EXACT, FLOAT32), *few, (MANY, EXACT, 2 * FLOAT32), (MANY, BF16, BFLOAT16)]


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


@functools.partial(jax.jit, static_argnames=("key", "arithmetic"))
def compiled(key: tuple[bool, bool], x: jax.Array, w: QTensor, arithmetic: Arithmetic, **rest):
    del key
    return qmatmul(x, w, arithmetic, **rest)


def product(x: jax.Array, w: QTensor, arithmetic: Arithmetic = EXACT, **rest) -> jax.Array:
    """qmatmul, compiled once for plain XLA and once for the kernels, whichever set is chosen."""
    return compiled(key(arithmetic), x, w, arithmetic, **rest)


def key(arithmetic: Arithmetic) -> tuple[bool, bool]:
    """What decides on the program, beside the arguments: all instruction sets share it."""
    return native.isa() is not None, arithmetic == BF16 and native.bfloat16()


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
def test_product_of_every_format(implementation: str, fmt: Format):
    w, exact = weight(fmt, 193, 512)
    x = activations(MANY, 512)
    for rows, arithmetic, bound in cases(implementation):
        found = product(jnp.asarray(x[:rows]), w, arithmetic)
        assert error(found, x[:rows], exact) <= bound, (rows, arithmetic)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_product_of_every_shape(implementation: str, n: int, k: int, name: str):
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == name)
    if k % fmt.block:
        fmt = FORMATS[8]  # Q8_0, as quantisers do where K-quants do not fit
    w, exact = weight(fmt, n, k)
    x = activations(MANY, k)
    for rows, arithmetic, bound in cases(implementation):
        found = product(jnp.asarray(x[:rows]), w, arithmetic)
        assert error(found, x[:rows], exact) <= bound, (rows, arithmetic)


@pytest.mark.parametrize("arithmetic", [EXACT, ROUNDED], ids=["float32", "int16"])
@pytest.mark.parametrize("ggml_type", [1, 6, 12])  # F16, Q5_0, Q4_K
def test_a_row_does_not_depend_on_the_others(
    implementation: str, ggml_type: int, arithmetic: Arithmetic
):
    w, exact = weight(FORMATS[ggml_type], 16, 256)
    x = activations(NATIVE_ROWS, 256)
    if implementation == "xla" and arithmetic != EXACT:
        pytest.skip("plain XLA rounds no few rows")
    alone = [product(jnp.asarray(row[None]), w, arithmetic)[0] for row in x]
    for rows in (2, FEW) if implementation == "xla" else (2, 3, 5, 15, NATIVE_ROWS):
        together = product(jnp.asarray(x[:rows]), w, arithmetic)
        assert error(together, x[:rows], exact) <= INT16
        np.testing.assert_allclose(together, np.stack(alone[:rows]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [17, 18, 23, 24, 47, 48, 49, 130, 200])
def test_any_number_of_many_rows(kernels: str, rows: int):
    w, exact = weight(FORMATS[12], 193, 256)
    x = activations(rows, 256)
    for arithmetic, bound in ((EXACT, 2 * FLOAT32), (BF16, BFLOAT16)):
        found = product(jnp.asarray(x), w, arithmetic)
        assert error(found, x, exact) <= bound


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 300])
def test_any_number_of_outputs(kernels: str, n: int):
    w, exact = weight(FORMATS[8], n, 96)
    x = activations(MANY, 96)
    for rows, arithmetic, bound in cases(kernels):
        found = product(jnp.asarray(x[:rows]), w, arithmetic)
        assert error(found, x[:rows], exact) <= bound, (rows, arithmetic)


@pytest.mark.parametrize("k", [2048, 2080, 4096])
def test_more_columns_than_the_kernels_unpack_at_a_time(kernels: str, k: int):
    w, exact = weight(FORMATS[2], 20, k)
    x = activations(MANY, k)
    for rows, arithmetic, bound in cases(kernels):
        found = product(jnp.asarray(x[:rows]), w, arithmetic)
        assert error(found, x[:rows], exact) <= 2 * bound, (rows, arithmetic)


@pytest.mark.parametrize("fmt", PACKED)
def test_activations_far_from_zero(implementation: str, fmt: Format):
    # Zero and minimum are taken out of the sum over a group: what cancels there must not show.
    w, exact = weight(fmt, 16, 512)
    x = (10.0 + activations(1, 512)).astype(np.float32)
    for arithmetic, bound in ((EXACT, 1e-6), (ROUNDED, 2e-5)):
        found = product(jnp.asarray(x), w, arithmetic)
        off = np.abs(np.asarray(found) - x @ exact.T)
        assert np.all(off <= bound * (np.abs(x) @ np.abs(exact).T))


@pytest.mark.parametrize("ggml_type", [3, 6, 8, 11, 12, 14, 16, 19, 20, 35, 41])
def test_scales_of_any_size_and_sign(implementation: str, ggml_type: int):
    fmt = FORMATS[ggml_type]
    raw = blocks_of(fmt, 20, 512).reshape(-1, fmt.block_bytes).copy()
    rng = np.random.default_rng(1)
    for at in BLOCK_SCALES[fmt.name]:
        # Zero, the smallest, below what is normal, and the largest.
        choices = np.array([0.0, -0.0, 6e-8, -3e-5, 1.0, -0.1, 3.0, 60000.0], np.float16)
        raw[:, at : at + 2] = rng.choice(choices, (len(raw), 1)).view(np.uint8)
    raw = raw.reshape(20, -1)
    w, exact = from_blocks(raw, ggml_type), reference(raw, fmt).astype(np.float64)
    x = activations(MANY, 512)
    for rows, arithmetic, bound in cases(implementation):
        found = np.asarray(product(jnp.asarray(x[:rows]), w, arithmetic))
        size = np.linalg.norm(x[:rows], axis=1)[:, None] * np.linalg.norm(exact, axis=1)
        assert np.all(np.abs(found - x[:rows] @ exact.T) <= bound * size)


def test_activations_of_any_size(implementation: str):
    w, exact = weight(FORMATS[12], 20, 512)
    x = activations(MANY, 512)
    x[0] = 0
    x[1] *= 1e30
    x[2] *= 1e-28
    x[3, ::7] *= 1e-4
    x[3, 17] = 1e5
    x[4, :480] = 0
    for rows, arithmetic, bound in cases(implementation):
        found = np.asarray(product(jnp.asarray(x[:rows]), w, arithmetic))
        size = np.linalg.norm(x[:rows].astype(np.float64), axis=1)[:, None]
        off = np.abs(found - x[:rows].astype(np.float64) @ exact.T)
        assert np.all(off <= 2 * bound * size * np.linalg.norm(exact, axis=1)), (rows, arithmetic)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 37, 255])
def test_what_is_not_a_number_stays_none(implementation: str, value: float, column: int):
    w, exact = weight(FORMATS[2], 20, 256)
    x = activations(MANY, 256)
    x[0, column] = value
    for rows, arithmetic, bound in cases(implementation):
        found = product(jnp.asarray(x[:rows]), w, arithmetic)
        # Output 0 may have a weight of zero there; infinity times zero is NaN all the same.
        assert not np.isfinite(np.asarray(found[0])).any(), (rows, arithmetic)
        if rows > 1:
            assert error(found[1:], x[1:rows], exact) <= bound


PROLOGUES = [
    pytest.param(None, id="none"),
    pytest.param(RmsNorm(weight=jnp.asarray(activations(256)), eps=1e-6), id="norm"),
    pytest.param(Gate("silu"), id="silu"),
    pytest.param(Gate("gelu"), id="gelu"),
]


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_what_comes_before_the_product(implementation: str, prologue: Prologue | None):
    w, exact = weight(FORMATS[12], 37, 256)
    width = 512 if isinstance(prologue, Gate) else 256
    x, plus = 3 * activations(MANY, width), activations(MANY, 37)
    if isinstance(prologue, Gate):
        x[0, :8] = [-1e20, -200, -88, -20, 0, 20, 88, 200]
    between = np.asarray(applied(jnp.asarray(x), prologue))
    for rows, arithmetic, bound in cases(implementation):
        added = jnp.asarray(plus[:rows])
        found = product(jnp.asarray(x[:rows]), w, arithmetic, prologue=prologue, plus=added)
        assert error(found - added, between[:rows], exact) <= 2 * bound, (rows, arithmetic)


@pytest.mark.parametrize("n", [37, 48])
def test_what_comes_after_the_product(implementation: str, n: int):
    w, exact = weight(FORMATS[12], n, 256)
    x, plus = activations(MANY, 256), activations(MANY, n)
    post = RmsNorm(weight=jnp.asarray(1 + 0.1 * activations(n)), eps=1e-6)
    expected = np.asarray(applied(jnp.asarray(x @ exact.T, F32), post)) + plus
    for rows, arithmetic, bound in cases(implementation):
        found = product(
            jnp.asarray(x[:rows]), w, arithmetic, plus=jnp.asarray(plus[:rows]), post=post
        )
        np.testing.assert_allclose(found, expected[:rows], rtol=0, atol=10 * bound)


@pytest.mark.parametrize("k", [1, 20, 32, 48])
def test_plain_floats_of_any_width(implementation: str, k: int):
    w, exact = weight(FORMATS[0], 5, k)
    for rows in (1, MANY):
        x = activations(rows, k)
        assert error(product(jnp.asarray(x), w), x, exact) <= 2 * FLOAT32


def test_leading_axes_are_kept(implementation: str):
    w, exact = weight(FORMATS[2], 7, 64)
    x, plus = activations(2, 3, 64), activations(2, 3, 7)
    assert error(product(jnp.asarray(x), w), x, exact) <= FLOAT32
    one = product(jnp.asarray(x[0, 0]), w)
    assert error(one, x[0, 0], exact) <= FLOAT32
    added = product(jnp.asarray(x), w, plus=jnp.asarray(plus))
    assert error(added - plus, x, exact) <= 2 * FLOAT32


@pytest.mark.parametrize("fmt", ALL)
def test_rows_are_looked_up(fmt: Format):
    w, exact = weight(fmt, 193, 256)
    ids = np.array([0, 192, 5, 5, 17], np.int32)
    found = jax.jit(xla.rows)(w, jnp.asarray(ids))
    np.testing.assert_array_equal(np.asarray(found, np.float64), exact[ids])


def test_wrong_width_is_refused():
    w, _ = weight(FORMATS[2], 7, 64)
    with pytest.raises(ValueError, match=r"x has 32 columns.*N=7, K=64.* needs 64"):
        qmatmul(jnp.zeros((1, 32), F32), w, EXACT)
    with pytest.raises(ValueError, match=r"x has 64 columns.*N=7, K=64.* needs 128"):
        qmatmul(jnp.zeros((1, 64), F32), w, EXACT, prologue=Gate("silu"))


@pytest.mark.parametrize(
    ("ggml_type", "rows"),
    [
        (1, 1),
        (8, 1),
        (10, 1),
        (13, 1),
        (17, 1),
        (40, 1),
        (0, MANY),
        (6, MANY),
        (14, MANY),
        (29, MANY),
    ],
)
def test_a_layer_of_a_stack_equals_the_layer_alone(implementation: str, ggml_type: int, rows: int):
    fmt = FORMATS[ggml_type]
    raws = [blocks_of(fmt, 24, 256, seed=i) for i in range(3)]
    stack = stack_blocks([[raw] for raw in raws], fmt.ggml_type)
    x = jnp.asarray(activations(rows, 256))
    for i, raw in enumerate(raws):
        alone = np.asarray(product(x, from_blocks(raw, fmt.ggml_type)))
        found = np.asarray(product(x, stack.at(i)))
        np.testing.assert_allclose(found, alone, rtol=0, atol=2e-6 * np.abs(alone).max())


@pytest.mark.parametrize(("ggml_type", "rows"), [(0, 1), (8, 2), (20, 1), (14, MANY)])
def test_gradient_with_respect_to_x(implementation: str, ggml_type: int, rows: int):
    w, _ = weight(FORMATS[ggml_type], 9, 256)
    x, direction, c = activations(rows, 256), activations(rows, 256)[::-1], activations(rows, 9)

    @jax.jit
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(product(x, w) * 0.05) * c)

    slope = float(jnp.vdot(jax.jit(jax.grad(loss))(jnp.asarray(x)), jnp.asarray(direction)))
    step = 1e-2
    ahead, back = (loss(jnp.asarray(x + s * step * direction)) for s in (1, -1))
    assert slope == pytest.approx(float(ahead - back) / (2 * step), rel=2e-3)


def test_gradients_of_what_comes_before_and_after(implementation: str):
    w, exact = weight(FORMATS[12], 9, 256)
    x, plus, norm = activations(2, 256), activations(2, 9), 1 + 0.1 * activations(256)

    def loss(weights, x, norm, plus):
        y = product(x, w, prologue=RmsNorm(weight=norm, eps=1e-6), plus=plus)
        return jnp.sum(jnp.sin(y) * weights)

    def plain(weights, x, norm, plus):
        y = applied(x, RmsNorm(weight=norm, eps=1e-6)) @ jnp.asarray(exact.T, F32) + plus
        return jnp.sum(jnp.sin(y) * weights)

    args = [jnp.asarray(a) for a in (activations(2, 9), 1e-2 * x, norm, 0.1 * plus)]
    found = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))(*args)
    expected = jax.jit(jax.grad(plain, argnums=(1, 2, 3)))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * float(jnp.abs(b).max()))


def test_mapped_over_a_leading_axis(implementation: str):
    w, exact = weight(FORMATS[12], 20, 256)
    x = activations(3, 2, 256)
    found = jax.jit(jax.vmap(lambda x: product(x, w)))(jnp.asarray(x))
    assert error(found, x, exact) <= FLOAT32


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


@pytest.mark.parametrize("ggml_type", [2, 12, 20])  # Q4_0, Q4_K, IQ4_NL
def test_matvec_writes_no_dequantised_weight(implementation: str, ggml_type: int):
    n, k = 256, 1024
    stack = stack_blocks([[blocks_of(FORMATS[ggml_type], n, k)]] * 2, ggml_type)
    program = compiled.lower(key(EXACT), jnp.zeros((1, k), F32), stack.at(1), EXACT).compile()
    written = buffers(program)
    assert ("u32", 2 * n * k // 8) in written, "the parameter itself: the text is read rightly"
    assert not [b for b in written if b[0] in ("f64", "f32", "bf16", "f16") and b[1] >= n * k // 8]
    # Nor does it copy the layer out of its stack.
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < n * k // 2

    dequantised = jax.jit(xla.dequantize, static_argnums=1).lower(stack.at(1), F32).compile()
    assert ("f32", n * k) in buffers(dequantised), "such a buffer would be seen"
