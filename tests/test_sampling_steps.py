"""Each step alone, against probabilities worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.sampling import (
    candidates,
    draw,
    min_p,
    mirostat,
    penalties,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from minfer_jax.sampling.candidates import Candidates, drawable
from minfer_jax.sampling.params import SamplingParams
from minfer_jax.sampling.state import advance, init_state

apply_penalties = jax.jit(penalties.penalties)
keep_top_k = jax.jit(top_k.top_k)
keep_top_p = jax.jit(top_p.top_p)
keep_min_p = jax.jit(min_p.min_p)
scale = jax.jit(temperature.temperature)
scale_by_entropy = jax.jit(temperature.dynamic_temperature)
keep_near = jax.jit(top_n_sigma.top_n_sigma)
keep_typical = jax.jit(typical.typical)
drop_top = jax.jit(xtc.xtc)
keep_unsurprising = jax.jit(mirostat.mirostat)
largest = jax.jit(candidates.largest, static_argnums=1)
everything = jax.jit(candidates.everything)
cut = jax.jit(candidates.cut)
draw_token = jax.jit(draw.draw)
draw_key = jax.jit(draw.draw_key)

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("whole", [False, True], ids=["descending", "by id"])


def row(values: list[float]) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def all_of(logits: jax.Array, whole: bool) -> Candidates:
    return everything(logits) if whole else largest(logits, logits.shape[1])


def kept(left: Candidates, at: int = 0) -> list[int]:
    alive = np.asarray(left.logits)[at] > -np.inf
    return sorted(np.asarray(left.ids)[at][alive].tolist())


# Penalties


def penalised(
    logits: list[float], recent: list[int], repeat: float, frequency: float, presence: float
) -> list[float]:
    window = jnp.asarray([recent], jnp.int32)
    values = [jnp.asarray([v], jnp.float32) for v in (repeat, frequency, presence)]
    return np.asarray(apply_penalties(row(logits), window, *values))[0].tolist()


def test_penalties_by_count_then_presence_then_repeat():
    # Token 0 thrice: 4 - 3 * 0.5 - 0.25 = 2.25, / 2. Token 1 once: 0.5 - 0.75 = -0.25, * 2.
    assert penalised([4.0, 0.5, 3.0], [0, 1, 0, 0], 2.0, 0.5, 0.25) == [1.125, -0.5, 3.0]


def test_penalties_of_a_zero_logit_multiply():
    assert penalised([0.0, 1.0], [0], 2.0, 0.0, 0.0) == [0.0, 1.0]
    assert penalised([-2.0, 1.0], [0], 1.5, 0.0, 0.0) == [-3.0, 1.0]


def test_repeat_below_one_is_ignored():
    assert penalised([4.0, -4.0], [0, 1], 0.5, 0.0, 0.0) == [4.0, -4.0]


def test_penalties_ignore_ids_outside_the_vocabulary():
    assert penalised([4.0, 2.0], [-1, 2, 7, -5, 2**31 - 1], 2.0, 1.0, 1.0) == [4.0, 2.0]


def test_penalties_leave_drawable_logits():
    big = 3e38
    # An overflow upwards ends at the largest float, and never in NaN.
    assert penalised([big, 0.0], [0], 1.0, -big, -big)[0] == np.finfo(np.float32).max
    assert penalised([-INF, 0.0], [0], 1.0, -big, -big)[0] == -INF
    assert penalised([-big, 0.0], [0], 1e38, big, -big)[0] == -INF


@pytest.mark.parametrize("width", [64, 300])
def test_penalties_count_alike_in_windows_of_any_length(width: int):
    window = [3, 0, 3, -1, 9, 3, *[-1] * (width - 6)]
    # Token 0 once: 4 - 0.5, token 3 thrice: 1 - 1.5. There is no token 9.
    assert penalised([4.0, 2.0, 3.0, 1.0], window, 1.0, 0.5, 0.0) == [3.5, 2.0, 3.0, -0.5]


def test_within_keeps_the_newest():
    window = jnp.asarray([[-1, 5, 6, 7]] * 5, jnp.int32)
    got = penalties.within(window, jnp.asarray([0, 1, 3, 99, -1], jnp.int32))
    assert np.asarray(got).tolist() == [
        [-1, -1, -1, -1],
        [-1, -1, -1, 7],
        [-1, 5, 6, 7],
        [-1, 5, 6, 7],
        [-1, 5, 6, 7],
    ]


# Candidates


def test_drawable_takes_padding_out():
    got = drawable(row([1.0, 2.0, INF, 4.0]), jnp.asarray([2], jnp.int32))
    assert np.asarray(got)[0].tolist() == [1.0, 2.0, -INF, -INF]


def test_cut_counts_those_that_are_left_only():
    left = largest(row([5.0, 4.0, 3.0, 2.0, 1.0]), 5).keep(jnp.asarray([[0, 1, 0, 1, 1]], bool))
    yes = jnp.array([True])
    assert float(cut(left, None, jnp.array([0.0]), yes)[0][0, 0]) == 4
    assert float(cut(left, None, jnp.array([1.0]), yes)[0][0, 0]) == 2
    assert float(cut(left, None, jnp.array([3.0]), yes)[0][0, 0]) == -INF


def test_drawable():
    got = np.asarray(drawable(row([NAN, INF, -INF, -0.0, 1.5])))[0]
    assert got.tolist() == [-INF, np.finfo(np.float32).max, -INF, 0.0, 1.5]
    assert not np.signbit(got[3])


@pytest.mark.parametrize(
    ("vocab", "n"), [(1, 1), (5, 3), (300, 128), (2000, 4), (2048, 4), (2049, 4), (40000, 128)]
)
def test_largest_agrees_with_a_stable_sort(vocab: int, n: int):
    logits = np.random.default_rng(vocab).normal(size=(2, vocab)).astype(np.float32)
    got = largest(jnp.asarray(logits), n)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(got.ids, order)
    np.testing.assert_array_equal(got.logits, np.take_along_axis(logits, order, axis=1))
    assert np.asarray(got.complete).tolist() == [n == vocab] * 2


@pytest.mark.parametrize("vocab", [50, 2000])
def test_largest_among_ties_has_the_first_maximum_and_every_larger_logit(vocab: int):
    logits = np.random.default_rng(0).integers(0, 4, size=(8, vocab)).astype(np.float32)
    logits[:, 7:9] = 4.0
    got = largest(jnp.asarray(logits), 4)
    assert np.asarray(got.ids[:, :2]).tolist() == [[7, 8]] * 8
    assert np.asarray(got.logits).tolist() == [[4.0, 4.0, 3.0, 3.0]] * 8
    flat = largest(jnp.ones((1, vocab)), 4)
    assert int(flat.ids[0, 0]) == 0


def test_largest_is_complete_where_nothing_finite_is_left():
    logits = jnp.asarray([[1.0, -INF, 2.0, -INF, -INF], [1.0, 0.0, 2.0, 5.0, 3.0]])
    assert np.asarray(largest(logits, 3).complete).tolist() == [True, False]


@BOTH
def test_cut_finds_the_logit_and_the_id(whole: bool):
    logits = row([1.0, 3.0, -2.0, 1.0, 1.0])
    weights = {1.0: 2.0, 3.0: 5.0, -2.0: 1.0}
    given = all_of(logits, whole)
    each = jnp.asarray([[weights[v] for v in np.asarray(given.logits)[0].tolist()]])
    yes = jnp.array([True])
    # Sums from the largest down: 5 (id 1), 7 (0), 9 (3), 11 (4), 12 (2).
    for target, logit, token in [(0, 3, 1), (4.9, 3, 1), (5, 1, 0), (7, 1, 3), (10.9, 1, 4)]:
        got = cut(given, each, jnp.asarray([target], jnp.float32), yes)
        assert float(got[0][0, 0]) == logit
        below = [i for i in np.flatnonzero(np.asarray(logits)[0] == logit) if i <= got[1][0, 0]]
        assert below[-1] == token
    assert float(cut(given, each, jnp.array([11.0]), yes)[0][0, 0]) == -2
    assert float(cut(given, each, jnp.array([12.0]), yes)[0][0, 0]) == -INF
    assert float(cut(given, None, jnp.array([1.0]), yes)[0][0, 0]) == 1


# Top-k


@BOTH
@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (0, [0, 1, 2, 3, 4]),
        (1, [2]),
        (2, [0, 2, 3]),  # ties of the k-th stay
        (3, [0, 2, 3]),
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4]),
        (2**31 - 1, [0, 1, 2, 3, 4]),
    ],
)
def test_top_k(whole: bool, k: int, expected: list[int]):
    left = keep_top_k(all_of(row([2.0, 1.0, 3.0, 2.0, -9.0]), whole), jnp.array([k], jnp.int32))
    assert kept(left) == expected
    assert bool(left.complete[0]) and bool(left.decided[0])


def test_top_k_on_few_candidates_says_when_it_cannot_tell():
    logits = jnp.asarray([[5.0, 4.0, 4.0, 3.0, 2.0]] * 5)
    k = jnp.array([1, 2, 3, 4, 0], jnp.int32)
    left = keep_top_k(largest(logits, 3), k)
    # The third candidate is a 4: of k = 2 and 3 further ones could be tied with it.
    assert np.asarray(left.complete).tolist() == [True, False, False, False, False]
    assert np.asarray(left.decided).tolist() == [True, False, False, False, True]


# Top-p. Probabilities are 0.5, 0.25, 0.125, 0.125.

HALVES = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)


@BOTH
@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (-1.0, [0, 1, 2, 3]),
        (0.0, [0, 1, 2, 3]),
        (1e-30, [2]),
        (0.49, [2]),
        (0.51, [0, 2]),
        (0.74, [0, 2]),
        (0.76, [0, 1, 2]),  # of two equal ones the lower id
        (0.88, [0, 1, 2, 3]),
        (0.9999999, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
        (7.0, [0, 1, 2, 3]),
    ],
)
def test_top_p(whole: bool, p: float, expected: list[int]):
    logits = jnp.asarray([HALVES[[1, 2, 0, 3]]]) + 20.0
    assert kept(keep_top_p(all_of(logits, whole), jnp.array([p], jnp.float32))) == expected


@BOTH
def test_top_p_exceeds_rather_than_reaches(whole: bool):
    # Two logits of 0 are exactly half each: the first reaches 0.5, only both exceed it.
    assert kept(keep_top_p(all_of(row([0.0, 0.0]), whole), jnp.array([0.5]))) == [0, 1]


@BOTH
def test_top_p_counts_survivors_only(whole: bool):
    left = keep_top_k(all_of(jnp.asarray([HALVES]), whole), jnp.array([2], jnp.int32))
    # Of 0.5 and 0.25 the first now holds two thirds.
    assert kept(keep_top_p(left, jnp.array([0.66]))) == [0]
    assert kept(keep_top_p(left, jnp.array([0.67]))) == [0, 1]


def test_top_p_on_few_candidates_counts_what_lies_beyond():
    logits = jnp.asarray([HALVES] * 3)
    left = keep_top_p(largest(logits, 2), jnp.array([0.49, 0.74, 0.76]))
    # At 0.74 the cut falls on the last candidate, which others might be tied with.
    assert np.asarray(left.complete).tolist() == [True, False, False]
    assert [kept(left, i) for i in range(3)] == [[0], [0, 1], [0, 1]]


# Min-p


@BOTH
@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (-1.0, [0, 1, 2, 3]),
        (0.0, [0, 1, 2, 3]),
        (0.24, [0, 1, 2, 3]),
        (0.26, [0, 1]),
        (0.49, [0, 1]),
        (0.51, [0]),
        (1.0, [0]),
        (3.0, [0]),
    ],
)
def test_min_p(whole: bool, p: float, expected: list[int]):
    assert kept(keep_min_p(all_of(jnp.asarray([HALVES]), whole), jnp.array([p]))) == expected


def test_min_p_on_few_candidates_closes_below_its_bound():
    left = keep_min_p(largest(jnp.asarray([HALVES] * 3), 2), jnp.array([0.0, 0.4, 0.6]))
    assert np.asarray(left.complete).tolist() == [False, False, True]


def test_min_p_says_that_what_it_leaves_beyond_is_unknown():
    left = keep_min_p(largest(jnp.asarray([HALVES] * 3), 2), jnp.array([0.0, 0.4, 0.6]))
    assert np.asarray(left.decided).tolist() == [True, False, True]


# Top-n-sigma. The standard deviation of 1, 3, 3, 5 and 9 is 2.713.


@BOTH
@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (-1.0, [0, 1, 2, 4, 5]),
        (0.0, [0, 1, 2, 4, 5]),
        (1.4, [5]),
        (1.5, [4, 5]),
        (1e30, [0, 1, 2, 4, 5]),
    ],
)
def test_top_n_sigma(whole: bool, n: float, expected: list[int]):
    logits = row([1.0, 3.0, 3.0, -INF, 5.0, 9.0])
    assert kept(keep_near(all_of(logits + 100.0, whole), jnp.array([n]))) == expected


# Typical-p. The entropy of HALVES is 1.75 bits, the surprises are 1, 2, 3 and 3.


@BOTH
@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (-1.0, [0, 1, 2, 3]),
        (1e-30, [1]),
        (0.24, [1]),
        (0.26, [0, 1]),
        (0.74, [0, 1]),
        (0.76, [0, 1, 2]),  # of two equal ones the lower id
        (0.99, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_typical(whole: bool, p: float, expected: list[int]):
    assert (
        kept(keep_typical(all_of(jnp.asarray([HALVES]) - 7.0, whole), jnp.array([p]))) == expected
    )


def test_typical_on_few_candidates_of_high_ids():
    logits = jnp.full((1, 300), -INF).at[0, jnp.asarray([290, 299])].set(jnp.asarray([1.0, 0.9]))
    assert kept(keep_typical(largest(logits, 4), jnp.array([0.3]))) == [290]


# XTC


def excluded(whole: bool, probability: float, threshold: float) -> list[int]:
    key = draw_key(init_state(SamplingParams(), []))
    given = all_of(jnp.asarray([[*HALVES, -INF]]) + 3.0, whole)
    return kept(drop_top(given, jnp.array([probability]), jnp.array([threshold]), key))


@BOTH
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.0, [2, 3]),  # equal ones stay together
        (0.12, [2, 3]),
        (0.13, [1, 2, 3]),
        (0.24, [1, 2, 3]),
        (0.26, [0, 1, 2, 3]),  # the only one that reaches it stays
        (0.5, [0, 1, 2, 3]),
        (0.51, [0, 1, 2, 3]),
    ],
)
def test_xtc_leaves_the_least_likely_of_the_likely(
    whole: bool, threshold: float, expected: list[int]
):
    assert excluded(whole, 1.0, threshold) == expected
    assert excluded(whole, 0.0, threshold) == [0, 1, 2, 3]


def test_xtc_happens_as_often_as_it_should():
    state = init_state(SamplingParams(), [])
    rows, happened = 4000, {}
    keys = draw.fold_in((state.key[:, :1], state.key[:, 1:]), jnp.arange(rows)[:, None])
    given = everything(jnp.tile(jnp.asarray(HALVES), (rows, 1)))
    for probability in (0.25, 0.75):
        left = drop_top(given, jnp.full((rows,), probability), jnp.full((rows,), 0.2), keys)
        happened[probability] = int(jnp.sum(left.logits[:, 0] == -INF))
    # Within four standard deviations of a binomial.
    assert abs(happened[0.25] - 1000) < 110 and abs(happened[0.75] - 3000) < 110


# Mirostat. Surprises are 1, 2, 3 and 3 bits.


@BOTH
@pytest.mark.parametrize(
    ("mu", "expected"),
    [(-1.0, [0]), (0.5, [0]), (1.9, [0]), (2.1, [0, 1]), (2.9, [0, 1]), (3.1, [0, 1, 2, 3])],
)
def test_mirostat(whole: bool, mu: float, expected: list[int]):
    given = all_of(jnp.asarray([HALVES]) + 5.0, whole)
    left = keep_unsurprising(given, jnp.array([mu]))
    assert kept(left) == expected
    # The surprise of what is drawn is that among what is left.
    total = np.exp(HALVES[expected]).sum()
    got = mirostat.surprise(left, jnp.array([expected[-1]]))
    np.testing.assert_allclose(got, np.log2(total / np.exp(HALVES[expected[-1]])), atol=1e-6)


def test_mirostats_bound_follows_the_error():
    tau, eta = jnp.full((3,), 3.0), jnp.full((3,), 0.5)
    observed = jnp.array([4.0, 1.0, INF])
    got = mirostat.follow(jnp.full((3,), 6.0), observed, tau, eta)
    assert np.asarray(got).tolist() == [5.5, 7.0, 6.0]


# Temperature


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynamic_temperature_follows_the_entropy(exponent: float):
    logits = jnp.asarray([[0.0] * 4, HALVES, [50.0, 0.0, 0.0, 0.0], [3.0, -INF, -INF, -INF]])
    values = [jnp.full((4,), v) for v in (1.0, 0.5, exponent)]
    got = np.asarray(scale_by_entropy(everything(logits), *values, jnp.array(False)).logits)
    np.testing.assert_allclose(got[0], 0.0)
    # HALVES have 1.75 of 2 bits.
    expected = (HALVES - HALVES[0]) / (0.5 + 0.875**exponent)
    np.testing.assert_allclose(got[1], expected, rtol=1e-5)
    np.testing.assert_allclose(got[2, 1:], -50.0 / 0.5, rtol=1e-4)
    assert got[3].tolist() == [0.0, -INF, -INF, -INF]


def test_dynamic_temperature_may_leave_zero_where_it_is():
    given = everything(row([4.0, 0.0, -2.0, -INF]))
    values = [jnp.array([v]) for v in (2.0, 0.0, 1.0)]
    assert scale_by_entropy(given, *values, jnp.array(True)).logits.tolist()[0] == [2, 0, -1, -INF]
    assert scale_by_entropy(given, *values, jnp.array(False)).logits.tolist()[0] == [
        0,
        -2,
        -3,
        -INF,
    ]


def test_a_dynamic_temperature_of_zero_makes_no_nan():
    values = [jnp.array([v]) for v in (0.5, 3.0, 1.0)]
    given = everything(row([3e38, -3e38, 0.0, -INF]))
    for flag in (False, True):
        got = np.asarray(scale_by_entropy(given, *values, jnp.array(flag)).logits)[0]
        assert not np.isnan(got).any() and got.argmax() == 0


def test_temperature_divides():
    got = scale(everything(jnp.asarray([HALVES] * 3)), jnp.array([1.0, 2.0, 0.5]))
    weights = np.exp(np.asarray(got.logits))
    np.testing.assert_allclose(weights[0], [1, 0.5, 0.25, 0.25], rtol=1e-6)
    np.testing.assert_allclose(weights[1], np.sqrt([1, 0.5, 0.25, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(weights[2], np.square([1, 0.5, 0.25, 0.25]), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-5, 1e38])
def test_extreme_temperatures_make_no_nan(value: float):
    logits = jnp.asarray([[3e38, -3e38, 0.0, -INF], [-INF] * 4])
    got = np.asarray(scale(everything(logits), jnp.full((2,), value)).logits)
    assert got[0, 0] == 0.0 and not np.isnan(got).any() and (got[1] == -np.inf).all()


# The draw


def test_fold_in_is_jaxs_own():
    key = jax.random.key(123456789012345 % 2**32, impl="threefry2x32")
    words = jax.random.key_data(key)
    ids = jnp.asarray([0, 1, 77, 262143, 2**31 - 1], jnp.int32)
    expected = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, ids))
    x, y = draw.fold_in((words[None, :1], words[None, 1:]), ids[None])
    np.testing.assert_array_equal(jnp.stack([x[0], y[0]], axis=1), expected)


def test_gumbel_is_finite_and_has_the_quantiles_of_its_distribution():
    bits = np.array([0, 2**22, 2**30, 2**31, 3 * 2**30, 2**32 - 1], np.uint32)
    got = np.asarray(draw.gumbel(jnp.asarray(bits)))
    assert np.isfinite(got).all() and (np.diff(got) < 0).all()
    # The chance of a larger value is bits / 2**32: -log(-log(1 - u)).
    expected = -np.log(-np.log1p(-bits[1:-1].astype(np.float64) / 2**32))
    np.testing.assert_allclose(got[1:-1], expected, rtol=2e-6, atol=1e-6)


def test_draw_is_by_token_not_by_place():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 50)).astype(np.float32))
    state = init_state(SamplingParams(), [])
    tokens = set()
    for _ in range(20):
        key = draw_key(state)
        token = draw_token(everything(logits), key)
        assert int(draw_token(largest(logits, 50), key)[0]) == int(token[0])
        tokens.add(int(token[0]))
        state = advance(state, token)
    assert len(tokens) > 5
    assert int(draw_token(everything(jnp.full((1, 3), -INF)), draw_key(state))[0]) == -1


def test_advance_moves_the_window_and_the_step():
    state = advance(init_state(SamplingParams(), [1, 2]), jnp.array([9], jnp.int32))
    assert np.asarray(state.recent)[0, -4:].tolist() == [-1, 1, 2, 9]
    assert np.asarray(state.step).tolist() == [1]
