"""DRY: what is repeated, how far back, and what breaks it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.args import packed
from minfer_jax.sampling.dry import breaker_tokens, dry
from tests.helpers import sampler_reference as reference

VOCAB, WINDOW = 40, 48
run = jax.jit(dry)


def penalised(recent: list[int], params: SamplingParams, breakers: set[int]) -> np.ndarray:
    """What is taken from each token's logit, by a window of 48."""
    window = [-1] * (WINDOW - len(recent[-WINDOW:])) + recent[-WINDOW:]
    p = params
    floats = [jnp.asarray([v], jnp.float32) for v in (p.dry_multiplier, p.dry_base)]
    whole = [jnp.asarray([v], jnp.int32) for v in (p.dry_allowed_length, p.dry_penalty_last_n)]
    mask = jnp.asarray(packed(np.isin(np.arange(VOCAB), list(breakers))))
    zeros = jnp.zeros((1, VOCAB), jnp.float32)
    return -np.asarray(run(zeros, jnp.asarray([window], jnp.int32), *floats, *whole, mask))[0]


@settings(max_examples=100, deadline=None)
@given(
    recent=st.lists(st.integers(0, 3) | st.integers(0, VOCAB + 5), max_size=60),
    copied=st.integers(0, 20),
    base=st.sampled_from([0.5, 1.0, 1.75, 1e5]),
    allowed=st.sampled_from([0, 1, 2, 4, 2**31 - 1]),
    last_n=st.sampled_from([-1, 0, 1, 5, 47, 48, 60]),
    breakers=st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_dry_agrees_with_a_search_place_by_place(
    recent: list[int], copied: int, base: float, allowed: int, last_n: int, breakers: set[int]
):
    recent = (recent + recent[:copied])[-WINDOW:]
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    expected = -reference.dry(np.zeros(VOCAB), recent, params, breakers)
    got = penalised(recent, params, breakers)
    huge = expected > 1e38  # llama.cpp and this stop growing before float32 overflows
    np.testing.assert_allclose(got[~huge], expected[~huge], rtol=1e-4)
    assert (got[huge] > 1e29).all()


def test_the_longest_repetition_counts():
    # "a b c" came before c, "b c" before y, "c" before b.
    recent = [1, 2, 3, 3, 2, 3, 4, 1, 2, 3]
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    assert penalised(recent, params, set())[:6].tolist() == [0, 0, 1, 4, 2, 0]
    # A breaker ends what is compared, and is not penalised itself.
    assert penalised(recent, params, {2})[:6].tolist() == [0, 0, 0, 1, 1, 0]


def test_one_token_over_and_over():
    params = SamplingParams(dry_multiplier=1.0, dry_base=1.1)
    assert penalised([7] * 200, params, set())[7] == pytest.approx(1.1 ** (47 - 2), rel=1e-4)


def test_breaker_tokens():
    pieces = [b"", b"\n", b"x", b"a:b", b" *", b"\xe2\x80", *[b"y"] * 30, b'"']
    words = breaker_tokens(pieces)
    assert words.dtype == np.uint32 and words.tolist() == [0b11010, 1 << (36 - 32)]
    assert breaker_tokens(pieces, ["", "y"]).tolist() == [0xFFFFFFC0, 0b1111]
    assert breaker_tokens(pieces, []).tolist() == [0, 0]
    assert breaker_tokens([]).shape == (0,)
