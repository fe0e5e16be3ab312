"""What is said of two models' rows of logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minfer_jax import divergence
from minfer_jax.context import EngineError
from minfer_jax.divergence import said

ROWS = arrays(np.float32, (5, 7), elements=st.floats(-30, 30, width=32))


def test_by_hand():
    probs = np.array([[[0.5, 0.5, 1e-30]], [[0.25, 0.75, 1e-30]]], np.float32)
    a, b = np.log(probs)
    found = said([a, b + 3], np.array([1]))  # what is added to a row is nothing
    assert len(found) == 1
    np.testing.assert_allclose(found.nll, -np.log([[0.5], [0.75]]), rtol=1e-6)
    np.testing.assert_array_equal(found.top, [[0], [1]])  # of equals the first
    np.testing.assert_allclose(found.top_prob, [[0.5], [0.75]], rtol=1e-6)
    a_b = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    b_a = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    np.testing.assert_allclose(found.kl, [[a_b], [b_a]], rtol=1e-6)


def test_one_model_has_no_divergence():
    found = said([np.zeros((3, 4), np.float32)], np.array([0, 1, 2]))
    assert (found.nll.shape, found.kl.shape) == ((1, 3), (0, 3))
    np.testing.assert_allclose(found.nll, np.log(4))


@given(ROWS, ROWS)
def test_it_is_never_below_0_and_that_way_round(a, b):
    found, turned = (said(rows, np.arange(5)) for rows in ([a, b], [b, a]))
    assert (found.kl >= 0).all()
    np.testing.assert_array_equal(found.kl, turned.kl[::-1])
    np.testing.assert_array_equal(found.nll, turned.nll[::-1])
    assert (said([a, a], np.arange(5)).kl == 0).all()


def test_differences_near_the_rounding_of_float32_are_told():
    """Of small ones, d of log p, it is half the variance of d."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 3000)).astype(np.float32)
    b = a + np.float32(1e-5) * rng.standard_normal(a.shape).astype(np.float32)
    d, p = (b.astype(np.float64) - a), np.exp(a.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    half = ((p * d**2).sum(-1) - (p * d).sum(-1) ** 2) / 2
    np.testing.assert_allclose(said([a, b], np.zeros(4, np.int32)).kl[0], half, rtol=1e-4)
    assert half.max() < 1e-10


def test_rows_go_through_in_blocks(monkeypatch):
    rng = np.random.default_rng(1)
    rows = list(rng.standard_normal((2, 9, 11)).astype(np.float32))
    whole = said(rows, np.arange(9))
    monkeypatch.setattr(divergence, "_BLOCK", 25)
    parts = said(rows, np.arange(9))
    for name in ("nll", "top", "top_prob", "kl"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(value):
    good = np.zeros((2, 3), np.float32)
    bad = good.copy()
    bad[1, 2] = value
    with pytest.raises(EngineError, match="model B gives logits that are not finite"):
        said([good, bad], np.array([0, 0]))
