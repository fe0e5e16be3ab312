"""How many tokens one call draws: it changes how often the program is called, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minfer_jax.burst import BURST
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.language_model import load
from minfer_jax.run_stats import Pace
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import short_engine

pytestmark = pytest.mark.usefixtures("shared_compiles")

PROMPT = [5, 17, 3, 80]
N = 30
RUNS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 50, "seed": 7},
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    data = tiny_models.tiny_model("llama", n_layer=1, n_ctx=64)
    return tiny_models.save(tmp_path_factory.mktemp("models"), data).path


@pytest.fixture(scope="module")
def expected(file) -> list[list[int]]:
    """What is drawn where time decides how much a call draws."""
    engine = load(file, n_ctx=64).engine
    return [list(engine.generate_tokens(PROMPT, N, **run)) for run in RUNS]


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each call of decode, as they come."""
    steps: list[int] = []
    call = engine._runner.programs.call

    def count(function, params, tokens, positions, state, *rest):
        if tokens.shape[1] == 1:
            steps.append(int(rest[-1].steps))
        return call(function, params, tokens, positions, state, *rest)

    monkeypatch.setattr(engine._runner.programs, "call", count)
    return steps


def bursts(n: int, k: int) -> Iterator[int]:
    """The first token comes alone, the others k a call."""
    yield 1
    for done in range(1, n, k):
        yield min(k, n - done)


@pytest.mark.parametrize("k", [1, 3, BURST])
def test_the_tokens_are_the_same_in_as_many_calls(k, file, expected, monkeypatch):
    engine = load(file, n_ctx=64, steps_per_dispatch=k).engine
    steps = counted(engine, monkeypatch)
    for run, tokens in zip(RUNS, expected, strict=True):
        steps.clear()
        assert list(engine.generate_tokens(PROMPT, N, reuse=False, **run)) == tokens
        assert steps == list(bursts(N, k))
        stop = tokens[N // 2]
        kept = list(engine.generate_tokens(PROMPT, N, reuse=False, stop_ids=[stop], **run))
        assert kept == tokens[: tokens.index(stop)]
    assert [c.name for c in engine.compiles] == ["prefill 32", "decode"]


def test_rows_side_by_side(file, expected, monkeypatch):
    engine = load(file, n_ctx=64, steps_per_dispatch=4).engine
    steps = counted(engine, monkeypatch)
    rows: list[list[int]] = [[], []]
    for row, token in engine.generate_batch(PROMPT, 2, N, **RUNS[0]):
        rows[row].append(token)
    assert rows == [expected[0]] * 2
    assert steps == list(bursts(N, 4))


def test_a_short_prefill_bounds_it(tmp_path, monkeypatch):
    """A ring of sliding layers has as many slots to spare as a prefill has tokens: two calls."""
    model = tiny_models.load(tmp_path, tiny_models.tiny_model("llama", n_layer=1))
    engine = short_engine(model, steps_per_dispatch=BURST)
    steps = counted(engine, monkeypatch)
    found = list(engine.generate_tokens(PROMPT, N, temperature=0.0))
    assert steps == list(bursts(N, 4))
    assert found == list(short_engine(model).generate_tokens(PROMPT, N, temperature=0.0))


@pytest.mark.parametrize("wrong", [0, -1, BURST + 1, 1.5, "4"])
def test_what_is_no_number_of_steps(wrong, file):
    with pytest.raises(EngineError, match=r"steps_per_dispatch is .*, expected"):
        load(file, steps_per_dispatch=wrong)


def test_time_changes_a_pace_unless_it_is_fixed():
    free, fixed = Pace(8), Pace(8, 8)
    assert (free.steps, fixed.steps) == (1, 8)
    free._then = fixed._then = free._then - 10  # a slow call
    for pace in (free, fixed):
        pace.read(1)
    assert (free.steps, fixed.steps) == (1, 8)
    free.read(1)  # a fast one
    assert free.steps == 8
