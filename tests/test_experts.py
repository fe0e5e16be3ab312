"""The product of a mixture of experts against float64, in every implementation, and its router."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from minfer_jax.model.moe import GATINGS, route
from minfer_jax.quant import native
from minfer_jax.quant.experts import FEW, expert_product, runs
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.matmul import EXACT, NATIVE_ROWS, Arithmetic, qmatmul
from minfer_jax.quant.native import calls
from minfer_jax.quant.prologue import Gate, applied
from minfer_jax.quant.qtensor import QTensor, from_blocks, stack_blocks
from tests.conftest import XLA
from tests.test_formats import blocks_of, reference

FAST = Arithmetic(few="int16", many="bfloat16")
N, K, E = 37, 256, 5  # outputs that fill no whole tile
FIRST = 2  # of the layer: the experts of another one come before

# Error over the size of the result, as norms; see test_qproduct.
FLOAT32, INT16, BFLOAT16 = 2e-6, 8e-5, 8e-3


@functools.cache
def stack(ggml_type: int) -> tuple[QTensor, np.ndarray]:
    """Packed, at the first expert of the layer, and as float64 [E, N, K]."""
    fmt = FORMATS[ggml_type]
    raws = [blocks_of(fmt, N, K, seed=e) for e in range(FIRST + E)]
    exact = np.stack([reference(raw, fmt) for raw in raws[FIRST:]]).astype(np.float64)
    return stack_blocks([[raw] for raw in raws], ggml_type).at(FIRST), exact


@functools.partial(jax.jit, static_argnames=("key", "arithmetic"))
def compiled(
    key: tuple[bool, bool],
    x: jax.Array,
    w: QTensor,
    ids: jax.Array,
    arithmetic: Arithmetic,
    gate: Gate | None,
):
    del key
    return expert_product(x, w, ids, arithmetic, gate=gate)


def product(
    x: np.ndarray,
    w: QTensor,
    ids: np.ndarray,
    arithmetic: Arithmetic = EXACT,
    gate: Gate | None = None,
) -> np.ndarray:
    """expert_product, compiled once for plain XLA and once for the kernels, whichever is chosen."""
    key = native.isa() is not None, native.bfloat16()
    found = compiled(key, jnp.asarray(x), w, jnp.asarray(ids, jnp.int32), arithmetic, gate)
    assert found.dtype == jnp.float32
    return np.asarray(found)


def activations(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def expected(x: np.ndarray, exact: np.ndarray, ids: np.ndarray) -> np.ndarray:
    x = np.repeat(x.astype(np.float64), len(ids) // len(x), axis=0)
    rows = np.einsum("pk,pnk->pn", x, exact[np.maximum(ids, 0)])
    return np.where(ids[:, None] < 0, 0, rows)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-6))


# (rows of x, rows of the result): few and many in all, and of an expert.
SIZES = [(1, 1), (1, 4), (2, FEW), (9, 9), (20, 40), (300, 300)]
XLA_SIZES = [(2, FEW), (20, 40)]  # each takes a compile


@pytest.mark.parametrize("ggml_type", [0, 1, 2, 8, 12, 14])  # F32 F16 Q4_0 Q8_0 Q4_K Q6_K
def test_each_row_with_the_weight_of_its_expert(implementation: str, ggml_type: int):
    w, exact = stack(ggml_type)
    rng = np.random.default_rng(ggml_type)
    for r, p in XLA_SIZES if implementation == XLA else SIZES:
        x, ids = activations(r, K), rng.integers(-1, E, p)
        wanted = expected(x, exact, ids)
        assert error(product(x, w, ids), wanted) <= FLOAT32, (r, p)
        if implementation != XLA or p > FEW:
            found = error(product(x, w, ids, FAST), wanted)
            assert found <= (BFLOAT16 if p > FEW else INT16), (r, p)


ROUTINGS = {
    "all to one": lambda p: np.full(p, 3),
    "each expert in turn": lambda p: np.arange(p) % E,
    "nobody": lambda p: np.full(p, -1),
    "one row of many": lambda p: np.where(np.arange(p) == p // 2, 4, -7),
    "one, and the rest to another": lambda p: np.where(np.arange(p) == p - 1, 0, 2),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_skewed_routing(implementation: str, routing: str):
    w, exact = stack(2)
    for p in (8, 450):
        ids = ROUTINGS[routing](p)
        x = activations(p, K)
        found = product(x, w, ids)
        assert error(found, expected(x, exact, ids)) <= FLOAT32, p
        assert not found[ids < 0].any()


@pytest.mark.parametrize("p", [7, 60])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_routing(p: int, data: st.DataObject):
    """With the best kernels of this machine; `nobody` makes any smaller number of rows."""
    w, exact = stack(8)
    ids = np.array(data.draw(st.lists(st.integers(-2, E - 1), min_size=p, max_size=p)))
    x = activations(p, K)
    assert error(product(x, w, ids), expected(x, exact, ids)) <= FLOAT32


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-2, 9), min_size=1, max_size=40))
def test_loops_take_a_turn_for_each_expert_that_has_rows(ids: list[int]):
    padded = np.full(40, -1, np.int32)
    padded[: len(ids)] = ids
    order, first, count = map(np.asarray, jax.jit(runs)(jnp.asarray(padded)))
    used = sorted({e for e in ids if e >= 0})
    assert count == len(used)
    for r, e in enumerate(used):
        np.testing.assert_array_equal(
            order[first[r] : first[r + 1]], np.flatnonzero(padded == e), strict=False
        )
    assert sorted(order) == list(range(40))


@pytest.mark.parametrize("p", [4, 40])
def test_experts_without_rows_are_not_computed(implementation: str, p: int):
    """Their weights may be anything: zero times NaN would show."""
    w, exact = stack(8)
    assert w.scale is not None
    unused = [i for i in range(FIRST + E) if i not in (FIRST + 1, FIRST + 3)]
    bad = jax.tree.map(
        lambda a: a.at[jnp.array(unused)].set(jnp.nan) if a.dtype == jnp.float16 else a, w
    )
    x, ids = activations(p, K), np.where(np.arange(p) % 3 == 0, 1, 3)
    ids[-1] = -1
    assert error(product(x, bad, ids), expected(x, exact, ids)) <= FLOAT32
    assert np.isnan(product(x, bad, np.full(p, 2))).all(), "what is used would be seen"


@pytest.mark.parametrize("arithmetic", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_what_comes_before_the_product(implementation: str, name: str, arithmetic: Arithmetic):
    w, exact = stack(12)
    for r, p in ((4, 4), (20, 40)):
        x, ids = activations(r, 2 * K), np.arange(p) % E
        between = np.asarray(applied(jnp.asarray(x), Gate(name)))
        found = product(x, w, ids, arithmetic, Gate(name))
        bound = FLOAT32 if arithmetic == EXACT else INT16 if p <= FEW else BFLOAT16
        assert error(found, expected(between, exact, ids)) <= 2 * bound


def test_a_gate_that_no_kernel_knows(implementation: str, monkeypatch: pytest.MonkeyPatch):
    """It is applied first, in jnp; so the kernels must not be asked for it."""
    monkeypatch.delitem(calls._GATES, "silu")
    w, exact = stack(2)
    x, ids = activations(3, 2 * K), np.array([0, 2, 2])
    found = jax.jit(lambda x: expert_product(x, w, jnp.asarray(ids), EXACT, gate=Gate("silu")))(x)
    between = np.asarray(applied(jnp.asarray(x), Gate("silu")))
    assert error(np.asarray(found), expected(between, exact, ids)) <= FLOAT32


@pytest.mark.parametrize("ggml_type", [1, 12])
def test_rows_of_a_prefill_are_those_of_decodes(implementation: str, ggml_type: int):
    w, _ = stack(ggml_type)
    x, ids = activations(40, K), np.random.default_rng(0).integers(0, E, 80)
    ids[:50] = 1  # many to one, few to the others
    together = product(x, w, ids)
    for m in range(0, 40, 3):
        alone = product(x[m : m + 1], w, ids[2 * m : 2 * m + 2])
        assert error(alone, together[2 * m : 2 * m + 2]) <= FLOAT32


@pytest.mark.parametrize("rows", [NATIVE_ROWS, NATIVE_ROWS + 1])
def test_few_and_many_are_rows_of_an_expert(kernels: str, rows: int):
    """Of 120 rows, those of the expert with few are rounded to 16 bits, not to 8."""
    w, exact = stack(2)
    ids = np.full(120, 0)
    ids[:rows] = 4
    x = activations(120, K)
    off = error(product(x, w, ids, FAST)[:rows], expected(x, exact, ids)[:rows])
    assert off <= INT16 if rows == NATIVE_ROWS or not native.bfloat16() else off > 10 * INT16


@pytest.mark.parametrize("arithmetic", [EXACT, FAST], ids=["exact", "fast"])
def test_more_columns_than_are_unpacked_at_a_time(kernels: str, arithmetic: Arithmetic):
    n, k = 37, 2304
    raws = [blocks_of(FORMATS[8], n, k, seed=e) for e in range(3)]
    exact = np.stack([reference(raw, FORMATS[8]) for raw in raws]).astype(np.float64)
    w = stack_blocks([[raw] for raw in raws], 8).at(0)
    x, ids = activations(250, k), np.where(np.arange(250) % 9 == 0, 2, 1)  # 222 rows and 28
    found = product(x, w, ids, arithmetic)
    assert error(found, expected(x, exact, ids)) <= (FLOAT32 if arithmetic == EXACT else BFLOAT16)


def test_the_layer_is_data(implementation: str):
    """In a loop over layers, as a model has it: the same program for all of them."""
    w, _ = stack(8)
    exact = np.stack(
        [reference(blocks_of(FORMATS[8], N, K, seed=e), FORMATS[8]) for e in range(FIRST + E)]
    ).astype(np.float64)
    x, ids = activations(2, K), np.array([0, 1, 1, 0])

    @jax.jit
    def layers(x: jax.Array, w: QTensor, firsts: jax.Array) -> jax.Array:
        def layer(_: None, first: jax.Array) -> tuple[None, jax.Array]:
            return None, expert_product(x, w.at(first), jnp.asarray(ids), EXACT)

        return lax.scan(layer, None, firsts)[1]

    found = np.asarray(layers(jnp.asarray(x), w, jnp.arange(0, 6, 2, dtype=jnp.uint32)))
    for i, first in enumerate(range(0, 6, 2)):
        assert error(found[i], expected(x, exact[first:], ids)) <= FLOAT32


def test_one_expert_is_the_plain_product(implementation: str):
    w, _ = stack(2)
    x = activations(3, K)
    raw = blocks_of(FORMATS[2], N, K, seed=FIRST + 4)
    alone = jax.jit(lambda x, w: qmatmul(x, w, EXACT))(x, from_blocks(raw, 2))
    assert error(product(x, w, np.full(3, 4)), np.asarray(alone)) <= FLOAT32


def test_an_expert_outside_the_stack(kernels: str):
    w, _ = stack(2)
    x = activations(2, K)
    for beyond in (E, 2**31 - 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match="outside the stack"):
            product(x, w, np.array([0, beyond]))


def test_shapes_that_do_not_fit():
    w, _ = stack(2)
    ids = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match=r"x has 32 columns.*N=37, K=256.* needs 256"):
        expert_product(jnp.zeros((2, 32)), w, ids, EXACT)
    with pytest.raises(ValueError, match=r"x has 256 columns.* needs 512"):
        expert_product(jnp.zeros((2, K)), w, ids, EXACT, gate=Gate("silu"))
    with pytest.raises(ValueError, match=r"4 rows of experts for 3 rows of x"):
        expert_product(jnp.zeros((3, K)), w, ids, EXACT)
    single = from_blocks(blocks_of(FORMATS[2], N, K), 2)
    with pytest.raises(ValueError, match=r"a single one, expected a stack"):
        expert_product(jnp.zeros((2, K)), single, ids, EXACT)


def test_the_program_holds_one_call(kernels: str):
    w, _ = stack(2)
    lowered = jax.jit(lambda x, w, e: expert_product(x, w, e, EXACT)).lower(
        jnp.zeros((1, K)), w, jnp.zeros(4, jnp.int32)
    )
    text = lowered.compile().as_text() or ""
    assert re.findall(r'custom_call_target="(\w+)"', text) == ["minfer_experts"]


@pytest.mark.parametrize("p", [4, 40])
def test_no_weight_is_copied_out_of_its_stack(implementation: str, p: int):
    """Nor is more than one unpacked at a time."""
    n, k = 256, 1024
    w = stack_blocks([[blocks_of(FORMATS[14], n, k)]] * 6, 14).at(0)
    lowered = jax.jit(lambda x, w, e: expert_product(x, w, e, EXACT)).lower(
        jnp.zeros((p, k)), w, jnp.zeros(p, jnp.int32)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < (n * k // 2 if p <= FEW else 3 * 4 * n * k)


@pytest.mark.parametrize(("r", "p"), [(2, 4), (12, 24)])
def test_gradient_with_respect_to_x(implementation: str, r: int, p: int):
    w, exact = stack(8)
    ids = np.arange(p) % (E + 1) - 1
    x, c = activations(r, 2 * K), activations(p, N)[::-1]

    def loss(x: jax.Array) -> jax.Array:
        y = expert_product(x, w, jnp.asarray(ids, jnp.int32), EXACT, gate=Gate("silu"))
        return jnp.sum(jnp.sin(y) * c)

    def plain(x: jax.Array) -> jax.Array:
        x = jnp.repeat(applied(x, Gate("silu")), p // r, axis=0)
        own = jnp.asarray(exact, jnp.float32)[np.maximum(ids, 0)]
        y = jnp.einsum("pk,pnk->pn", x, own, precision=lax.Precision.HIGHEST)
        return jnp.sum(jnp.sin(jnp.where(ids[:, None] < 0, jnp.float32(0), y)) * c)

    x = 0.1 * jnp.asarray(x)
    found, wanted = jax.jit(jax.grad(loss))(x), jax.grad(plain)(x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(jnp.abs(wanted).max()))
    direction = jnp.ones_like(x)
    _, along = jax.jit(lambda x: jax.jvp(loss, (x,), (direction,)))(x)
    assert float(along) == pytest.approx(float(jnp.sum(wanted)), rel=1e-3, abs=1e-3)


# The router.


def restated(
    logits: np.ndarray, used: int, gating: str, normalize: bool, scale: float, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, a token at a time."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        e = np.exp(row - row.max())
        by = {"softmax": e / e.sum(), "sigmoid": 1 / (1 + np.exp(-row)), "softmax_weight": row}
        best = sorted(range(len(row)), key=lambda i: (-(by[gating][i] + bias[i]), i))[:used]
        own = by[gating][best]
        if gating == "softmax_weight":
            own = np.exp(own - own.max()) / np.exp(own - own.max()).sum()
        if normalize:
            own = own / max(own.sum(), 6.103515625e-5)
        ids.append(best)
        weights.append(own * scale)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_router(gating: str, normalize: bool, biased: bool):
    rng = np.random.default_rng(0)
    logits, bias = rng.standard_normal((20, 16)).astype(np.float32), np.zeros(16, np.float32)
    if biased:
        bias = 0.3 * rng.standard_normal(16).astype(np.float32)
    ids, weights = jax.jit(
        lambda logits, bias: route(
            logits, 4, gating=gating, normalize=normalize, scale=2.5, bias=bias if biased else None
        )
    )(logits, bias)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    wanted = restated(logits, 4, gating, normalize, 2.5, bias)
    np.testing.assert_array_equal(ids, wanted[0])
    np.testing.assert_allclose(weights, wanted[1], rtol=1e-5)


def test_router_by_hand():
    logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 1.0]]))  # softmax: 1/8 1/2 1/4 1/8
    ids, weights = route(logits, 2, gating="softmax", normalize=False, scale=1.0)
    np.testing.assert_array_equal(ids, [[1, 2]])
    np.testing.assert_allclose(weights, [[0.5, 0.25]], rtol=1e-6)
    for gating, normalize in (("softmax", True), ("softmax_weight", False)):
        ids, weights = route(logits, 2, gating=gating, normalize=normalize, scale=3.0)
        np.testing.assert_array_equal(ids, [[1, 2]])
        np.testing.assert_allclose(weights, [[2.0, 1.0]], rtol=1e-6)
    # sigmoid(log a) = a / (1 + a); the bias changes the choice and not the weights.
    bias = jnp.array([0.0, 0.0, 0.0, 9.0])
    ids, weights = route(logits, 2, gating="sigmoid", normalize=False, scale=1.0, bias=bias)
    np.testing.assert_array_equal(ids, [[3, 1]])
    np.testing.assert_allclose(weights, [[0.5, 0.8]], rtol=1e-6)


def test_router_takes_the_lowest_of_equal_experts():
    ids, _ = route(jnp.zeros((2, 6)), 3, gating="softmax", normalize=True, scale=1.0)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)


def test_router_divides_by_no_zero():
    logits = jnp.full((1, 4), -200.0)  # a sigmoid of 0
    _, weights = route(logits, 2, gating="sigmoid", normalize=True, scale=1.0)
    np.testing.assert_array_equal(weights, [[0.0, 0.0]])


def test_router_refuses():
    with pytest.raises(ValueError, match=r"gating is 'tanh', expected one of softmax, sigmoid, "):
        route(jnp.zeros((1, 4)), 2, gating="tanh", normalize=False, scale=1.0)
    for used in (0, 5):
        with pytest.raises(ValueError, match=rf"{used} of 4 experts used, expected 1 to 4"):
            route(jnp.zeros((1, 4)), used, gating="softmax", normalize=False, scale=1.0)
