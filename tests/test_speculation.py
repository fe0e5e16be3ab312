"""Guesses change how fast a text comes, and nothing of the text: whoever guesses, and however.

`ringed` has rings of 8 + 8 slots in a context of 40, so early positions are overwritten soon.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax import context, speculation
from minfer_jax.context import EngineError
from minfer_jax.draft_model import DraftModel, check_same_vocabulary
from minfer_jax.engine import Engine
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.prompt_lookup import PromptLookup
from minfer_jax.speculation import Plan
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import N_CTX, short_engine

pytestmark = pytest.mark.usefixtures("shared_compiles")

LONG = [(7 * i * i + 3 * i + 11) % 96 for i in range(N_CTX)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 7, "repeat_penalty": 1.3}
ENGINES = ("ringed", "plain")
NAMES = ["prefill 8", "decode", "verify 2", "verify 8"]
CHECKS = (HealthCheck.function_scoped_fixture,)


class Script:
    """Guesses what it is told, and that it is surely right."""

    def __init__(self, text: Sequence[int], wrong: Sequence[int] = (), most: int = 7) -> None:
        """Follows a text that goes on as this one, but for guesses at these places."""
        self.text, self.wrong, self.most, self.n = list(text), set(wrong), most, 0

    def begin(self, tokens: Sequence[int]) -> None:
        self.n = len(tokens)

    def push(self, token: int) -> None:
        self.n += 1

    def chances(self, most: int) -> list[float]:
        return [100.0] * len(self.draft(most))  # never too dear, and the longest call is the best

    def draft(self, most: int) -> list[int]:
        places = range(self.n, min(self.n + most, len(self.text)))
        return [(self.text[i] + (i in self.wrong)) % 96 for i in places]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a fresh engine by its name."""
    data = {
        "ringed": tiny_models.tiny_model("gemma3", tied=False),
        "plain": tiny_models.tiny_model("llama", n_layer=2, n_ctx=64),
        "other": tiny_models.tiny_model("llama", n_layer=1, n_ctx=64, seed=3),
    }
    models = {n: tiny_models.load(tmp_path_factory.mktemp(n), d) for n, d in data.items()}

    def engine(name: str, n_ctx: int = N_CTX) -> Engine:
        return short_engine(models[name], n_ctx=n_ctx)

    return engine


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, make) -> Engine:
    return make(request.param)


@pytest.fixture(scope="module")
def plain(make) -> Engine:
    return make("plain")


@pytest.fixture
def always(monkeypatch):
    """Guesses are checked wherever there are some: nothing is too dear, nothing pauses."""
    monkeypatch.setattr(Plan, "MARGIN", 0.0)
    monkeypatch.setattr(Plan, "STAKE", 1e9)


def run(engine: Engine, ids, n: int, **options: Any) -> list[int]:
    return list(engine.generate_tokens(ids, n, **{**GREEDY, "reuse": False, **options}))


def names(engine: Engine) -> list[str]:
    return [program.name for program in engine.compiles]


# The same text


