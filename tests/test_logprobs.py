"""Log-probabilities of the drawn token and of the likeliest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.sampling.logprobs import logprobs

run = jax.jit(logprobs, static_argnums=2)
INF = float("inf")


@pytest.mark.parametrize(("vocab", "k"), [(300, 20), (300, 0), (40_000, 5), (6, 6)])
def test_logprobs_are_a_log_softmax(vocab: int, k: int):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(3, vocab)) * 5 + 1000).astype(np.float32)
    tokens = np.array([0, vocab - 1, -1], np.int32)
    wide = logits.astype(np.float64) - logits.max(1, keepdims=True)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    got, ids, tops = run(jnp.asarray(logits), jnp.asarray(tokens), k)
    np.testing.assert_allclose(got[:2], expected[[0, 1], tokens[:2]], rtol=1e-5, atol=1e-5)
    assert float(got[2]) == 0.0
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(tops, np.take_along_axis(expected, order, 1), rtol=1e-5, atol=1e-5)


def test_logits_that_are_not_finite():
    logits = jnp.asarray([[np.nan, -INF, 2.0, 2.0], [np.nan] * 4, [INF, 0.0, 0.0, 0.0]])
    got, ids, tops = run(logits, jnp.asarray([3, -1, 0], jnp.int32), 2)
    np.testing.assert_allclose(got, [-np.log(2), 0.0, 0.0], rtol=1e-6)
    assert np.asarray(ids)[0].tolist() == [2, 3]
    np.testing.assert_allclose(tops[0], [-np.log(2)] * 2, rtol=1e-6)
    assert np.asarray(tops)[1].tolist() == [-INF, -INF]
