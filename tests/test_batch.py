"""Several texts from one prompt: each row is what a run of its own seed draws, and they share the
prompt's prefill and what is compiled.

`ringed` has rings of 8 + 8 slots in a context of 40, so early positions are overwritten soon.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax import memory
from minfer_jax.burst import burst
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.language_model import load
from minfer_jax.model.kv_state import repeated
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import N_CTX, short_engine
from tests.test_decode_extended import BREAKERS, Sets

pytestmark = pytest.mark.usefixtures("shared_compiles")

LONG = [(7 * i * i + 3 * i + 11) % 96 for i in range(N_CTX)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 2**64 - 2, "repeat_penalty": 1.3}
EXTENDED: dict[str, Any] = {
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "dry_breakers": BREAKERS,
    "logit_bias": {5: -np.inf, 9: 2.0},
    "seed": 11,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    data = tiny_models.tiny_model("gemma3", tied=False)
    return tiny_models.load(tmp_path_factory.mktemp("ringed"), data)


@pytest.fixture(scope="module")
def make(model):
    def engine(n_ctx: int = N_CTX) -> Engine:
        return short_engine(model, n_ctx=n_ctx)

    return engine


@pytest.fixture(scope="module")
def engine(make):
    return make()


def rows(engine: Engine, ids, n: int, max_tokens: int, **options: Any) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(n)]
    for row, token in engine.generate_batch(ids, n, max_tokens, **options):
        texts[row].append(token)
    return texts


def singles(engine: Engine, ids, n: int, max_tokens: int, **options: Any) -> list[list[int]]:
    seed = options.pop("seed", 42)
    return [
        list(engine.generate_tokens(ids, max_tokens, seed=(seed + i) % 2**64, **options))
        for i in range(n)
    ]


@pytest.mark.parametrize("options", [GREEDY, DRAWN, EXTENDED], ids=["greedy", "drawn", "extended"])
def test_rows_are_what_runs_of_their_own_draw(engine, options):
    """Through the wrap of the rings, to the end of the context. One row of the four is idle."""
    texts = rows(engine, LONG[:9], 3, 100, **options)
    assert texts == singles(engine, LONG[:9], 3, 100, **options)
    assert [len(text) for text in texts] == [32] * 3
    assert len({tuple(text) for text in texts}) == (1 if options is GREEDY else 3)


def test_plain_xla_draws_the_same(tmp_path, monkeypatch):
    """Of more rows than its product for few takes."""
    monkeypatch.setenv("MINFER_CPU_ISA", "off")
    cfg, params = tiny_models.load(tmp_path, tiny_models.tiny_model("llama", n_layer=1))
    engine = Engine(params, cfg, n_ctx=N_CTX, prefill_chunk=8)
    texts = rows(engine, LONG[:9], 5, 16, **DRAWN)
    assert texts == singles(engine, LONG[:9], 5, 16, **DRAWN)
    assert len({tuple(text) for text in texts}) == 5


def test_numbers_of_rows_share_programs(make):
    engine = make()
    programs = ["prefill 8", "decode x4"]
    for n, more in ((3, []), (4, []), (2, ["decode x2"]), (1, ["decode"]), (4, [])):
        programs += more
        for options in (GREEDY, DRAWN, {"top_p": 0.3, "stop_ids": [3]}):
            rows(engine, LONG[:9], n, 3, **options)
            assert [c.name for c in engine.compiles] == programs
    assert engine.stats.compile_seconds == 0.0


def test_the_prompt_is_run_once_and_held(engine):
    engine.forget()
    texts = rows(engine, LONG[:9], 4, 5, **DRAWN)
    stats = engine.stats
    assert (stats.n_prompt, stats.n_reused, stats.n_generated) == (9, 0, 20)
    assert stats.finish_reasons == ["length"] * 4
    assert stats.finish_reason == "length"
    assert 0 < stats.prefill_seconds <= stats.total_seconds
    assert engine.tokens == LONG[:9]
    assert rows(engine, LONG[:9], 2, 5, **DRAWN) == texts[:2]
    assert engine.stats.n_reused == 8
    assert list(engine.continue_tokens(5)) == texts[0], "the first row, by its seed"
    assert list(engine.generate_tokens(LONG[:12], 3, reuse=True)), "and the prefix serves others"
    assert rows(engine, LONG[:9], 2, 0) == [[], []]


@pytest.mark.parametrize("n_stops", [1, 40])
def test_rows_end_by_themselves(engine, n_stops):
    """Those that stop leave the others alone; also by more ids than a program is told."""
    free = rows(engine, LONG[:9], 4, 20, **DRAWN)
    stop = free[1][4]
    others = [i for i in range(96) if not any(i in text for text in free)][: n_stops - 1]
    texts = rows(engine, LONG[:9], 4, 20, stop_ids=[*others, stop], **DRAWN)
    expected = [text[: text.index(stop)] if stop in text else text for text in free]
    assert texts == expected
    reasons = ["stop" if stop in text else "length" for text in free]
    assert engine.stats.finish_reasons == reasons
    assert {"stop", "length"} == set(reasons)
    rows(engine, LONG[:9], 2, 20, stop_ids=range(96), **DRAWN)
    assert (engine.stats.finish_reason, engine.stats.n_generated) == ("stop", 0)


def test_idle_rows_are_written_nowhere(engine):
    """Those at position -1, and one whose token stops; the others go on."""
    rows(engine, LONG[:9], 4, 1, **DRAWN)
    runner, form = engine._runner, engine._runner.form(engine._session, 4)
    stop = rows(engine, LONG[:9], 4, 1, **DRAWN)[0][0]
    state = repeated(runner.kv.state, batch=4)
    places = np.array([[8], [-1], [8], [-1]], np.int32)
    last = np.full((4, 1), LONG[8], np.int32)
    args = (form.sampler, form.args, burst(3, frozenset([stop])))
    state, tokens, last, *_ = runner.programs.call(
        form.function, runner.params, last, places, state, *args
    )
    assert np.asarray(tokens)[[0, 1, 3]].tolist() == [[stop] + [-1] * 15, [-1] * 16, [-1] * 16]
    assert (np.asarray(tokens)[2] >= 0).tolist() == [True] * 3 + [False] * 13
    assert np.asarray(last)[:, 0].tolist() == [stop, LONG[8], int(tokens[2, 2]), LONG[8]]
    for held in state.positions:
        assert [row.max() for row in np.asarray(held)] == [8, 7, 10, 7]


def test_rows_that_the_caller_has_enough_of(engine):
    free = rows(engine, LONG[:9], 3, 20, **DRAWN)
    ended: set[int] = {2}
    texts: list[list[int]] = [[], [], []]
    for row, token in engine.generate_batch(LONG[:9], 3, 20, ended=ended, **DRAWN):
        texts[row].append(token)
        if row == 0:
            ended.add(0)
    assert texts[1] == free[1]
    assert texts[2] == []
    assert 1 <= len(texts[0]) < 20
    assert texts[0] == free[0][: len(texts[0])]
    assert engine.stats.finish_reasons == ["stop", "length", "stop"]


def test_each_row_has_a_constraint_of_its_own(engine):
    sets = [{1, 2, 3, 4}, {5, 6, 7, 8}, {9}]
    constraint = Sets(*sets)
    texts = rows(engine, LONG[:9], 4, 9, constraint=constraint, **DRAWN)
    assert all(t in s for text in texts for t, s in zip(text, sets, strict=True))
    assert len({tuple(text) for text in texts}) > 1
    assert engine.stats.finish_reasons == ["stop"] * 4
    assert len(constraint.sets) == 3, "the one that was given has not moved"
    expected = [
        list(engine.generate_tokens(LONG[:9], 9, constraint=Sets(*sets), **DRAWN | {"seed": seed}))
        for seed in (2**64 - 2, 2**64 - 1, 0, 1)
    ]
    assert texts == expected
    assert rows(engine, LONG[:9], 2, 9, constraint=Sets()) == [[], []]


def test_a_row_may_be_left(engine):
    run = engine.generate_batch(LONG[:9], 4, 20, **DRAWN)
    some = list(itertools.islice(run, 6))
    assert [row for row, _ in some] == [0, 1, 2, 3, 0, 1]
    list(engine.generate_tokens(LONG[:9], 3))
    with pytest.raises(EngineError, match="overtaken"):
        next(run)


# Refusals


@pytest.mark.parametrize(("n", "shown"), [(0, "at least 1"), (17, "1 to 16"), (1.5, "an integer")])
def test_a_number_of_rows_that_cannot_be(engine, n, shown):
    with pytest.raises(EngineError, match=f"n is {n}, expected {shown}"):
        engine.generate_batch(LONG[:9], n)


def test_there_must_be_memory(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(memory, "available", lambda: 4 * engine.kv_bytes)
    assert rows(engine, LONG[:9], 4, 1, **GREEDY)
    with pytest.raises(EngineError, match=r"no memory for 8 rows of 40 positions \(\d+ MB\)"):
        rows(engine, LONG[:9], 5, 1, **GREEDY)
    monkeypatch.setattr(memory, "available", lambda: None)
    assert rows(engine, LONG[:9], 4, 1, **GREEDY)


def test_the_memory_that_there_is(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  10 kB\nMemAvailable:    7 kB\n")
    assert memory.available(info) == 7 * 1024
    info.write_text("MemTotal:  10 kB\n")
    assert memory.available(info) is None
    assert memory.available(tmp_path / "none") is None


def test_no_finite_logits(model, make):
    _, params = model
    norm = dataclasses.replace(params.output_norm, weight=params.output_norm.weight * jnp.nan)
    engine = make()
    engine.params = dataclasses.replace(params, output_norm=norm)
    with pytest.raises(EngineError, match=r"no finite logits at position 8$"):
        rows(engine, LONG[:9], 2, 3)


# Text


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    data = tiny_models.tiny_text_model(n_layer=1, n_ctx=128)
    file = tiny_models.save(tmp_path_factory.mktemp("text"), data)
    return load(file.path, n_ctx=128, precision="highest")


def test_answers(text_model):
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "top_k": 0}
    texts = text_model.generate_many("hello", n=3, seed=7, **options)
    assert texts == [text_model.generate("hello", seed=7 + i, **options) for i in range(3)]
    assert len(set(texts)) == 3
    assert text_model.generate_many("hello", n=1, seed=7, **options) == texts[:1]


def test_stop_strings_cut_each_answer_for_itself(text_model):
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "top_k": 0, "seed": 7}
    free = text_model.generate_many("hello", n=3, **options)
    stop = free[1][5:7]
    texts = text_model.generate_many("hello", n=3, stop=stop, **options)
    assert texts == [text.partition(stop)[0] for text in free]
    assert text_model.stats.finish_reasons[1] == "stop"


def test_options_that_answers_do_not_have(text_model):
    with pytest.raises(TypeError, match="temprature"):
        text_model.generate_many("hello", temprature=1.0)
    with pytest.raises(EngineError, match="n is 0"):
        text_model.generate_many("hello", n=0)


def test_the_state_of_one_is_repeated(engine):
    """Each row has all of it: a leaf is one sequence's, as often as there are rows."""
    rows(engine, LONG[:9], 2, 1)
    state = engine._runner.kv.state
    four = repeated(state, batch=4)
    for one, many in zip(
        jax.tree.leaves((state.k, state.v)), jax.tree.leaves((four.k, four.v)), strict=True
    ):
        for row in range(4):
            np.testing.assert_array_equal(many[:, row], one[:, 0])
    for one, many in zip(state.positions, four.positions, strict=True):
        np.testing.assert_array_equal(many, np.repeat(one, 4, 0))
