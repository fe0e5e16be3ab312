"""The whole chain, against a plain numpy one; draws, compiles, edges."""

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minfer_jax.sampling import SamplerArgs, SamplerState, SamplingParams, init_state, sample
from minfer_jax.sampling.candidates import everything, largest
from minfer_jax.sampling.chain import adjust, survivors
from tests.helpers.many_draws import N_DRAWS, check_draws, many_steps

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
NAN, INF = float("nan"), float("inf")

run = jax.jit(sample, static_argnames="few")


def reference(logits: np.ndarray, recent: Sequence[int], params: SamplingParams) -> np.ndarray:
    """Probabilities of one row by the textbook, in float64; NaN where rounding would decide.

    Steps as in the documentation of each, on the whole vocabulary, with a sort.
    """
    p = params
    x = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    for token in {t for t in recent[-64:] if 0 <= t < x.size}:
        x[token] -= list(recent[-64:]).count(token) * p.frequency_penalty
        x[token] -= p.presence_penalty
        if p.repeat_penalty > 1:
            x[token] = x[token] * p.repeat_penalty if x[token] <= 0 else x[token] / p.repeat_penalty
    order = np.argsort(-x, kind="stable")
    if p.temperature < 1e-6:
        return np.eye(x.size)[order[0]]
    doubt = False
    alive = x > -np.inf
    if 0 < p.top_k < x.size:
        alive &= x >= x[order[p.top_k - 1]]
    if 0 < p.top_p < 1:
        weights = np.where(alive, np.exp(x - x.max()), 0)[order]
        sums = np.cumsum(weights) / weights.sum()
        doubt |= bool(np.any(np.abs(sums - p.top_p) < 1e-5))
        count = int(np.argmax(sums > p.top_p)) + 1 if sums[-1] > p.top_p else x.size
        alive[order[count:]] = False
    if p.min_p > 0:
        relative = x - x.max() - np.log(min(p.min_p, 1))
        doubt |= bool(np.any((np.abs(relative) < 1e-5) & (relative != 0)))
        alive &= relative >= 0
    weights = np.where(alive, np.exp((x - x.max()) / p.temperature), 0)
    return np.full(x.size, np.nan) if doubt else weights / weights.sum()


@functools.partial(jax.jit, static_argnames="n")
def distribution(
    logits: jax.Array, state: SamplerState, args: SamplerArgs, n: int
) -> tuple[jax.Array, jax.Array]:
    """Probabilities ``[B, V]`` by the project's steps on n candidates, and which rows to trust."""
    logits = adjust(logits, state, args)
    left = survivors(largest(logits, n) if n else everything(logits), args)
    rows = jnp.arange(logits.shape[0])[:, None]
    probabilities = jnp.zeros_like(logits).at[rows, left.ids].set(jax.nn.softmax(left.logits))
    return probabilities, left.complete & left.decided


VALUES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.8, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 3, 5, 20, 40, 127, 128, 129, 400, 10**9]),
        "top_p": st.sampled_from([-1.0, 0.0, 1e-6, 0.3, 0.95, 0.999, 1.0]) | st.floats(0, 1),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0, 2.0]) | st.floats(0, 1),
        "repeat_penalty": st.sampled_from([0.5, 1.0, 1.1, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -0.25]),
        "presence_penalty": st.sampled_from([0.0, 1.0, -0.5]),
    }
)


