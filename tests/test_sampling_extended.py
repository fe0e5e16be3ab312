"""The chain of all steps, against a numpy one and against `sample`; draws, compiles, edges."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minfer_jax.sampling import (
    SAMPLERS,
    WINDOW_EXTENDED,
    SamplingParams,
    init_state,
    sample,
    sample_extended,
    samplers_from,
)
from minfer_jax.sampling.args import packed
from minfer_jax.sampling.chain import FEW
from minfer_jax.sampling.extended import allowed
from tests.helpers import sampler_reference as reference
from tests.helpers.many_draws import N_DRAWS, check_draws, many_steps
from tests.helpers.sampler_runs import TRACED, draw_extended, left_by_extended
from tests.helpers.sampler_runs import given as given_args

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
VOCAB = 128  # as in test_sampling_golden, so that what is compiled serves both
INF, NAN = float("inf"), float("nan")

usual = jax.jit(sample)

VALUES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.8, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 3, 20, 39, 40, 127, 10**9]),
        "top_p": st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        "min_p": st.sampled_from([0.0, 0.05, 2.0]) | st.floats(0, 1),
        "typical_p": st.sampled_from([1.0, 1.0]) | st.floats(0, 1),
        "top_n_sigma": st.sampled_from([-1.0, 0.5, 1.5, 3.0]),
        "xtc_probability": st.sampled_from([0.0, 1.0]),
        "xtc_threshold": st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.6]),
        "dynatemp_range": st.sampled_from([0.0, 0.0, 0.2, 5.0]),
        "dynatemp_exponent": st.sampled_from([1.0, 0.5, 3.0]),
        "repeat_penalty": st.sampled_from([0.5, 1.0, 1.1, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -0.25]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "penalty_last_n": st.sampled_from([-1, 0, 1, 64, 500]),
        "dry_multiplier": st.sampled_from([0.0, 0.8, 2.0]),
        "dry_base": st.sampled_from([0.5, 1.0, 1.75]),
        "dry_allowed_length": st.sampled_from([0, 1, 2, 5]),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 3, 64]),
        "mirostat": st.sampled_from([0, 0, 0, 2]),
        "samplers": st.permutations(SAMPLERS).flatmap(
            lambda order: st.integers(0, len(order)).map(lambda n: tuple(order[:n]))
        )
        | st.just(SAMPLERS),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    values=VALUES,
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    coarse=st.booleans(),
    dead=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_any_order_agrees_with_numpy(
    values: dict, seed: int, spread: float, coarse: bool, dead: float
):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=VOCAB) * spread).astype(np.float32)
    if coarse:  # many ties
        logits = np.round(logits * 2) / 2
    logits[rng.random(VOCAB) < dead] = rng.choice([-INF, NAN])
    assume(np.isfinite(logits).any())
    recent = rng.integers(0, rng.choice([3, 20, VOCAB + 3]), size=int(rng.integers(0, 200)))
    breakers = set(rng.integers(0, VOCAB, size=2).tolist())
    params, mu = SamplingParams(**values), float(rng.uniform(0.5, 8))
    try:
        left = reference.by_order(
            logits, recent.tolist(), params, breakers, xtc_happens=True, mu=mu
        )
    except reference.Doubt:
        assume(False)
        return
    expected = reference.softmax(left)
    if "temperature" not in params.samplers and not params.mirostat:
        assert params.arrays().temperature == 1.0

    state, args = given_args(params, VOCAB, recent.tolist(), breakers, mu=mu)
    row = jnp.asarray(logits)[None]
    whole, trusted = left_by_extended(row, state, args)
    assert bool(trusted[0])
    np.testing.assert_array_equal(np.asarray(whole)[0] > 1e-30, expected > 1e-30)
    np.testing.assert_allclose(np.asarray(whole)[0], expected, rtol=2e-3, atol=1e-30)
    part, trusted = left_by_extended(row, state, args, 40)
    if bool(trusted[0]):
        np.testing.assert_array_equal(np.asarray(part) > 1e-30, np.asarray(whole) > 1e-30)
        np.testing.assert_allclose(part, whole, rtol=2e-3, atol=1e-30)

    token, _ = draw_extended(row, state, args)
    assert expected[int(token[0])] > 0
    if not params.extended:  # then the usual chain draws the same
        state = init_state(params, recent.tolist())
        assert int(usual(row, state, params.arrays())[0][0]) == int(token[0])


def draws(params: SamplingParams, n: int, *, few: int = FEW) -> list[int]:
    """The first tokens on logits that change with each."""
    state, args = given_args(params, VOCAB, [1, 2, 3, 1, 2])
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
    tokens = [5]
    for _ in range(n):
        token, state = draw_extended(jnp.asarray(table[tokens[-1]])[None], state, args, few=few)
        tokens.append(int(token[0]))
    return tokens[1:]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 0, "min_p": 0.0},
        {"typical_p": 0.7, "top_k": 0},
        {"samplers": samplers_from("tmxpke"), "xtc_probability": 0.5},
        {"dry_multiplier": 1.0, "dynatemp_range": 0.5},
        {"mirostat": 2, "mirostat_tau": 3.0},
    ],
)
def test_the_number_of_candidates_does_not_change_the_text(changes: dict):
    params = SamplingParams(temperature=1.3, **changes)
    assert draws(params, 25, few=8) == draws(params, 25)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"samplers": samplers_from("kt")}])
def test_the_usual_steps_choose_as_in_sample(changes: dict):
    params = SamplingParams(**changes)
    assert not params.extended
    state, args = given_args(params, VOCAB, range(9))
    other = init_state(params, range(9))
    for i in range(40):
        logits = np.random.default_rng(i).normal(size=(1, VOCAB)).astype(np.float32) * 3
        token, state = draw_extended(jnp.asarray(logits), state, args)
        expected, other = usual(jnp.asarray(logits), other, params.arrays())
        assert int(token[0]) == int(expected[0])


def test_no_value_order_bias_or_mask_compiles_anything():
    before: list[int] = []
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, VOCAB)).astype(np.float32))
    for changes in [
        {},
        {"temperature": 0.0},
        {"mirostat": 2},
        {"dry_multiplier": 0.8, "penalty_last_n": -1},
        {"samplers": ()},
        {"samplers": samplers_from("xkte"), "xtc_probability": 0.5, "typical_p": 0.5},
        {"dynatemp_range": 0.5, "top_n_sigma": 1.0, "seed": 2**63},
    ]:
        params = SamplingParams(**changes)
        state = init_state(params, range(9), window=WINDOW_EXTENDED)
        bias = rng.normal(size=VOCAB).astype(np.float32)
        flags = rng.random(VOCAB) < 0.5
        args = params.extended_arrays(bias=bias, breakers=packed(~flags), n_vocab=100)
        for _ in range(3):
            token, state = draw_extended(logits, state, args, jnp.asarray(packed(flags))[None])
            assert flags[int(token[0])] and int(token[0]) < 100
            before.append(len(TRACED))
    assert before[0] == before[-1] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_mask_and_padding_forbid(temperature: float):
    params = dataclasses.replace(OFF, temperature=temperature)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :6] = [9, 8, 7, 6, 5, 4]
    bias, flags = np.zeros(VOCAB, np.float32), np.zeros(VOCAB, bool)
    flags[[1, 2, 3, 33, 127]] = True
    words = packed(flags)[None]
    bias[1], bias[127] = -np.inf, 50.0
    state = init_state(params, [], window=WINDOW_EXTENDED)
    args = params.extended_arrays(bias=bias, n_vocab=127)
    mask, now, seen = jnp.asarray(words), state, set()
    for _ in range(30):
        token, now = draw_extended(jnp.asarray(logits), now, args, mask)
        seen.add(int(token[0]))
    assert seen == {2} if temperature == 0 else {2, 3} <= seen <= {2, 3, 33}
    signed = jnp.asarray(words.view(np.int32))
    as_before = allowed(jnp.asarray(logits), args, mask)
    np.testing.assert_array_equal(allowed(jnp.asarray(logits), args, signed), as_before)
    args = params.extended_arrays(bias=bias)
    assert int(draw_extended(jnp.asarray(logits), state, args, mask)[0][0]) == 127
    nothing = jnp.zeros_like(mask)
    assert int(draw_extended(jnp.asarray(logits), state, args, nothing)[0][0]) == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"xtc_probability": 0.3, "xtc_threshold": 0.1},
        {"typical_p": 0.8, "temperature": 0.7},
        {"dynatemp_range": 0.9, "samplers": samplers_from("tp"), "top_p": 0.9},
        {"mirostat": 2, "mirostat_tau": 1.2},
    ],
)
def test_draws_follow_the_probabilities(changes: dict):
    params = dataclasses.replace(OFF, **changes)
    logits = np.random.default_rng(8).normal(size=8).astype(np.float32)
    state = many_steps(params)
    args = params.extended_arrays(N_DRAWS, bias=np.zeros(8, np.float32))
    tokens, after = draw_extended(jnp.tile(logits, (N_DRAWS, 1)), state, args)
    mu = 2 * params.mirostat_tau
    kinds = [
        reference.softmax(reference.by_order(logits, [], params, xtc_happens=happens, mu=mu))
        for happens in (True, False)
    ]
    often = params.xtc_probability
    check_draws(tokens, often * kinds[0] + (1 - often) * kinds[1])
    assert bool(jnp.any(after.mu != state.mu)) == bool(params.mirostat)


def test_mirostat_holds_the_surprise():
    params = SamplingParams(mirostat=2, mirostat_tau=2.5, temperature=1.0, repeat_penalty=1.0)
    state, args = given_args(params, VOCAB)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, VOCAB)) * 2, jnp.float32)
    bounds = [float(state.mu[0])]
    assert bounds == [5.0]
    for _ in range(400):
        _, state = draw_extended(logits, state, args)
        bounds.append(float(state.mu[0]))
    # Each bound differs from the last by eta times the error, so these sum up to the mean error.
    errors = -np.diff(bounds) / params.mirostat_eta
    assert abs(errors[100:].mean()) < 0.1


@pytest.mark.parametrize("changes", [{"mirostat": 2}, {"dry_multiplier": 1.0, "top_k": 0}])
def test_a_state_goes_on_where_it_was(changes: dict):
    params = SamplingParams(**changes)
    texts = []
    for stop in (10, 20):
        state, args = given_args(params, VOCAB, [1, 2, 3])
        tokens, rng = [1, 2, 3], np.random.default_rng(4)
        for i in range(20):
            if (
                i == stop
            ):  # what a session keeps: parameters, tokens, how many were drawn, the bound
                state, _ = given_args(params, VOCAB, tokens, n_drawn=i, mu=float(state.mu[0]))
            logits = jnp.asarray(rng.normal(size=(1, VOCAB)) * 2, jnp.float32)
            token, state = draw_extended(logits, state, args)
            tokens.append(int(token[0]))
        texts.append(tokens)
    assert texts[0] == texts[1]
    without, _ = given_args(params, VOCAB, tokens, n_drawn=20)
    assert bool(without.mu[0] == state.mu[0]) == (not params.mirostat)


def test_rows_of_a_batch_are_drawn_as_if_alone():
    params = SamplingParams(dry_multiplier=1.0, typical_p=0.9, xtc_probability=0.5)
    values = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32) * 3
    values[2] = NAN
    recents: list[Sequence[int]] = [[], [4, 5, 4, 5, 4], [1], range(100)]
    states = [
        init_state(dataclasses.replace(params, seed=i), recents[i], window=WINDOW_EXTENDED)
        for i in range(4)
    ]
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)
    bias = np.zeros(VOCAB, np.float32)
    tokens, after = draw_extended(
        jnp.asarray(values), together, params.extended_arrays(4, bias=bias)
    )
    for i in range(4):
        args = params.extended_arrays(bias=bias)
        token, state = draw_extended(jnp.asarray(values[i : i + 1]), states[i], args)
        assert int(token[0]) == int(tokens[i])
        np.testing.assert_array_equal(state.recent[0], after.recent[i])
    assert int(tokens[2]) == -1


def test_arrays_of_another_vocabulary_are_refused():
    params = SamplingParams()
    state, args = given_args(params, VOCAB)
    row = jnp.zeros((1, VOCAB))
    with pytest.raises(ValueError, match="bias has 128 entries; logits of 4 tokens want 4"):
        sample_extended(row[:, :4], state, args)
    with pytest.raises(ValueError, match="mask has 5 entries; logits of 128 tokens want 4"):
        sample_extended(row, state, args, jnp.zeros((1, 5), jnp.uint32))
    _, short = given_args(params, 96)
    wrong = dataclasses.replace(args, breakers=short.breakers)
    with pytest.raises(ValueError, match="breakers has 3 entries; logits of 128 tokens want 4"):
        sample_extended(row, state, wrong)
