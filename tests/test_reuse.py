"""What the engine holds between runs: prefixes are reused, runs go on, and nothing else shows.

`ringed` has rings of 8 + 8 slots in a context of 40, so early positions are overwritten soon.
"""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import N_CTX, short_engine

pytestmark = pytest.mark.usefixtures("shared_compiles")

LONG = [(7 * i * i + 3 * i + 11) % 96 for i in range(N_CTX)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 7, "repeat_penalty": 1.3}
ENGINES = ("ringed", "plain")
CHECKS = (HealthCheck.function_scoped_fixture,)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a fresh engine by its name."""
    data = {
        "ringed": tiny_models.tiny_model("gemma3", tied=False),
        "plain": tiny_models.tiny_model("llama", n_layer=2, n_ctx=64),
    }
    models = {n: tiny_models.load(tmp_path_factory.mktemp(n), d) for n, d in data.items()}

    def engine(name: str) -> Engine:
        return short_engine(models[name])

    return engine


@pytest.fixture(scope="module", params=ENGINES)
def pair(request, make):
    """An engine with a history, and one that runs everything cold."""
    return make(request.param), make(request.param)


def run(engine: Engine, ids, n: int, **options: Any) -> list[int]:
    return list(engine.generate_tokens(ids, n, **{**GREEDY, **options}))


def slots(engine: Engine) -> int:
    """Of the sliding layers' rings."""
    return engine.kv_layers(1)[1]


# Prefixes


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """Runs: prompts that share beginnings with one text, tokens to draw, and how many to take."""
    runs = []
    for _ in range(draw(st.integers(2, 4))):
        shared = LONG[: draw(st.integers(0, 36))]
        own = draw(st.lists(st.integers(0, 95), min_size=not shared, max_size=4))
        n = draw(st.integers(1, 12))
        runs.append((shared + own, n, draw(st.integers(1, n))))
    return runs


@settings(max_examples=15, deadline=None, suppress_health_check=CHECKS)
@given(runs=prompts())
def test_greedy_tokens_are_those_of_a_cold_run(pair, runs):
    """Whatever ran before, to its end or not: in full caches and in rings."""
    warm, cold = pair
    for ids, n, taken in runs:
        expected = run(cold, ids, n, reuse=False)
        assert cold.stats.n_reused == 0
        some = list(itertools.islice(warm.generate_tokens(ids, n, **GREEDY), taken))
        assert some == expected[:taken]
        assert warm.stats.n_reused < len(ids)
        assert warm.tokens == [*ids, *some]
        again = run(warm, [*ids, *some], n - taken) if len(ids) + taken <= N_CTX else []
        assert again == expected[taken:][: len(again)]


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_reused(make, name):
    engine = make(name)
    tokens = run(engine, LONG[:10], 4)
    assert (engine.stats.n_prompt, engine.stats.n_reused) == (10, 0)
    text = [*LONG[:10], *tokens]
    for ids, n_reused in (
        ([*text, 1, 2], 13),  # the last token that was drawn is run in any case
        (text, 13),
        (text, 13),
        ([*text[:12], 95, 94], 12),
        (text[:6], 5),
        ([95, *text], 0),
    ):
        run(engine, ids, 1)
        assert (engine.stats.n_prompt, engine.stats.n_reused) == (len(ids), n_reused)
        assert engine.stats.n_prefilled == len(ids) - n_reused


def test_a_ring_that_has_moved_on_is_not_reused(make):
    """It holds 16 positions of which 8 are seen: back by more than 8 is too far."""
    engine, cold = make("ringed"), make("ringed")
    assert slots(engine) == 16
    for length, back, reused in ((30, 3, True), (30, 8, True), (30, 9, False), (36, 20, False)):
        run(engine, LONG[:length], 1, reuse=False)
        ids = [*LONG[: length - 1 - back], 95, 94]
        expected = run(cold, ids, 3, reuse=False)
        assert run(engine, ids, 3) == expected
        assert (engine.stats.n_reused > 0) == reused, (length, back)
    full = make("plain")
    run(full, LONG[:36], 1)
    run(full, [*LONG[:16], 95], 3)
    assert full.stats.n_reused == 16