@pytest.mark.parametrize(("vocab", "few"), [(5, 128), (300, 128), (1500, 4)])
@settings(max_examples=50, deadline=None)
@given(
    values=VALUES,
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    coarse=st.booleans(),
    dead=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_chain_agrees_with_numpy(
    vocab: int, few: int, values: dict, seed: int, spread: float, coarse: bool, dead: float
):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=vocab) * spread).astype(np.float32)
    if coarse:  # many ties
        logits = np.round(logits * 2) / 2
    logits[rng.random(vocab) < dead] = rng.choice([-INF, NAN])
    assume(np.isfinite(logits).any())
    recent = rng.integers(-1, vocab + 3, size=int(rng.integers(0, 90))).tolist()
    params = SamplingParams(**values)
    expected = reference(logits, recent, params)
    assume(not np.isnan(expected[0]))

    state, args = init_state(params, recent), params.arrays()
    whole, trusted = distribution(jnp.asarray(logits)[None], state, args, 0)
    assert bool(trusted[0])
    np.testing.assert_array_equal(np.asarray(whole)[0] > 1e-30, expected > 1e-30)
    np.testing.assert_allclose(np.asarray(whole)[0], expected, rtol=1e-4, atol=1e-30)
    part, trusted = distribution(jnp.asarray(logits)[None], state, args, min(few, vocab))
    if bool(trusted[0]):
        np.testing.assert_array_equal(np.asarray(part) > 1e-30, np.asarray(whole) > 1e-30)
        np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-30)

    token, _ = run(jnp.asarray(logits)[None], state, args, few=few)
    assert expected[int(token[0])] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 0},
        {"top_k": 0, "min_p": 0.0, "top_p": 0.5},
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 127},
        {"temperature": 5.0},
    ],
)
def test_usual_parameters_are_decided_on_few_candidates(changes: dict):
    # Logits that fall like those of a language model: rank to the power of -1.5.
    logits = jnp.asarray(-1.5 * np.log(np.arange(1, 1501))[None], jnp.float32)
    params = SamplingParams(**changes)
    _, trusted = distribution(logits, init_state(params, []), params.arrays(), 128)
    assert bool(trusted[0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 0}, {"top_k": 0, "min_p": 0.0}, {"top_k": 9, "top_p": 0.6}, {"top_k": 300}],
)
def test_the_number_of_candidates_does_not_change_the_text(changes: dict):
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=1.3, **changes)
    states = {few: init_state(params, [1, 2, 3]) for few in (4, 1500)}
    for _ in range(25):
        logits = jnp.asarray(rng.normal(size=(1, 1500)).astype(np.float32) * 2)
        tokens = set()
        for few, state in states.items():
            token, states[few] = run(logits, state, params.arrays(), few=few)
            tokens.add(int(token[0]))
        assert len(tokens) == 1


def generate(params: SamplingParams, steps: int = 40, vocab: int = 300) -> list[int]:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(vocab, vocab)).astype(np.float32))
    state, token, tokens = init_state(params, [7]), jnp.array([7]), []
    for _ in range(steps):
        token, state = run(table[token], state, params.arrays())
        tokens.append(int(token[0]))
    return tokens


def test_one_seed_gives_one_text():
    assert generate(SamplingParams()) == generate(SamplingParams())
    assert generate(SamplingParams()) != generate(SamplingParams(seed=43))
    assert generate(SamplingParams(seed=5)) != generate(SamplingParams(seed=5 + 2**32))
    greedy = SamplingParams(temperature=0)
    assert generate(greedy) == generate(dataclasses.replace(greedy, seed=1))


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-7},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 128},
    {"top_k": 200},
    {"top_k": 10**12},
    {"top_p": 0.0},
    {"top_p": 1.0},
    {"top_p": 0.5, "top_k": 0},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"min_p": 0.0, "top_k": 0, "top_p": 1.0},
    {"repeat_penalty": 1.0},
    {"repeat_penalty": 0.0},
    {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0, "seed": 2**63},
]


def test_no_value_of_any_parameter_compiles_anything():
    traced = []

    @jax.jit
    def counted(
        logits: jax.Array, state: SamplerState, args: SamplerArgs
    ) -> tuple[jax.Array, SamplerState]:
        traced.append(1)
        return sample(logits, state, args)

    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32))
    for changes in SETTINGS:
        params = SamplingParams(**changes)
        state = init_state(params, range(9))
        for _ in range(3):
            token, state = counted(logits, state, params.arrays())
            assert 0 <= int(token[0]) < 300
    assert len(SETTINGS) == 20 and len(traced) == 1


def test_rows_of_a_batch_are_drawn_as_if_alone():
    values = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32) * 3
    values[3], values[12] = NAN, -INF
    logits = jnp.asarray(values)
    params = [SamplingParams(**changes) for changes in SETTINGS]
    states = [init_state(p, range(i)) for i, p in enumerate(params)]

    def stacked(trees: Sequence) -> SamplerState | SamplerArgs:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)

    together, after = run(logits, stacked(states), stacked([p.arrays() for p in params]))
    for i, p in enumerate(params):
        alone, state = run(logits[i : i + 1], states[i], p.arrays())
        assert int(alone[0]) == int(together[i])
        assert (int(alone[0]) == -1) == (i in (3, 12))
        np.testing.assert_array_equal(state.recent[0], after.recent[i])
        assert int(after.step[i]) == 1


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.5, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.15}]
)
def test_draws_follow_the_probabilities(changes: dict):
    params = dataclasses.replace(OFF, **changes)
    logits = np.random.default_rng(8).normal(size=8).astype(np.float32)
    several = jnp.tile(logits, (N_DRAWS, 1))
    tokens, _ = run(several, many_steps(params), params.arrays(N_DRAWS), few=2)
    check_draws(tokens, reference(logits, [], params))