@settings(max_examples=25, deadline=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_the_text_is_that_of_plain_decoding(engine, always, data):
    """To its end, to that of the context, or up to where its consumer leaves it; and from there."""
    ids = LONG[: data.draw(st.integers(1, 36), label="prompt")]
    n = data.draw(st.integers(1, 45), label="max_tokens")
    options = data.draw(st.sampled_from([GREEDY, DRAWN, {**DRAWN, "seed": 8}]), label="sampling")
    options = {**options, "context_shift": data.draw(st.booleans(), label="shift")}
    expected = run(engine, ids, n, **options)
    if data.draw(st.booleans(), label="stops"):
        stop = data.draw(st.sampled_from(expected), label="stop")
        options["stop_ids"] = [stop]
        expected = expected[: expected.index(stop)]
    wrong = data.draw(st.lists(st.integers(0, 80)), label="wrong")
    script = Script([*ids, *expected, 1, 2, 3], wrong, data.draw(st.sampled_from((7, 1))))
    draft = data.draw(st.sampled_from([{"draft": script}, {"draft_ngram": True}]))
    taken = data.draw(st.integers(0, n), label="taken")
    tokens = list(itertools.islice(engine.generate_tokens(ids, n, **draft, **options), taken))
    assert tokens == expected[:taken]
    if taken:
        assert (engine.stats.n_generated, engine.tokens[-1:]) == (len(tokens), (ids + tokens)[-1:])
        more = draft if data.draw(st.booleans(), label="drafts again") else {}
        assert [*tokens, *engine.continue_tokens(n - taken, **more)] == expected


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_guesses_that_are_right_and_guesses_that_are_wrong(engine, always, options):
    expected = run(engine, LONG[:9], 24, **options)
    text = [*LONG[:9], *expected]
    right = run(engine, LONG[:9], 24, draft=Script(text), **options)
    stats = engine.stats
    assert right == expected
    # Of 24 one is drawn without a guess; 8 + 8 + 7 in three calls.
    assert (stats.n_drafted, stats.n_accepted, stats.acceptance) == (7 + 7 + 6, 20, 1.0)
    wrong = run(engine, LONG[:9], 24, draft=Script(text, range(80)), **options)
    stats = engine.stats
    assert wrong == expected
    assert (stats.n_accepted, stats.acceptance, stats.n_generated) == (0, 0.0, 24)
    assert stats.n_drafted >= 12 * 7
    run(engine, LONG[:9], 3, **options)
    assert (engine.stats.n_drafted, engine.stats.acceptance) == (0, 0.0)


def test_what_was_left_among_guesses_is_saved_and_reused(make, always, tmp_path):
    one, two = make("ringed"), make("ringed")
    expected = run(one, LONG[:9], 24)
    script = Script([*LONG[:9], *expected], wrong=(17, 25))
    for taken in range(1, 24, 2):
        list(itertools.islice(one.generate_tokens(LONG[:9], 24, draft=script, **GREEDY), taken))
        one.save_state(tmp_path / "state", "m")
        two.load_state(tmp_path / "state", "m")
        assert [*expected[:taken], *two.continue_tokens(24 - taken)] == expected
        assert two.stats.n_reused == 8 + taken
        other = [*LONG[:9], *expected[:taken], 95, 94]
        found = list(one.generate_tokens(other, 5, **GREEDY))
        assert one.stats.n_reused == 9 + taken - 1
        assert found == run(two, other, 5)


def test_no_finite_logits_are_told(make, always):
    """Where the model breaks among guesses that are right so far."""
    engine = make("plain")
    expected = run(engine, LONG[:9], 12)
    script = Script([*LONG[:9], *expected])
    tokens = engine.generate_tokens(LONG[:9], 12, draft=script, reuse=False, **GREEDY)
    first = next(tokens)
    compiled = engine._runner.programs._programs["verify 8"]

    def broken(*args):
        state, drawn = compiled(*args)
        return state, jnp.where(jnp.arange(8)[None] >= 3, -1, drawn)

    engine._runner.programs._programs["verify 8"] = broken
    with pytest.raises(EngineError, match="no finite logits at position 12"):
        list(tokens)
    assert first == expected[0]
    assert engine._runner.kv.state is None


def test_an_overtaken_run_says_so(plain, always):
    expected = run(plain, LONG[:9], 12)
    tokens = plain.generate_tokens(LONG[:9], 12, draft=Script([*LONG[:9], *expected]), **GREEDY)
    next(tokens)
    next(tokens)
    run(plain, LONG[:5], 2)
    with pytest.raises(EngineError, match="overtaken"):
        next(tokens)


# Compiles, and what is refused


def test_only_who_guesses_compiles_for_it_and_once(make):
    engine = make("plain")
    run(engine, LONG[:9], 3)
    assert names(engine) == NAMES[:2]
    run(engine, LONG[:9], 3, draft_ngram=True)
    assert names(engine) == NAMES
    assert engine.stats.compile_seconds > 0
    for options in (GREEDY, DRAWN, {"draft_ngram": 7}, {"stop_ids": [3]}):
        run(engine, LONG[:20], 15, **{"draft_ngram": True, **options})
        assert engine.stats.compile_seconds == 0
    assert names(engine) == NAMES
    run(engine, LONG[:9], 3, draft_ngram=1)
    run(engine, LONG[:9], 3, draft_ngram=4)
    run(engine, LONG[:9], 3, draft_ngram=15)  # more than the chunk, of 8, has room for
    assert names(engine) == [*NAMES, "verify 5"]


def test_a_context_with_no_room_for_guesses(make):
    engine = make("plain", n_ctx=1)
    assert run(engine, [5], 4, draft_ngram=True, context_shift=True) == run(
        engine, [5], 4, context_shift=True
    )
    assert names(engine) == ["decode"]


@pytest.mark.parametrize("most", [0, -1, 16, 2**70])
def test_a_number_of_guesses_that_is_refused(plain, most):
    said = f"the number of draft tokens is {most}, expected 1 to 15"
    for call in (
        lambda: plain.generate_tokens(LONG[:9], 3, draft_ngram=most),
        lambda: PromptLookup(most),
        lambda: DraftModel(plain, most),
    ):
        with pytest.raises(EngineError, match=said):
            call()
    with pytest.raises(EngineError, match="draft tokens is 'x', expected an integer"):
        plain.generate_tokens(LONG[:9], 3, draft_ngram="x")
    with pytest.raises(EngineError, match="both given"):
        plain.generate_tokens(LONG[:9], 3, draft_ngram=True, draft=PromptLookup())


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"logit_bias": {5: 2.0}}])
def test_the_extended_form_is_left_alone(make, always, options, caplog):
    engine = make("plain")
    expected = run(engine, LONG[:9], 12, **DRAWN, **options)
    script = Script([*LONG[:9], *expected])
    assert not caplog.messages
    assert run(engine, LONG[:9], 12, draft=script, **DRAWN, **options) == expected
    assert engine.stats.n_drafted == 0 and "nothing is guessed" in caplog.messages[0]
    assert names(engine) == ["prefill 8", "decode extended"]


