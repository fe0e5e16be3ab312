"""Rows of the KV state: which are held, cut out, and put back, for plain and quantised caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.kv_store import KVStore
from minfer_jax.model import kv_state as kv
from tests.helpers import tiny_models

N_CTX, CHUNK = 40, 8  # and a window of 8: rings of 16


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    data = tiny_models.tiny_model("gemma3", head_dim=32)  # a block of q8_0
    return tiny_models.load(tmp_path_factory.mktemp("m"), data)[0]


@pytest.fixture(params=["float32", "q8_0"])
def make(request, cfg):
    """Makes a store, of caches that are one array or several."""
    chosen = dataclasses.replace(cfg, cache_dtype=request.param)

    def store(n_ctx: int = N_CTX, chunk: int = CHUNK) -> KVStore:
        return KVStore(chosen, n_ctx, chunk)

    return store


def fill(store: KVStore, n: int) -> None:
    """As if positions 0 to n - 1 were run; a row is filled with its position."""
    store.keep(0)
    state = store.state
    assert state is not None

    def filled(kind: int):
        n_slots = state.positions[kind].shape[1]
        held = np.full((1, n_slots), -1, np.int32)
        for p in range(n):
            held[0, p % n_slots] = p
        shaped = np.maximum(held, 0).reshape(1, 1, 1, n_slots, 1)

        def full(a):
            return jnp.asarray(np.broadcast_to(shaped, a.shape).astype(a.dtype))

        return jax.tree.map(full, (state.k[kind], state.v[kind])), jnp.asarray(held)

    ((k0, v0), p0), ((k1, v1), p1) = filled(0), filled(1)
    store.state = kv.KVState(k=(k0, k1), v=(v0, v1), positions=(p0, p1))


def test_what_is_usable(make):
    """A full cache has all; a ring of 16 slots has the latest 16 positions, and 7 are seen."""
    store = make()
    assert store.usable(3) == 0, "nothing is allocated"
    fill(store, 30)
    for n in range(31):
        assert store.usable(n) == (n if n == 0 or n - 7 >= 14 else 0), n
    assert store.usable(31) == 0


def test_keeping_hides_what_follows(make):
    store = make()
    fill(store, 30)
    store.keep(25)
    for kind, first in ((kv.FULL, 0), (kv.SLIDING, 14)):
        held = np.asarray(store.state.positions[kind])
        assert sorted(held[held >= 0].tolist()) == list(range(first, 25))
    assert [store.usable(n) for n in (24, 25, 26)] == [24, 25, 0]
    store.drop()
    assert store.usable(25) == 0


class _Failed:
    """An array of a program that failed after it was sent off."""

    def __array__(self, dtype=None, copy=None):
        raise jax.errors.JaxRuntimeError("device lost")


@pytest.mark.parametrize("again", ["usable", "rows", "keep"])
def test_a_state_of_a_failed_call_is_not_used_again(make, again):
    store = make()
    fill(store, 30)
    store.state = dataclasses.replace(store.state, positions=(_Failed(), _Failed()))
    getattr(store, again)(20)
    assert store.usable(20) == 0
    store.keep(0)
    assert all((np.asarray(p) == -1).all() for p in store.state.positions)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 40), n_ctx=st.integers(40, 60), chunk=st.integers(1, 60))
def test_rows_go_where_their_positions_belong(cfg, n, n_ctx, chunk):
    one, two = KVStore(cfg, N_CTX, CHUNK), KVStore(cfg, n_ctx, chunk)
    fill(one, n)
    rows = one.rows(n)
    assert [(a.shape, a.dtype) for a in rows.arrays] == one.expected(n, rows.first)
    assert one.expected(n, rows.first) == two.expected(n, rows.first)
    two.put(rows)
    assert two.usable(n) == n
    again = two.rows(n)
    assert again.n == n
    for a, first in zip(again.arrays, (0, 0, again.first[1], again.first[1]), strict=True):
        np.testing.assert_array_equal(a[0, 0, 0, :, 0], np.arange(first, n))


def test_arrays_of_all_kinds(make):
    store = make()
    fill(store, 30)
    rows = store.rows(27)
    assert (rows.n, rows.first) == (27, (0, 14))
    n_leaves = len(jax.tree.leaves(store.shape)) - 2
    assert len(rows.arrays) == n_leaves
    assert {a.dtype for a in rows.arrays} == {leaf.dtype for leaf in jax.tree.leaves(store.shape.k)}
    other = make()
    other.put(rows)
    structure = jax.tree.structure(store.shape)
    assert jax.tree.structure(other.state) == structure
    store.keep(27)
    for a, b in zip(store.rows(27).arrays, other.rows(27).arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bytes_by_kind(make, cfg):
    store = make()
    (full, slots, n_full), (sliding, ring, n_sliding) = store.layers(0), store.layers(1)
    assert (full + sliding, slots, ring) == (cfg.n_layer, 40, 16)
    assert n_full + n_sliding + 4 * (slots + ring) == store.nbytes
    assert n_full * sliding * ring == n_sliding * full * slots