def test_greedy_takes_the_first_maximum_after_penalties():
    greedy = SamplingParams(temperature=0.0, repeat_penalty=2.0)
    logits = jnp.asarray([[1.0, 3.0, 4.0, 3.0, -9.0]])
    assert int(run(logits, init_state(greedy, []), greedy.arrays())[0][0]) == 2
    assert int(run(logits, init_state(greedy, [2]), greedy.arrays())[0][0]) == 1


def test_padding_is_never_drawn():
    logits = jnp.asarray([[1.0, 2.0, 3.0] + [50.0] * 297])
    for changes in ({"temperature": 0.0}, {"temperature": 5.0}, {"top_k": 0, "top_p": 1.0}):
        params = dataclasses.replace(OFF, **changes)
        state, args = init_state(params, []), params.arrays(n_vocab=3)
        for _ in range(20):
            token, state = run(logits, state, args)
            assert int(token[0]) < 3
    assert int(run(logits, state, params.arrays())[0][0]) >= 3


def test_window_forgets_after_64_tokens():
    params = SamplingParams(temperature=0.0, repeat_penalty=2.0)
    logits = jnp.asarray([[3.0, 4.0] + [0.0] * 298])
    for between, expected in [(63, 0), (64, 1)]:
        state = init_state(params, [1] + [50] * between)
        assert int(run(logits, state, params.arrays())[0][0]) == expected


@pytest.mark.parametrize(("vocab", "few"), [(1, 128), (300, 128), (1500, 4)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_finite_logit_is_minus_one(vocab: int, few: int, temperature: float):
    params = dataclasses.replace(SamplingParams(), temperature=temperature)
    state, args = init_state(params, [0, 1]), params.arrays()
    for hopeless in (NAN, -INF):
        logits = np.full((1, vocab), hopeless, np.float32)
        token, after = run(jnp.asarray(logits), state, args, few=few)
        assert int(token[0]) == -1 and int(after.step[0]) == 1
        logits[0, vocab - 1] = -3.0
        assert int(run(jnp.asarray(logits), state, args, few=few)[0][0]) == vocab - 1
        logits[0, vocab // 2] = INF
        assert int(run(jnp.asarray(logits), state, args, few=few)[0][0]) == vocab // 2


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_k": 127}, {"min_p": 1.0}])
def test_ties_beyond_the_candidates_stay(changes: dict):
    # 300 equal logits: whatever k, all of them stay, and high ids are drawn as well.
    params = dataclasses.replace(OFF, **changes)
    state, tokens = init_state(params, []), []
    for _ in range(30):
        token, state = run(jnp.zeros((1, 300)), state, params.arrays())
        tokens.append(int(token[0]))
    assert max(tokens) > 200 and min(tokens) < 100


def test_bad_shapes_are_refused():
    params = SamplingParams()
    state, args = init_state(params, []), params.arrays()
    for logits, message in [
        (jnp.zeros((4,)), r"logits must be float32 \[batch, vocab\], got float32 \[4\]"),
        (jnp.zeros((1, 0)), r"got float32 \[1, 0\]"),
        (jnp.zeros((1, 4), jnp.bfloat16), r"got bfloat16 \[1, 4\]"),
        (jnp.zeros((2, 4)), "state is of shape .1. for logits of 2 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample(logits, state, args)
    with pytest.raises(ValueError, match=r"args is of shape .3. for logits of 1 rows"):
        sample(jnp.zeros((1, 4)), state, params.arrays(3))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU compiler")
def test_nothing_sorts_the_vocabulary():
    # XLA turns top_k into a sort, 50 times as slow, if its result is sliced carelessly.
    params = SamplingParams()
    logits = jnp.zeros((1, 40_000))
    text = run.lower(logits, init_state(params, []), params.arrays()).compile().as_text()
    assert text is not None
    sorts = re.findall(r" = (.+?) sort\(", text)
    assert sorts and all(shape.startswith("s32[1,128]") for shape in sorts)
    assert text.count('custom_call_target="TopK"') >= 3
