"""Where what an answer may be asked for meets: constraints, stop strings, log-probabilities,
samples, guesses, shifts of the context, runs that go on or are saved, conversations.

Each is compared with the same text written otherwise: at one go, alone, or without what must change
nothing.
"""

import re
from typing import Any

import pytest

from minfer_jax.constraint import Constraint
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.speculation import Plan
from tests.helpers import tiny_models

N_CTX = 64
WILD: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LETTERS = Constraint.from_regex("[a-f]{150}!")
CUT = "\ufffd"  # of a character that was begun before
SHORT = Constraint.from_regex("[a-f]{20,24}!")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    data = tiny_models.tiny_text_model(n_layer=1, n_ctx=N_CTX)
    return tiny_models.save(tmp_path_factory.mktemp("together"), data).path


@pytest.fixture(scope="module")
def model(path) -> LanguageModel:
    """It writes at random, so nothing fits or stops but by what is asked for."""
    return load(path, n_ctx=N_CTX, precision="highest")


def answered(model: LanguageModel, **options: Any) -> str:
    return model.generate("hello", template=False, **{**WILD, "max_tokens": 40, **options})


def more(model: LanguageModel, n: int, **options: Any) -> str:
    return "".join(model.continue_stream(max_tokens=n, **options))


# Constraints


def test_a_constraint_outlives_shifts_of_the_context(model):
    options = {"constraint": LETTERS, "context_shift": True, "seed": 1}
    whole = answered(model, max_tokens=400, **options)
    assert re.fullmatch("[a-f]{150}!", whole)
    assert (model.stats.finish_reason, model.stats.n_dropped > 0) == ("stop", True)
    for taken in (40, 100):  # before the first shift, and after it
        cut = answered(model, max_tokens=taken, **options)
        assert model.stats.finish_reason == "length"
        assert cut + more(model, 400) == whole
        assert (model.stats.finish_reason, more(model, 5)) == ("stop", "")


def test_a_constraint_is_cut_by_the_context(model):
    text = answered(model, max_tokens=400, constraint=LETTERS)
    assert re.fullmatch("[a-f]{20,100}", text)
    assert model.stats.finish_reason == "length"
    assert len(model.engine.tokens) == N_CTX + 1


@pytest.mark.parametrize("options", [{}, {"n_logprobs": 3, "on_drawn": lambda drawn: None}])
def test_a_stop_string_cuts_a_constrained_answer_which_then_goes_on(model, options):
    options = {**options, "constraint": SHORT, "seed": 2}
    whole = answered(model, **options)
    stop = whole[7:9]
    assert answered(model, stop=["", stop], **options) == whole[: whole.index(stop)]
    assert model.stats.finish_reason == "stop"
    known = model.tokenizer
    assert known is not None
    so_far = known.decode(model.engine.tokens).removeprefix("hello")
    assert so_far.endswith(stop)
    assert so_far + more(model, 40) == whole


def test_whoever_is_told_may_fail_and_the_run_goes_on(model):
    """The constraint is as far as the text is."""
    whole = answered(model, constraint=SHORT, seed=3)
    told = []

    def tell(drawn: object) -> None:
        told.append(drawn)
        if len(told) == 5:
            raise OSError("the pipe is closed")

    with pytest.raises(OSError, match="the pipe"):
        answered(model, constraint=SHORT, seed=3, on_drawn=tell)
    known = model.tokenizer
    assert known is not None
    so_far = known.decode(model.engine.tokens).removeprefix("hello")
    assert so_far + more(model, 40) == whole


def test_samples_under_a_constraint_and_stop_strings(model):
    options = {"constraint": SHORT, "stop": ["a", "!"], "seed": 2**64 - 1}
    texts = model.generate_many("hello", 2, template=False, max_tokens=40, **WILD, **options)
    assert model.stats.finish_reasons == ["stop"] * 2
    assert texts == [answered(model, **{**options, "seed": s}) for s in (2**64 - 1, 0)]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[b-f]{0,24}", text) for text in texts)


# Log-probabilities


