"""Perplexity as llama.cpp computes it, and the logits of a text call by call."""

import math

import numpy as np
import pytest

import minfer_jax
from minfer_jax.bench_texts import PROMPTS
from minfer_jax.context import EngineError
from minfer_jax.divergence import joined
from minfer_jax.perplexity import Estimate, estimate, run, whole_text, windows
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import dense
from tests.helpers.tiny_engines import short_engine

TEXT = [(7 * i * i + 3 * i + 11) % 96 for i in range(75)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With rings of sliding layers that are shorter than a window, and chunks of 8."""
    data = tiny_models.tiny_model("gemma3", tied=False)
    return short_engine(tiny_models.load(tmp_path_factory.mktemp("model"), data))


# --- windows --------------------------------------------------------------------------------------


def test_windows():
    first, second = windows(range(10, 29), 8, bos_id=1)
    assert first.ids.tolist() == [1, 11, 12, 13, 14, 15, 16]  # the last is a target only
    assert (first.first, first.targets.tolist()) == (4, [15, 16, 17])
    assert second.ids.tolist() == [1, 19, 20, 21, 22, 23, 24]
    assert second.targets.tolist() == [23, 24, 25]


def test_windows_of_a_vocabulary_without_bos_and_of_an_odd_length():
    found = windows(range(10, 31), 7, bos_id=None)
    assert [w.ids.tolist() for w in found] == [[*range(n, n + 6)] for n in (10, 17, 24)]
    assert [w.targets.tolist() for w in found] == [[14, 15, 16], [21, 22, 23], [28, 29, 30]]


def test_the_first_windows():
    assert len(windows(range(33), 8, None)) == 4
    assert len(windows(range(33), 8, None, most=3)) == 3


def test_a_text_that_is_too_short():
    with pytest.raises(
        EngineError, match=r"has 15 tokens, and two windows of 8 take 16: give a lo"
    ):
        windows(range(15), 8, None)
    with pytest.raises(EngineError, match="has 1 tokens, expected 2 or more"):
        whole_text([3])


def test_a_whole_text():
    window = whole_text([5, 6, 7])
    assert (window.ids.tolist(), window.first, window.targets.tolist()) == ([5, 6], 0, [6, 7])


# --- figures --------------------------------------------------------------------------------------


def test_figures_by_hand():
    found = estimate(np.array([1.0, 2.0, 6.0]))
    # llama.cpp's words for it: sqrt((mean of squares - square of the mean) / (n - 1))
    error = math.sqrt((41 / 3 - 9) / 2)
    assert (found.value, found.error) == (3.0, pytest.approx(error))
    assert found.perplexity.value == pytest.approx(math.exp(3))
    assert found.perplexity.error == pytest.approx(error * math.exp(3))
    assert estimate(np.array([2.0])).perplexity.error is None
    assert estimate(np.array([700.0, 800.0])).perplexity == Estimate(value=math.inf, error=None)


def test_it_is_what_the_formula_gives_of_all_logits(engine):
    """llama.cpp's loop, written out; windows of 23 tokens are no multiple of the chunk."""
    n_ctx, bos, nll = 23, 7, []
    for start in range(0, len(TEXT) // n_ctx * n_ctx, n_ctx):
        tokens = TEXT[start : start + n_ctx]
        logits = engine.logits([bos, *tokens[1:]]).astype(np.float64)
        for i in range(n_ctx // 2, n_ctx - 1):
            nll.append(np.log(np.exp(logits[i]).sum()) - logits[i, tokens[i + 1]])
    parts = [part for w in windows(TEXT, n_ctx, bos) for part in run([engine], w)]
    assert max(map(len, parts)) == 8
    found = joined(parts)
    np.testing.assert_allclose(found.nll[0], nll, atol=1e-5)
    assert len(nll) == 3 * 11


def test_vocabularies_of_two_lengths(engine, tmp_path):
    """What is at the end of the longer one, padding, counts for nothing."""
    longer = tiny_models.tiny_model("gemma3", tied=False, n_vocab=104)
    other = short_engine(tiny_models.load(tmp_path, longer))
    window = whole_text(TEXT[:9])
    (found,) = run([other, engine], window)
    logits = other.logits(window.ids.tolist()).astype(np.float64)[:, :96]
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), window.targets]
    np.testing.assert_allclose(found.nll[0], nll, atol=1e-5)


# --- logits call by call --------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3, 8, 19, 36])
def test_parts_are_the_rows_from_there_on(engine, first):
    ids = TEXT[:37]
    parts = list(engine.logit_parts(ids, first))
    assert [len(part) for part in parts[:-1]] == [8] * (len(parts) - 1)
    np.testing.assert_allclose(np.concatenate(parts), engine.logits(ids)[first:], atol=1e-5)


def test_another_text_compiles_nothing(engine):
    compiled = []
    for ids, first in ((TEXT[:37], 16), (TEXT[9:38], 18)):
        assert sum(map(len, engine.logit_parts(ids, first))) == len(ids) - first
        compiled.append(len(engine.compiles))
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("first", [-1, 9])
def test_a_first_row_that_there_is_not(engine, first):
    with pytest.raises(EngineError, match=f"first is {first}, expected 0 to 8"):
        next(engine.logit_parts(TEXT[:9], first))


def test_a_run_that_is_overtaken(engine):
    parts = engine.logit_parts(TEXT[:30])
    next(parts)
    other = list(engine.generate_tokens(TEXT[:5], 3, temperature=0.0))
    with pytest.raises(EngineError, match="overtaken"):
        next(parts)
    assert list(engine.generate_tokens(TEXT[:5], 3, temperature=0.0)) == other


def test_logits_that_are_no_numbers_stay_in_no_cache(tmp_path):
    """A later text is not spoilt by them."""
    embedding = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    embedding[95] = np.nan
    data = tiny_models.tiny_model(
        "llama", n_layer=1, tensors={"token_embd.weight": dense(embedding)}
    )
    engine = short_engine(tiny_models.load(tmp_path, data))
    good = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    before = engine.logits(good)
    (*_, last) = engine.logit_parts([1, 2, 95, 4, 5, 6, 7, 8, 9, 10])
    assert np.isnan(last).all()
    np.testing.assert_array_equal(np.concatenate(list(engine.logit_parts(good))), before)
    assert np.isfinite(before).all()


# --- llama.cpp's own figure -----------------------------------------------------------------------


@pytest.mark.model
def test_the_figure_of_llama_cpp():
    """By its formula over the logits of llama.cpp b11434, of SmolLM2 with its weights as float32:
    5.4433 +/- 0.9679. (Of the file as it is, with activations rounded to 8 bits: 5.4924.)
    """
    model = minfer_jax.load("smollm2", n_ctx=128, precision="highest", cache_type="f16")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("\n\n".join(PROMPTS.values()))
    assert len(ids) == 486
    found = joined([p for w in windows(ids, 128, None) for p in run([model.engine], w)])
    figure = estimate(found.nll[0]).perplexity
    assert figure.value == pytest.approx(5.443308, rel=2e-4)
    assert figure.error == pytest.approx(0.967852, rel=2e-4)
