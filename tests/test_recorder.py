"""A text run again: statistics and samples of its values, which are computed in the program."""

import math

import numpy as np
import pytest

from minfer_jax import recorder
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.model.summary import SAMPLES, places, sizes
from minfer_jax.recorder import Recorder, Step
from tests.helpers.tiny_engines import N_CTX, short_engine
from tests.helpers.tiny_models import load, tiny_model

PROMPT = [(11 * i * i + 5 * i + 2) % 96 for i in range(19)]
DRAWN = [7, 60, 3]
CHUNK = 8  # the prompt goes through in 3 calls
CLOSE = 2e-4
SHOWN = (
    "embd",
    "blk.*.k",
    "blk.*.scores",
    "blk.*.weights",
    "blk.*.gate",
    "blk.3.residual",
    "logits",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return short_engine(load(tmp_path_factory.mktemp("model"), tiny_model("gemma3")))


def of(engine: Engine, n_tokens: int, **options: bool) -> Recorder:
    return Recorder(engine.params, engine.cfg, n_tokens=n_tokens, n_ctx=N_CTX, **options)


@pytest.fixture(scope="module")
def ran(engine: Engine) -> tuple[Recorder, list[Step]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "CHUNK", CHUNK)
        one = of(engine, len(PROMPT) + len(DRAWN))
        steps = [one.prompt(np.array(PROMPT, np.int32)), *(one.token(token) for token in DRAWN)]
    return one, steps


def test_two_programs(ran):
    assert [c.name for c in ran[0].compiles] == ["record 8", "record 1"]
    assert [step.token for step in ran[1]] == [None, *DRAWN]
    assert ran[0].n_rows == len(PROMPT) + len(DRAWN)


def test_logits_are_those_of_the_engine(engine: Engine, ran):
    expected = engine.logits([*PROMPT, *DRAWN])[len(PROMPT) - 1 :]
    np.testing.assert_allclose([step.logits for step in ran[1]], expected, atol=CLOSE)


def test_statistics_and_samples_are_those_of_the_values(engine: Engine, ran):
    whole = engine.trace([*PROMPT, *DRAWN], SHOWN)
    for i, step in enumerate(ran[1]):
        known = {value.name: value for value in step.values}
        last = len(PROMPT) + i
        rows = slice(0, last) if i == 0 else slice(last - 1, last)
        for name, value in whole.items():
            cut = value[:, rows, :last] if name.endswith(("scores", "weights")) else value[rows]
            found, flat = known[name], cut.ravel()
            assert (found.n, found.dtype) == (flat.size, "float32")
            assert found.stride == max(1, math.ceil(flat.size / SAMPLES))
            np.testing.assert_allclose(found.values, flat[:: found.stride], atol=CLOSE)
            finite = flat[np.isfinite(flat)]
            expected = (finite.min(), finite.max(), finite.mean(), np.abs(finite).mean())
            assert list(found.stats) == ["min", "max", "mean", "absmean"]
            np.testing.assert_allclose(list(found.stats.values()), expected, atol=CLOSE)


def test_keys_and_values_by_position(engine: Engine, ran):
    whole = engine.trace([*PROMPT, *DRAWN], ("blk.*.k", "blk.*.v"))
    for layer in range(engine.cfg.n_layer):
        k, v = ran[0].rows(layer)
        np.testing.assert_allclose(k, whole[f"blk.{layer}.k"], atol=CLOSE)
        np.testing.assert_allclose(v, whole[f"blk.{layer}.v"], atol=CLOSE)


def test_whole_numbers_of_experts(tmp_path):
    engine = short_engine(load(tmp_path, tiny_model("qwen2moe")))
    step = of(engine, 5).prompt(np.array(PROMPT[:5], np.int32))
    value = next(v for v in step.values if v.name == "blk.1.experts")
    chosen = engine.trace(PROMPT[:5], value.name)[value.name]
    assert value.dtype == "int32" and value.n == chosen.size
    assert value.values.tolist() == chosen.ravel().tolist()
    assert value.stats["max"] == chosen.max()


def test_scores_that_are_too_large_are_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "MAX_BYTES", 4 * 4 * N_CTX)
    one = of(engine, N_CTX)
    assert "blk.0.scores" in one.known(1) and "blk.0.scores" not in one.known(8)
    assert "blk.0.scores" not in one.graph("prefill", 9).ids
    assert "blk.0.scores" in one.graph("decode", 1).ids


def test_logits_alone(engine: Engine, ran):
    one = of(engine, 4, summed=False)
    step = one.prompt(np.array(PROMPT[:4], np.int32))
    assert step.values == []
    np.testing.assert_allclose(step.logits, engine.logits(PROMPT[:4])[-1], atol=CLOSE)


def test_what_is_refused(engine: Engine):
    with pytest.raises(EngineError, match="41 tokens are to be run, but the context holds 40"):
        of(engine, 41)
    with pytest.raises(EngineError, match="41 tokens, but the recorder takes 40"):
        of(engine, 20).prompt(np.zeros(41, np.int32))


@pytest.mark.parametrize("rows", [1, 3, 10, 1000])
def test_samples_are_spread_over_all_numbers(rows: int):
    key = "scores", (1, 3, 8, 2000)
    shape = sizes(key, rows, rows + 7)
    assert shape == [3, rows, rows + 7]
    at = places(key, rows, rows + 7)
    flat = np.ravel_multi_index(tuple(at[at[:, 0] >= 0].T), shape)
    n = math.prod(shape)
    assert flat.tolist() == list(range(0, n, max(1, -(-n // SAMPLES))))