def test_logprobs_are_told_across_stops_shifts_and_what_follows(model):
    told = []
    options = {"context_shift": True, "max_tokens": 100, "seed": 4, "ignore_eos": True}
    whole = answered(model, **options)
    tokens = [*model.engine.tokens]
    watched = {**options, "n_logprobs": 2, "on_drawn": told.append}
    assert answered(model, **watched) == whole
    assert model.stats.n_dropped > 0
    assert [drawn.token for drawn in told][-20:] == tokens[-20:]
    assert len(told) == 100
    first, told[:] = told[:], []
    answered(model, **{**watched, "max_tokens": 70})
    more(model, 30)
    assert told == first
    told.clear()
    stop = next(c for c in whole if c.isascii() and c.isprintable())
    assert answered(model, stop=stop, **watched) == whole[: whole.index(stop)]
    assert told == first[: len(told)], "those of the stop string are told too"


# Guesses


@pytest.fixture(scope="module")
def twin(path) -> LanguageModel:
    """It guesses the likeliest token, which at temperature 0 is right."""
    return load(path, n_ctx=N_CTX, precision="highest")


@pytest.fixture
def draft(model, twin, monkeypatch):
    """Its guesses are checked, whatever they cost."""
    monkeypatch.setattr(Plan, "MARGIN", 0.0)
    monkeypatch.setattr(Plan, "STAKE", 1e9)
    return model.drafter(twin, 1)


@pytest.mark.parametrize("asked", [{"temperature": 0.0, "repeat_penalty": 1.0}, {"seed": 5}])
def test_guesses_meet_stop_strings_shifts_and_files(model, draft, tmp_path, asked):
    options = {"context_shift": True, "max_tokens": 90, **asked}
    whole = answered(model, **options)
    assert model.stats.n_generated > 60
    assert answered(model, draft=draft, **options) == whole
    assert model.stats.n_drafted > 10
    assert model.stats.n_accepted > 10 or "seed" in asked
    answered(model, **{**options, "max_tokens": 30, "draft": draft})
    model.save_state(tmp_path / "state")
    ends = []
    for drafts in ({}, {"draft": draft}):
        model.load_state(tmp_path / "state")
        ends.append(more(model, 60, **drafts))
    assert ends[0] == ends[1]
    assert whole.endswith(ends[0].lstrip(CUT))
    stop = whole[9:11]
    text = answered(model, stop=stop, draft=draft, **options)
    assert (text, model.stats.finish_reason) == (whole[: whole.index(stop)], "stop")


# Conversations


def talk(model: LanguageModel, **options: Any) -> list[str]:
    conversation = Conversation(model, max_tokens=12, **{**WILD, **options})
    return ["".join(conversation.say("hi")) for _ in range(4)]


def test_a_conversation_with_guesses_or_logprobs_is_the_same(model, draft):
    plain = talk(model, seed=6)
    told = []
    assert talk(model, seed=6, draft=draft) == plain
    assert talk(model, seed=6, n_logprobs=1, on_drawn=told.append) == plain
    assert len(told) > 12


def test_every_answer_of_a_conversation_meets_the_constraint(model):
    texts = talk(model, constraint=Constraint.from_regex("[a-f]{3}!"), seed=7)
    assert [re.fullmatch("[a-f]{3}!", text) is not None for text in texts] == [True] * 4
    assert len(set(texts)) > 1


def test_none_of_it_compiles_another_program(model):
    answered(model, constraint=SHORT)
    answered(model)
    n = len(model.engine.compiles)
    for options in (
        {"constraint": LETTERS, "stop": ["x", "yy"], "n_logprobs": 20, "on_drawn": print},
        {"logit_bias": {5: 1.0}, "dry_multiplier": 0.7, "dry_breakers": ["x"], "seed": 9},
        {"mirostat": 2, "samplers": ("dry",), "ignore_eos": True, "n_keep": 3},
        {"seed": None, "temperature": 0.5, "stop": "z"},
    ):
        answered(model, max_tokens=5, **options)
    assert len(model.engine.compiles) == n