def test_rates_count_what_was_prefilled(make):
    engine = make("plain")
    run(engine, LONG[:30], 1)
    run(engine, LONG[:30], 1)
    stats = engine.stats
    assert stats.n_reused == 29
    assert stats.prefill_rate == pytest.approx(1 / stats.prefill_seconds)


def test_reuse_compiles_nothing_that_the_prompt_would_not(make):
    engine = make("plain")
    names = ["prefill 8", "decode"]
    for n in (20, 23, 26, 26):  # the rest fits the bucket of 4, which is not there
        run(engine, LONG[:n], 1)
        assert [c.name for c in engine.compiles] == names
    run(engine, LONG[:3], 1, reuse=False)
    assert [c.name for c in engine.compiles] == [*names, "prefill 4"]


def test_the_smallest_bucket_is_compiled_once_where_it_is_asked_for(make):
    engine, cold = make("plain"), make("plain")
    for n, names in ((20, []), (24, ["prefill 4"]), (28, ["prefill 4"])):
        tokens = run(engine, LONG[:n], 2, smallest_bucket=True)
        assert [c.name for c in engine.compiles] == ["prefill 8", "decode", *names]
        assert tokens == run(cold, LONG[:n], 2, reuse=False)
    assert engine.stats.n_prefilled == 4


def test_other_weights_reuse_nothing(make):
    engine = make("plain")
    run(engine, LONG[:10], 2)
    engine.params = jax.tree.map(lambda a: a, engine.params)
    run(engine, LONG[:10], 2)
    assert engine.stats.n_reused == 0


