"""The engine's extended form of decode: one program for every step, order, bias and mask, and runs
that can be left, saved and gone on with as before.

The model has rings of 8 + 8 slots in a context of 40, so early positions are overwritten soon.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.run_options import Drawn
from minfer_jax.sampling.args import packed
from minfer_jax.state_file import StateError
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import N_CTX, short_engine
from tests.test_session import forged, put

pytestmark = pytest.mark.usefixtures("shared_compiles")

VOCAB = 96
LONG = [(7 * i * i + 3 * i + 11) % VOCAB for i in range(N_CTX)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 7, "repeat_penalty": 1.3}
BREAKERS = packed(np.arange(VOCAB) % 10 == 0)
# Each makes the extended form necessary, and another order of steps.
EXTENDED: dict[str, dict[str, Any]] = {
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 1.2, "seed": 3},
    "dry": {"dry_multiplier": 0.8, "dry_breakers": BREAKERS, "penalty_last_n": -1, **DRAWN},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05, "typical_p": 0.9, "seed": 2**64 - 1},
    "order": {"samplers": ("temperature", "top_p", "top_k"), "top_p": 0.8, "temperature": 1.7},
    "bias": {"logit_bias": {3: 4.0, 5: -math.inf, 80: np.float32(2)}, **DRAWN},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    data = tiny_models.tiny_model("gemma3", tied=False)
    return tiny_models.load(tmp_path_factory.mktemp("ringed"), data)


@pytest.fixture(scope="module")
def make(model):
    def engine(**options: Any) -> Engine:
        return short_engine(model, **options)

    return engine


@pytest.fixture(scope="module")
def engine(make):
    return make()


def run(engine: Engine, ids, n: int, **options: Any) -> list[int]:
    return list(engine.generate_tokens(ids, n, **options))


class Sets:
    """A constraint by hand: each set is what may come next."""

    def __init__(self, *sets: set[int]) -> None:
        self.sets = list(sets)

    def mask(self) -> np.ndarray:
        return packed(np.isin(np.arange(VOCAB), list(self.sets[0])))

    def accept(self, token: int) -> None:
        assert token in self.sets.pop(0)

    @property
    def finished(self) -> bool:
        return not self.sets

    def copy(self) -> "Sets":
        return Sets(*self.sets)


# Compiles


def test_all_requests_share_one_program(make):
    engine = make()
    run(engine, LONG[:9], 4, **GREEDY)
    fast = ["prefill 8", "decode"]
    assert [c.name for c in engine.compiles] == fast
    told: list[Drawn] = []
    for options in EXTENDED.values():
        run(engine, LONG[:9], 6, **options)
    run(engine, LONG[:9], 4, on_drawn=told.append, n_logprobs=5)
    run(engine, LONG[:9], 4, constraint=Sets({1, 2}, {3}, {4, 5}), **DRAWN)
    run(engine, LONG[:9], 4, samplers=("min_p", "penalties"), dynatemp_range=0.5)
    list(engine.continue_tokens(3))
    assert [c.name for c in engine.compiles] == [*fast, "decode extended"]
    assert engine.stats.compile_seconds == 0.0


def test_the_fast_form_is_enough_for_the_usual_steps(make):
    engine = make()
    run(engine, LONG[:9], 4, **DRAWN)
    run(engine, LONG[:9], 4, logit_bias={}, on_drawn=None, presence_penalty=0.3)
    assert [c.name for c in engine.compiles] == ["prefill 8", "decode"]


@pytest.mark.parametrize("options", [GREEDY, DRAWN, {"top_p": 0.5, "min_p": 0.2, "seed": 5}])
def test_to_ask_for_logprobs_changes_no_token(engine, options):
    tokens = run(engine, LONG[:9], 24, **options)
    drawn = list(engine.generate_with_logprobs(LONG[:9], 24, **options))
    assert [d.token for d in drawn] == tokens


# What is said of tokens


def test_logprobs_are_those_of_the_logits(engine):
    drawn = list(engine.generate_with_logprobs(LONG[:9], 12, n_logprobs=20, **DRAWN))
    logits = engine.logits([*LONG[:9], *(d.token for d in drawn)])[8:-1]
    logp = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for row, d in zip(logp, drawn, strict=True):
        np.testing.assert_allclose(d.logprob, row[d.token], atol=2e-4)
        best = np.argsort(-row)[:20]
        np.testing.assert_allclose([p for _, p in d.top], row[best], atol=2e-4)
        np.testing.assert_allclose([row[i] for i, _ in d.top], row[best], atol=2e-4)
    assert len({d.token == d.top[0][0] for d in drawn}) == 2, "some are not the likeliest"


@pytest.mark.parametrize("n", [0, 1, 20])
def test_as_many_of_the_likeliest_as_are_asked_for(engine, n):
    told: list[Drawn] = []
    for token in engine.generate_tokens(LONG[:9], 5, n_logprobs=n, on_drawn=told.append):
        assert told[-1].token == token, "told before it is yielded"
        assert len(told[-1].top) == n
    assert len(told) == 5


@pytest.mark.parametrize("n", [-1, 21])
def test_too_many_logprobs(engine, n):
    with pytest.raises(EngineError, match=f"n_logprobs is {n}, expected 0 to 20"):
        engine.generate_tokens(LONG[:9], 5, n_logprobs=n, on_drawn=print)


def test_logprobs_that_nobody_is_told(engine):
    with pytest.raises(EngineError, match="n_logprobs is 3, but nobody is told: give on_drawn"):
        engine.generate_tokens(LONG[:9], 5, n_logprobs=3)


def test_a_bias_moves_and_forbids(engine):
    plain = run(engine, LONG[:9], 12, **GREEDY)
    without = run(engine, LONG[:9], 12, logit_bias={plain[0]: -math.inf}, **GREEDY)
    assert plain[0] not in without
    second = np.argsort(-engine.logits(LONG[:9])[-1])[1]
    assert without[0] == second
    assert run(engine, LONG[:9], 3, logit_bias={95: 1e30}, **GREEDY) == [95] * 3
    assert run(engine, LONG[:9], 3, logit_bias={np.int64(95): 1e30, 2: -1}, **DRAWN) == [95] * 3


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({96: 1.0}, "token 96, which is outside the vocabulary of 96"),
        ({-1: 1.0}, "token -1, which is outside"),
        ({"5": 1.0}, "a token of logit_bias is '5', expected an integer"),
        ({5: math.nan}, "of token 5 is nan, expected a number, or -inf"),
        ({5: math.inf}, "of token 5 is inf"),
        ({5: 1e39}, "of token 5 is 1e"),
        ({5: "x"}, "of token 5 is 'x'"),
        ({5: None}, "of token 5 is None"),
    ],
)
def test_a_bad_bias_is_refused_at_once(engine, bias, message):
    with pytest.raises(EngineError, match=message):
        engine.generate_tokens(LONG[:9], 1, logit_bias=bias)


def test_bad_breakers_are_refused_at_once(engine):
    for wrong in (BREAKERS[:2], BREAKERS.astype(np.int64)):
        with pytest.raises(EngineError, match=r"expected uint32 \[3\], a bit for each token"):
            engine.generate_tokens(LONG[:9], 1, dry_breakers=wrong)


def test_no_token_is_left(engine):
    forbidden = dict.fromkeys(range(VOCAB), -math.inf)
    message = "no finite logits at position 8, or logit_bias and the constraint leave no token"
    with pytest.raises(EngineError, match=message):
        run(engine, LONG[:9], 3, logit_bias=forbidden)
    with pytest.raises(EngineError, match=message):
        run(engine, LONG[:9], 3, logit_bias={7: -math.inf}, constraint=Sets({7}))
    assert len(run(engine, LONG[:9], 3)) == 3, "and the engine is well"


def test_no_finite_logits(model, make):
    _, params = model
    norm = dataclasses.replace(params.output_norm, weight=params.output_norm.weight * jnp.nan)
    engine = make()
    engine.params = dataclasses.replace(params, output_norm=norm)
    with pytest.raises(EngineError, match=r"no finite logits at position 8$"):
        run(engine, LONG[:9], 3, mirostat=2)


@pytest.mark.parametrize("options", [{"temperature": 100.0, "top_k": 0}, EXTENDED["mirostat"]])
def test_padding_of_the_vocabulary_is_never_drawn(make, options):
    engine = make(n_known=5)
    tokens = run(engine, LONG[:9], 30, **options)
    assert max(tokens) < 5
    assert run(engine, LONG[:9], 3, logit_bias={50: 1e9}, **GREEDY)[0] < 5
    with pytest.raises(EngineError, match="n_known is 0, expected at least 1"):
        make(n_known=0)


# Constraints, as the engine sees them


def test_only_what_the_mask_allows_is_drawn(engine):
    sets = [{1, 31}, {32}, {63, 64}, {95}]
    for options in (GREEDY, DRAWN, EXTENDED["mirostat"]):
        tokens = run(engine, LONG[:9], 10, constraint=Sets(*sets), **options)
        assert all(t in s for t, s in zip(tokens, sets, strict=True))
        assert (engine.stats.n_generated, engine.stats.finish_reason) == (4, "stop")
    best = engine.logits(LONG[:9])[-1]
    assert run(engine, LONG[:9], 1, constraint=Sets({1, 31}), **GREEDY) == [
        1 if best[1] > best[31] else 31
    ]


def test_where_a_constrained_run_ends(engine):
    sets = [{5, 6}] * 4
    assert run(engine, LONG[:9], 10, constraint=Sets()) == []
    assert engine.stats.finish_reason == "stop"
    assert len(run(engine, LONG[:9], 4, constraint=Sets(*sets))) == 4
    assert engine.stats.finish_reason == "stop", "it is complete, though no token was left to draw"
    assert len(run(engine, LONG[:9], 3, constraint=Sets(*sets))) == 3
    assert engine.stats.finish_reason == "length"
    ended = run(engine, LONG[:9], 9, constraint=Sets({5}, {6}, {7}), stop_ids=[6])
    assert (ended, engine.stats.finish_reason) == ([5], "stop")


def test_a_constraint_that_fails_ends_the_run(engine):
    class Lost(Sets):
        def mask(self) -> np.ndarray:
            if len(self.sets) == 1:
                raise ValueError("nothing fits")
            return super().mask()

    tokens = []
    with pytest.raises(ValueError, match="nothing fits"):
        for token in engine.generate_tokens(LONG[:9], 9, constraint=Lost({5}, {6}, {7})):
            tokens.append(token)
    assert tokens == [5, 6]
    assert engine.tokens == [*LONG[:9], 5, 6]
    assert len(run(engine, LONG[:9], 3)) == 3, "and the engine is well"


def test_a_constrained_run_goes_on_as_it_would_have(engine):
    sets = [{i, i + 1, i + 2, i + 3} for i in range(0, 48, 2)]
    whole = run(engine, LONG[:9], 24, constraint=Sets(*sets), **DRAWN)
    for cut in (1, 7, 23):
        part = run(engine, LONG[:9], cut, constraint=Sets(*sets), **DRAWN)
        assert [*part, *engine.continue_tokens(24 - cut)] == whole
        tokens = engine.generate_tokens(LONG[:9], 24, constraint=Sets(*sets), **DRAWN)
        left = list(itertools.islice(tokens, cut))
        snapshot = engine.snapshot()
        for _ in range(2):
            assert [*left, *engine.continue_tokens(24 - cut)] == whole
            engine.restore(snapshot)


def test_a_constrained_run_is_saved_but_not_to_be_continued(engine, tmp_path):
    """Its text is there for the next prompt to begin with."""
    tokens = run(engine, LONG[:9], 3, constraint=Sets(*[{5, 6}] * 4))
    engine.save_state(tmp_path / "state", "m")
    engine.load_state(tmp_path / "state", "m")
    with pytest.raises(EngineError, match="had a constraint, which a file does not hold"):
        engine.continue_tokens(1)
    run(engine, [*LONG[:9], *tokens, 1], 1)
    assert engine.stats.n_reused == 11


# Going on


@pytest.mark.parametrize("name", EXTENDED)
def test_a_run_goes_on_as_it_would_have(engine, tmp_path, name):
    """Left at any token, or saved there: mirostat's bound and DRY's window are as they were."""
    options = EXTENDED[name]
    whole = run(engine, LONG[:9], 24, **options)
    assert len(set(whole)) > 4
    for taken in range(1, 20, 3):
        left = list(itertools.islice(engine.generate_tokens(LONG[:9], 24, **options), taken))
        engine.save_state(tmp_path / "state", "m")
        assert [*left, *engine.continue_tokens(24 - taken)] == whole
        engine.load_state(tmp_path / "state", "m")
        assert [*left, *engine.continue_tokens(24 - taken)] == whole


def test_a_shifted_run_goes_on_as_it_would_have(engine):
    options = {**EXTENDED["dry"], "context_shift": True, "presence_penalty": 0.2}
    whole = run(engine, LONG[:12], 80, **options)
    assert len(whole) == 80
    for cut in (28, 29, 50):
        part = run(engine, LONG[:12], cut, **options)
        assert [*part, *engine.continue_tokens(80 - cut)] == whole


def test_the_window_is_longer_than_the_fast_one_s(engine):
    """With a presence penalty on all of the text, no token comes twice in 80."""
    options = {"presence_penalty": 1e6, "penalty_last_n": -1, "context_shift": True, **GREEDY}
    tokens = run(engine, LONG[:9], 40, **options)
    tokens += engine.continue_tokens(40)
    assert len({*LONG[:9], *tokens}) == len(set(LONG[:9])) + 80
    tokens = run(engine, LONG[:9], 80, **{**options, "penalty_last_n": 64})
    assert len(set(tokens)) < 80


# Files


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state"
    run(engine, LONG[:9], 12, **{**EXTENDED["dry"], **EXTENDED["bias"], **EXTENDED["mirostat"]})
    engine.save_state(path, "m")
    return path.read_bytes()


def test_a_file_of_an_earlier_version_is_read(engine, saved, tmp_path):
    run(engine, LONG[:9], 12, **DRAWN)
    path = tmp_path / "state"
    engine.save_state(path, "m")
    expected = list(engine.continue_tokens(5))

    def older(value: Any) -> None:
        for name in ("mu", "constrained", "extras"):
            del value["header"][name]
        value["header"]["sampling"] = {
            name: value["header"]["sampling"][name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
        }

    path.write_bytes(forged(path.read_bytes(), older))
    engine.load_state(path, "m")
    assert list(engine.continue_tokens(5)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("header", "mu", "x"), "mu is 'x', expected a number"),
        (put("header", "mu", float("nan")), "mu is nan"),
        (put("header", "constrained", 1), "constrained is neither"),
        (put("header", "extras", ["breakers"]), "its keys and values are"),
        (put("header", "extras", ["bias_values"]), "extras is"),
        (put("header", "extras", 7), "extras is 7"),
        (put("header", "extras", [[]]), "extras is"),
        (put("header", "extras", []), "its keys and values are"),
        (put("arrays", 3, ["float32", [3]]), "bias_ids is float32"),
        (put("arrays", 4, ["int32", [3]]), "bias_values is int32"),
        (put("header", "sampling", "samplers", ["x"]), "its sampling values"),
        (put("header", "sampling", "samplers", 3), "its sampling values"),
    ],
)
def test_forged_headers(engine, saved, tmp_path, change, message):
    path = tmp_path / "state"
    path.write_bytes(forged(saved, change))
    with pytest.raises(StateError, match=message) as caught:
        engine.load_state(path, "m")
    assert str(caught.value).isprintable()


def test_what_a_call_gives_is_small(engine):
    """Its details are copied to the host for each."""
    run(engine, LONG[:9], 2, mirostat=2)
    program = engine._runner.programs._programs["decode extended"]
    kv = len(jax.tree.leaves(engine._runner.kv.shape))
    sizes = [a.size for a in jax.tree.leaves(program.out_info)[kv:]]
    assert max(sizes) <= 1024
