"""How a text is fitted into a context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.context import EngineError, buckets, common_prefix, shifted


@pytest.mark.parametrize(
    ("n_ctx", "chunk", "expected"),
    [
        (4096, 512, (32, 128, 512)),
        (512, 512, (32, 128, 512)),
        (300, 512, (32, 128, 300)),
        (32, 512, (32,)),
        (7, 512, (7,)),
        (4096, 64, (32, 64)),
        (4096, 32, (32,)),
        (4096, 1, (1,)),
        (4096, 1000, (32, 128, 512, 1000)),
        (600, 10**9, (32, 128, 512, 600)),
    ],
)
def test_buckets(n_ctx, chunk, expected):
    assert buckets(n_ctx, chunk) == expected


def test_no_chunk():
    with pytest.raises(EngineError, match="prefill_chunk is 0, expected at least 1"):
        buckets(10, 0)


@pytest.mark.parametrize(
    ("n_ctx", "n_keep", "expected"),
    [
        (8, 0, [4, 5, 6, 7, 8]),
        (8, 2, [0, 1, 5, 6, 7, 8]),
        (8, 3, [0, 1, 2, 5, 6, 7, 8]),
        (8, 100, [0, 1, 2, 3, 6, 7, 8]),
        (3, 2, [1, 2, 3]),
        (1, 0, [1]),
    ],
)
def test_what_a_shift_leaves(n_ctx, n_keep, expected):
    """As llama.cpp's server does: n_discard = (n_ctx - n_keep) / 2, n_keep at most n_ctx - 4."""
    assert shifted(list(range(n_ctx + 1)), n_ctx, n_keep) == expected


@given(n_ctx=st.integers(1, 200), n_keep=st.integers(0, 300))
def test_a_shift_makes_room_and_loses_only_the_middle(n_ctx, n_keep):
    tokens = list(range(n_ctx + 1))
    left = shifted(tokens, n_ctx, n_keep)
    assert 1 <= len(left) <= n_ctx
    n = common_prefix(left, tokens)
    assert n >= min(n_keep, n_ctx - 4)
    assert left[n:] == tokens[len(tokens) - len(left) + n :]


@given(a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)))
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