# Failures


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("program", ["prefill 8", "decode"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [True, False])
def test_a_call_that_fails_leaves_nothing_wrong(make, name, program, error, after, monkeypatch):
    """Before the state is given away, and after."""
    engine = make(name)
    expected = run(engine, LONG[:24], 6)
    run(engine, LONG[:10], 3)
    programs = engine._runner.programs._programs
    compiled, calls = programs[program], itertools.count()

    def failing(*args):
        if next(calls):
            if after:
                compiled(*args)
            raise error
        return compiled(*args)

    with monkeypatch.context() as patch:
        patch.setitem(programs, program, failing)
        with pytest.raises(error):
            run(engine, LONG[:24], 6)
    assert run(engine, LONG[:24], 6) == expected


class _Lost:
    """What a program that failed has left in place of its tokens."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("device lost")


def test_a_failure_that_shows_late_leaves_no_state(make, monkeypatch):
    """A call is sent off before the results of the one before are read."""
    engine = make("plain")
    expected = run(engine, LONG[:24], 6)
    programs = engine._runner.programs._programs
    decode = programs["decode"]

    def failing(*args):
        state, _, *rest = decode(*args)
        return state, _Lost(), *rest

    with monkeypatch.context() as patch:
        patch.setitem(programs, "decode", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            run(engine, LONG[:24], 6)
    assert engine._runner.kv.state is None
    assert run(engine, LONG[:24], 6) == expected


def test_logits_hold_nothing(make):
    engine = make("plain")
    run(engine, LONG[:10], 2)
    engine.logits(LONG[:5])
    assert engine.tokens == []
    run(engine, LONG[:10], 2)
    assert engine.stats.n_reused == 0
    with pytest.raises(EngineError, match="no run to continue"):
        make("plain").continue_tokens()


# Going on


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_a_run_goes_on_as_it_would_have(make, name, options):
    """Also where it was left in the middle of what one call draws."""
    engine = make(name)
    whole = run(engine, LONG[:9], 24, **options)
    for cuts in ([24], [1, 23], [5, 7, 12], [3] * 8):
        tokens = list(engine.generate_tokens(LONG[:9], cuts[0], **options))
        for n in cuts[1:]:
            tokens += engine.continue_tokens(n)
        assert tokens == whole, cuts
    for taken in range(1, 20, 3):
        left = list(itertools.islice(engine.generate_tokens(LONG[:9], 24, **options), taken))
        assert engine.stats.n_generated == taken
        assert [*left, *engine.continue_tokens(24 - taken)] == whole
        assert (engine.stats.n_prompt, engine.stats.n_reused) == (9 + taken, 8 + taken)


def test_a_continued_run_keeps_its_stop_ids(make):
    engine = make("plain")
    whole = run(engine, LONG[:9], 12)
    stop = next(t for t in whole[4:] if t not in whole[:4])
    assert run(engine, LONG[:9], 3, stop_ids=[stop]) == whole[:3]
    assert list(engine.continue_tokens(20)) == whole[3 : whole.index(stop)]
    assert engine.stats.finish_reason == "stop"
    assert list(engine.continue_tokens(20)) == [], "it is at its end"
    assert engine.tokens == [*LONG[:9], *whole[: whole.index(stop)]]


def test_a_full_context_cannot_go_on(make):
    engine = make("plain")
    run(engine, LONG[:30], 100)
    assert len(engine.tokens) == N_CTX + 1
    assert list(engine.continue_tokens(5)) == []
    assert (engine.stats.n_generated, engine.stats.finish_reason) == (0, "length")


def test_a_run_that_is_continued_is_over(make):
    engine = make("plain")
    first = engine.generate_tokens(LONG[:9], 9, **GREEDY)
    next(first)
    list(engine.continue_tokens(2))
    with pytest.raises(EngineError, match="overtaken"):
        next(first)


# Shifting


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("n_keep", [0, 1, 7, -1, 1000])
def test_after_a_shift_the_text_is_that_of_what_is_left(make, name, n_keep):
    engine, cold = make(name), make(name)
    prompt, n = LONG[:12], 90
    tokens = run(engine, prompt, n, context_shift=True, n_keep=n_keep)
    assert len(tokens) == engine.stats.n_generated == n
    assert engine.stats.finish_reason == "length"
    kept = 12 if n_keep < 0 else min(n_keep, N_CTX - 4)

    text, left, dropped = [*prompt, *tokens[:29]], tokens[29:], 0
    while left:
        assert len(text) == N_CTX + 1
        n_drop = (N_CTX - kept) // 2
        text, dropped = text[:kept] + text[kept + n_drop :], dropped + n_drop
        expected = run(cold, text, len(left), reuse=False)
        assert left[: len(expected)] == expected
        text, left = text + expected, left[len(expected) :]
    assert engine.tokens == text
    assert engine.stats.n_dropped == dropped


def test_a_shift_compiles_nothing_if_its_bucket_is_there(make):
    engine = make("ringed")
    run(engine, LONG[:12], 60, context_shift=True)
    assert [c.name for c in engine.compiles] == ["prefill 8", "decode"]
    engine = make("ringed")
    run(engine, LONG[:3], 60, context_shift=True)
    assert [c.name for c in engine.compiles] == ["prefill 4", "decode", "prefill 8"]
    assert engine.stats.compile_seconds == engine.compile_seconds


def test_a_shifted_run_goes_on_as_it_would_have(make):
    """The penalties still know the tokens that were dropped."""
    engine = make("ringed")
    whole = run(engine, LONG[:12], 80, context_shift=True, **DRAWN)
    for cut in (28, 29, 30, 50):
        part = run(engine, LONG[:12], cut, context_shift=True, **DRAWN)
        assert [*part, *engine.continue_tokens(80 - cut)] == whole


def test_without_a_shift_the_context_ends_the_run(make):
    engine = make("plain")
    assert len(run(engine, LONG[:12], 90)) == 29
    with pytest.raises(EngineError, match="the context holds 40"):
        engine.generate_tokens([*LONG, 1], 1, context_shift=True)


@pytest.mark.parametrize("n_ctx", [1, 3])
def test_the_smallest_contexts_shift(make, n_ctx):
    model = make("plain")
    engine = Engine(model.params, model.cfg, n_ctx=n_ctx)
    for n_keep in (0, 1, -1):
        assert len(run(engine, [5], 20, context_shift=True, n_keep=n_keep)) == 20
    assert np.all(np.asarray(engine.tokens) < 96)