# A draft model


def test_a_draft_model(make, always):
    engine, same, other = make("plain"), make("plain"), make("other")
    for options in (GREEDY, DRAWN):
        expected = run(engine, LONG[:9], 31, **options)
        for drafts, most in ((same, 4), (other, 4), (other, 7)):
            assert run(engine, LONG[:9], 31, draft=DraftModel(drafts, most), **options) == expected
            assert engine.stats.n_drafted > 0
    run(engine, LONG[:9], 31, draft=DraftModel(same))
    assert engine.stats.acceptance == 1.0
    assert names(same) == NAMES[:2], "it draws; what little it must catch up with goes there too"


def test_a_draft_model_with_a_shorter_context(make, always):
    engine, small = make("plain"), make("other", n_ctx=16)
    expected = run(engine, LONG[:9], 31)
    assert run(engine, LONG[:9], 31, draft=DraftModel(small)) == expected
    drafted = engine.stats.n_drafted
    assert drafted > 0
    assert run(engine, LONG[:20], 10, draft=DraftModel(small)) == run(engine, LONG[:20], 10)
    draft = DraftModel(small)
    draft.begin([1, 96])  # a token that it does not know
    assert draft.chances(4) == []


def test_a_draft_model_that_fails_is_left_alone(make, always, caplog):
    engine, broken = make("plain"), make("other")
    expected = run(engine, LONG[:9], 31)
    broken.params = jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if a.dtype == jnp.float32 else a, broken.params
    )
    assert run(engine, LONG[:9], 31, draft=DraftModel(broken)) == expected
    assert engine.stats.n_drafted == 0
    assert caplog.text.count("the draft model is left alone: the model gave no finite") == 1


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    def model(name: str, **options: Any) -> LanguageModel:
        tiny_models.save(tmp_path, tiny_models.tiny_text_model(**options), name)
        return load(tmp_path / name, n_ctx=32)

    one, two = model("a.gguf", n_layer=1), model("b.gguf", n_layer=1, seed=2)
    draft = one.drafter(two, 3)
    text = one.generate("hello", max_tokens=8, temperature=0.0)
    assert one.generate("hello", max_tokens=8, temperature=0.0, draft=draft) == text
    with pytest.raises(EngineError, match="cannot draft for itself"):
        one.drafter(one)
    tokens = list(two._known_tokenizer().vocab.tokens)
    check_same_vocabulary(tokens, [*tokens, *map(str, range(128))])
    with pytest.raises(EngineError, match=rf"{len(tokens) + 129} tokens, expected {len(tokens)}$"):
        check_same_vocabulary(tokens, [*tokens, *map(str, range(129))])
    with pytest.raises(EngineError, match=r"its token 1 is 'x', expected '<\|im_start\|>'$"):
        check_same_vocabulary(tokens, [tokens[0], "x", *tokens[2:]])


# When guesses are checked


class World:
    """A text being drawn where a token takes 1 second, and a call with guesses `call` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafter: Any, call: dict[int, float]):
        self.now, self.call, self.checks = 0.0, call, 0
        monkeypatch.setattr(speculation.time, "perf_counter", lambda: self.now)
        self.plan, self.drafter = Plan(drafter, 8), drafter

    def draw(self, text: Sequence[int], n_prompt: int) -> float:
        """Seconds that the text took after its prompt."""
        begin, at = self.now, n_prompt
        self.plan.begin(text[:at])
        while at < len(text):
            guesses, size = self.plan.draft(len(text) - at - 1), 0
            n = min(self.plan.stretch, len(text) - at)
            if guesses:
                size = self.plan.size(len(guesses))
                n = 1 + context.common_prefix(guesses, text[at : at + len(guesses)])
            self.checks += bool(size)
            self.now += self.call[size] if size else n
            self.plan.drew(text[at : at + n], size)
            at += n
        return self.now - begin


CHEAP = {2: 1.2, 8: 3.0}


def text_of(n: int) -> list[int]:
    """Tokens that hardly repeat themselves."""
    return [(i * i * 7 + 13 * i) % 9973 for i in range(n)]


def test_a_text_that_repeats_its_prompt_comes_faster(monkeypatch):
    text = text_of(300)
    world = World(monkeypatch, PromptLookup(), CHEAP)
    assert world.draw([*text, 1, 2, *text[50:250]], 302) < 200 / 2.2


def test_a_text_that_repeats_nothing_costs_nothing(monkeypatch):
    world = World(monkeypatch, PromptLookup(), CHEAP)
    assert world.draw(text_of(2000), 200) == 1800
    assert world.checks == 0


def test_guesses_that_are_always_wrong_pause_for_longer_and_longer(monkeypatch):
    text = text_of(3000)
    world = World(monkeypatch, Script(text, range(3000)), CHEAP)
    lost = [world.draw(text[: n + 500], n) - 500 for n in range(100, 2600, 500)]
    assert lost[0] < 0.06 * 500
    assert lost[-1] < 0.02 * 500
    assert world.checks > 0


def test_calls_that_are_dear_are_not_made_for_long(monkeypatch):
    """Although every guess is right; and once they are cheap, they are found out."""
    text = text_of(8000)
    world = World(monkeypatch, PromptLookup(), {2: 3.0, 8: 12.0})
    again = [*text[:3000], *text[:2000]]
    assert world.draw(again, 3000) < 1.05 * 2000
    world.call = CHEAP
    assert world.draw([*text[:3000], *text[:2900]], 3000) < 2900 / 1.5


def test_one_slow_call_is_no_reason_to_stop(monkeypatch):
    text = text_of(500)
    world = World(monkeypatch, PromptLookup(), dict(CHEAP))
    world.draw([*text, *text[:60]], 500)
    world.call[8] = 100.0
    before = world.checks
    world.draw([*text, *text[:10]], 500)
    world.call[8] = CHEAP[8]
    assert world.draw([*text, *text[:400]], 500) < 400 / 1.4
    assert world.checks > before


# Prompt lookup


def test_lookup_follows_the_latest_place():
    lookup = PromptLookup()
    lookup.begin([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2])
    assert lookup.draft(3) == [3, 5, 6]
    chances = lookup.chances(3)
    assert chances == sorted(chances, reverse=True) and 0 < chances[-1] < chances[0] < 1
    lookup.push(3)
    assert lookup.draft(2) == [5, 6]
    assert lookup.chances(1)[0] > chances[0], "it has been right once"
    lookup.push(4)  # not what was guessed, but 2 3 4 was there as well
    assert lookup.draft(2) == [9, 1]
    lookup.push(50)
    assert (lookup.draft(2), lookup.chances(2)) == ([], [])


def test_lookup_prefers_the_longer_gram():
    lookup = PromptLookup()
    lookup.begin([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2])
    assert lookup.draft(2) == [3, 8]


def test_lookup_goes_round_in_circles():
    lookup = PromptLookup()
    lookup.begin([1, 2, 3, 1, 2, 3])
    assert lookup.draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_lookup_learns_how_far_to_trust():
    lookup = PromptLookup()
    trusted = []
    for i in range(300):  # what follows 1 2 is never what did before
        lookup.push(1)
        lookup.push(2)
        trusted += lookup.chances(1)
        lookup.push(5 + i)
    assert trusted[0] == 0.3 and trusted[-1] < 0.05
    lookup.begin([1, 2, 5, 1, 2])
    assert lookup.chances(1) == [0.3], "another text is learned anew"
