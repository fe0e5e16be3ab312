"""The engine: what it compiles and when, where runs end, and that neither padding, nor chunks, nor
other runs show in what comes out.

`ringed` has sliding layers, whose rings of 8 + 8 slots are shorter than its context of 40, and
buckets of 4 and 8 tokens. `plain` has none of either, and the buckets that are shipped.
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax import context
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.model import kv_state as kv
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import dense
from tests.helpers.tiny_engines import N_CTX, short_engine

pytestmark = pytest.mark.usefixtures("shared_compiles")

PROMPT = [5, 17, 3, 80, 80, 2, 61, 9, 33, 12]
LONG = [(7 * i * i + 3 * i + 11) % 96 for i in range(N_CTX)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "seed": 7}


def plain_engine(model, n_ctx: int = 64) -> Engine:
    cfg, params = model
    return Engine(params, cfg, n_ctx=n_ctx)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    data = tiny_models.tiny_model("gemma3", tied=False)
    return tiny_models.load(tmp_path_factory.mktemp("sliding"), data)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    data = tiny_models.tiny_model("llama", n_layer=2, n_ctx=64)
    return tiny_models.load(tmp_path_factory.mktemp("small"), data)


@pytest.fixture(scope="module")
def ringed(sliding):
    return short_engine(sliding)


@pytest.fixture(scope="module")
def plain(small):
    return plain_engine(small)


@pytest.fixture
def backend_compiles():
    """Names of the programs that jax compiles, or fetches from its cache, from here on."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def names(engine: Engine) -> list[str]:
    return [program.name for program in engine.compiles]


# Compiles


def test_a_run_compiles_two_programs_and_a_second_none(small, backend_compiles):
    engine = plain_engine(small)
    assert not engine.compiles
    begin = time.perf_counter()
    first = list(engine.generate_tokens(PROMPT, 5, **GREEDY))
    wall = time.perf_counter() - begin
    assert names(engine) == ["prefill 32", "decode"]
    # Beside them only what fills the empty KV state.
    fill = {"jit(init)"}
    assert [n for n in backend_compiles if n not in fill] == ["jit(prefill)", "jit(decode)"]
    assert len(backend_compiles) <= 8

    stats = engine.stats
    assert (stats.n_prompt, stats.n_generated, stats.finish_reason) == (10, 5, "length")
    assert stats.compile_seconds == pytest.approx(engine.compile_seconds)
    assert engine.compile_seconds == sum(program.seconds for program in engine.compiles)
    assert 0 < stats.prefill_seconds + stats.decode_seconds < wall - stats.compile_seconds

    backend_compiles.clear()
    runs: tuple[tuple[list[int], dict[str, Any]], ...] = (
        (PROMPT, GREEDY),
        ([1], GREEDY),
        (PROMPT[:7], DRAWN),
        (PROMPT[:7], {"temperature": 0.3, "top_k": 0, "seed": 2**63}),
        (PROMPT * 3, {"top_p": 0.5, "min_p": 0.2}),
        (PROMPT, {"repeat_penalty": 1.3, "frequency_penalty": 0.1, "presence_penalty": 0.2}),
        (PROMPT, {"stop_ids": [3, 4]}),
        (PROMPT, {"top_p": 1.0, "min_p": 0.0, "temperature": 100.0, "top_k": 10**12}),
    )
    for prompt, options in runs:
        list(engine.generate_tokens(prompt, 9, **options))
        assert engine.stats.compile_seconds == 0.0
    assert backend_compiles == []
    assert len(engine.compiles) == 2
    assert list(engine.generate_tokens(PROMPT, 5, **GREEDY)) == first


def test_a_prompt_takes_the_smallest_bucket_that_holds_it(sliding):
    """All of it but the last token, which goes through decode."""
    engine = short_engine(sliding)
    expected = ["prefill 4", "decode"]
    for n, more in ((5, []), (2, []), (6, ["prefill 8"]), (9, []), (10, []), (N_CTX, [])):
        list(engine.generate_tokens(LONG[:n], 1, reuse=False))
        expected += more
        assert names(engine) == expected


@pytest.mark.parametrize(
    ("n_ctx", "buckets"), [(1, (1,)), (4, (4,)), (5, (4, 5)), (8, (4, 8)), (9, (4, 8))]
)
def test_no_bucket_is_longer_than_the_context(sliding, n_ctx, buckets):
    assert short_engine(sliding, n_ctx=n_ctx)._runner.buckets == buckets


def test_a_prompt_of_one_token_needs_no_prefill_program(small):
    engine = plain_engine(small)
    tokens = list(engine.generate_tokens([5], 3, **GREEDY))
    assert names(engine) == ["decode"]
    assert engine.logits([5, *tokens], chunk=1).argmax(-1).tolist()[:3] == tokens
    assert names(engine) == ["decode"]


def test_logits_and_generation_share_the_decode_program(plain, backend_compiles):
    list(plain.generate_tokens(PROMPT, 2))
    plain.logits(PROMPT)
    backend_compiles.clear()
    plain.logits(PROMPT, chunk=1)
    plain.logits(PROMPT[:3])
    assert backend_compiles == []
    assert names(plain) == ["prefill 32", "decode", "logits 32"]


def test_kv_bytes_is_known_before_and_true_afterwards(sliding, ringed):
    list(ringed.generate_tokens(PROMPT, 2))
    n_bytes = sum(array.nbytes for array in jax.tree.leaves(ringed._runner.kv.state))
    assert short_engine(sliding).kv_bytes == ringed.kv_bytes == n_bytes


# Where a run ends


def test_n_ctx_is_bounded_by_the_model(small):
    assert plain_engine(small, 10**9).n_ctx == 64
    assert plain_engine(small, 63).n_ctx == 63
    for wrong in (0, -1):
        with pytest.raises(EngineError, match=f"n_ctx is {wrong}, expected at least 1"):
            plain_engine(small, wrong)


@pytest.mark.parametrize(("n_prompt", "n_tokens"), [(N_CTX, 1), (N_CTX - 1, 2), (N_CTX - 5, 6)])
def test_the_context_ends_a_run(ringed, n_prompt, n_tokens):
    """Every position is used, and the last one's token is still drawn."""
    tokens = list(ringed.generate_tokens(LONG[:n_prompt], 100, **GREEDY))
    assert len(tokens) == ringed.stats.n_generated == n_tokens
    assert ringed.stats.finish_reason == "length"
    rows = ringed.logits([*LONG[:n_prompt], *tokens[:-1]])
    assert rows[n_prompt - 1 :].argmax(-1).tolist() == tokens


def test_a_prompt_that_does_not_fit(ringed, small):
    with pytest.raises(EngineError) as caught:
        ringed.generate_tokens([*LONG, 1], 1)
    assert "41 tokens" in str(caught.value)
    assert "holds 40" in str(caught.value)
    assert "raise n_ctx" in str(caught.value)
    assert "256" in str(caught.value), "what the model allows"
    with pytest.raises(EngineError, match=r"65 tokens, but the context holds 64: shorten it$"):
        plain_engine(small).logits([0] * 65)


def test_a_context_of_one(small):
    engine = plain_engine(small, 1)
    tokens = list(engine.generate_tokens([5], 9, **GREEDY))
    assert tokens == engine.logits([5]).argmax(-1).tolist()
    assert (engine.stats.n_generated, engine.stats.finish_reason) == (1, "length")


def test_max_tokens(ringed):
    assert list(ringed.generate_tokens(PROMPT, 0)) == []
    assert (ringed.stats.n_prompt, ringed.stats.n_generated) == (10, 0)
    tokens = list(ringed.generate_tokens(PROMPT, 6, **GREEDY))
    for n in (1, 2, 5):
        assert list(ringed.generate_tokens(PROMPT, n, **GREEDY)) == tokens[:n]
        assert (ringed.stats.n_generated, ringed.stats.finish_reason) == (n, "length")
    with pytest.raises(EngineError, match="max_tokens is -1, expected at least 0"):
        ringed.generate_tokens(PROMPT, -1)


def test_stop_ids_end_a_run_and_are_not_yielded(ringed):
    tokens = list(ringed.generate_tokens(PROMPT, 8, **GREEDY))
    for stop in dict.fromkeys(tokens):
        n = tokens.index(stop)
        for ids in ([stop], frozenset({stop, 10**6})):
            assert list(ringed.generate_tokens(PROMPT, 8, stop_ids=ids, **GREEDY)) == tokens[:n]
            assert (ringed.stats.n_generated, ringed.stats.finish_reason) == (n, "stop")
    unused = next(i for i in range(96) if i not in tokens)
    assert list(ringed.generate_tokens(PROMPT, 8, stop_ids=[unused], **GREEDY)) == tokens


# Refusals


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt holds no tokens"),
        ([3, -1], "token id -1 is outside the vocabulary of 96"),
        ([96], "token id 96 is outside"),
        ([2**63], f"token id {2**63} is outside"),
        ([2**70], "expected a list of integers"),
        ([1.0, 2.0], r"float64 \[2\], expected a list of integers"),
        ([True, False], r"bool \[2\]"),
        ([[1, 2]], r"int64 \[1, 2\]"),
        ([[1], [2, 3]], "expected a list of integers"),
        (["1"], "expected a list of integers"),
        ("12", "expected a list of integers"),
        ([None], "expected a list of integers"),
        (None, "expected a list of integers"),
        (7, r"int64 \[\]"),
    ],
)
def test_bad_ids_are_refused_in_one_line_before_anything_runs(small, ids, message):
    engine = plain_engine(small)
    for call in (engine.generate_tokens, engine.logits):
        with pytest.raises(EngineError, match=message) as caught:
            call(ids)
        assert str(caught.value).isprintable()
    assert not engine.compiles


@pytest.mark.parametrize(
    "ids", [tuple(PROMPT), np.array(PROMPT), np.array(PROMPT, np.uint8), jnp.array(PROMPT)]
)
def test_any_integers_are_ids(ringed, ids):
    expected = list(ringed.generate_tokens(PROMPT, 3, **GREEDY))
    assert list(ringed.generate_tokens(ids, 3, **GREEDY)) == expected


@pytest.mark.parametrize("chunk", [0, -1, 9])
def test_a_chunk_that_no_program_has(ringed, chunk):
    with pytest.raises(EngineError, match=f"chunk is {chunk}, expected 1 to 8"):
        ringed.logits(PROMPT, chunk=chunk)


@pytest.mark.parametrize("wrong", [1.5, float("nan"), float("inf"), "3", None])
def test_what_is_no_integer_is_refused_at_once(ringed, small, wrong):
    """Not after some tokens, where it is first used."""
    shown = f"is {wrong!r}, expected an integer"
    for name in ("max_tokens", "n_keep"):
        with pytest.raises(EngineError, match=f"{name} {shown}"):
            ringed.generate_tokens(PROMPT, **{name: wrong})
    with pytest.raises(EngineError, match=f"a stop id {shown}"):
        ringed.generate_tokens(PROMPT, 1, stop_ids=[3, wrong])
    for name in ("n_ctx", "prefill_chunk"):
        with pytest.raises(EngineError, match=f"{name} {shown}"):
            Engine(*reversed(small), **{name: wrong})
    if wrong is not None:
        with pytest.raises(EngineError, match=f"chunk {shown}"):
            ringed.logits(PROMPT, chunk=wrong)


def test_sampling_values_are_checked_at_once(ringed):
    with pytest.raises(ValueError, match="temperature must be >= 0"):
        ringed.generate_tokens(PROMPT, 1, temperature=-1.0)
    with pytest.raises(TypeError, match="temprature"):
        ringed.generate_tokens(PROMPT, 1, temprature=1.0)


def test_no_finite_logits(sliding, ringed):
    cfg, params = sliding
    norm = dataclasses.replace(params.output_norm, weight=params.output_norm.weight * jnp.nan)
    broken = dataclasses.replace(params, output_norm=norm)
    engine = short_engine((cfg, broken))
    with pytest.raises(EngineError, match=r"no finite logits at position 9$"):
        list(engine.generate_tokens(PROMPT, 3))


# What comes out


def test_logits_are_those_of_the_pure_function(sliding, ringed):
    cfg, params = sliding
    n = len(PROMPT)
    ids, positions = jnp.array([PROMPT]), jnp.arange(n, dtype=jnp.int32)[None]
    state = kv.init(cfg, n, chunk=n)
    expected, _ = tiny_models.run(params, ids, positions, state, cfg=cfg, n_out=n)
    logits = ringed.logits(PROMPT)
    assert (logits.dtype, logits.shape) == (np.float32, (n, cfg.n_vocab))
    np.testing.assert_allclose(logits, expected[0], atol=2e-5)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 16, 17, 33, N_CTX])
def test_neither_padding_nor_chunks_show(ringed, n):
    """Token by token there is no padding; lengths around the buckets, the rings and beyond."""
    single = ringed.logits(LONG[:n], chunk=1)
    for chunk in (None, 3, 7, 8):
        np.testing.assert_allclose(ringed.logits(LONG[:n], chunk=chunk), single, atol=2e-5)
    (token,) = ringed.generate_tokens(LONG[:n], 1, **GREEDY)
    assert token == single[-1].argmax()


def test_greedy_tokens_are_the_largest_logits(ringed):
    tokens = list(ringed.generate_tokens(PROMPT, 30, **GREEDY))
    assert len(tokens) == 30
    rows = ringed.logits([*PROMPT, *tokens])
    assert rows[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


def test_penalties_are_off_unless_given(ringed):
    greedy = list(ringed.generate_tokens(PROMPT, 30, **GREEDY))
    assert list(ringed.generate_tokens(PROMPT, 30, repeat_penalty=1.0, **GREEDY)) == greedy
    assert list(ringed.generate_tokens(PROMPT, 30, repeat_penalty=1.5, **GREEDY)) != greedy
    distinct = list(ringed.generate_tokens(PROMPT, 30, presence_penalty=1e6, **GREEDY))
    assert len(set(PROMPT) | set(distinct)) == len(set(PROMPT)) + 30


def test_the_same_seed_draws_the_same(sliding, ringed):
    drawn = list(ringed.generate_tokens(PROMPT, 12, **DRAWN))
    assert list(ringed.generate_tokens(PROMPT, 12, **DRAWN)) == drawn
    assert list(short_engine(sliding).generate_tokens(PROMPT, 12, **DRAWN)) == drawn
    others = [list(ringed.generate_tokens(PROMPT, 12, **DRAWN | {"seed": s})) for s in range(3)]
    assert len({tuple(tokens) for tokens in (drawn, *others)}) == 4


def test_a_prompt_of_several_chunks_draws_once(sliding, ringed):
    """The seed's first draw is the first token's, however many prefills went before."""
    (once,) = ringed.generate_tokens(LONG[:30], 1, **DRAWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "BUCKETS", (30,))
        (whole,) = plain_engine(sliding, N_CTX).generate_tokens(LONG[:30], 1, **DRAWN)
    assert once == whole


# Several runs


def test_weights_can_be_replaced(ringed, monkeypatch, backend_compiles):
    logits = ringed.logits(PROMPT)
    list(ringed.generate_tokens(PROMPT, 1))
    norm = ringed.params.output_norm
    norm = dataclasses.replace(norm, weight=-norm.weight)
    negative = dataclasses.replace(ringed.params, output_norm=norm)
    monkeypatch.setattr(ringed, "params", negative)
    backend_compiles.clear()
    np.testing.assert_allclose(ringed.logits(PROMPT), -logits, atol=1e-5)
    (token,) = ringed.generate_tokens(PROMPT, 1, **GREEDY)
    assert token == logits[-1].argmin()
    assert backend_compiles == []


def test_nothing_of_an_earlier_run_stays(sliding, ringed):
    list(ringed.generate_tokens(LONG[:35], 9, **DRAWN))
    after = ringed.logits(PROMPT)
    np.testing.assert_array_equal(after, short_engine(sliding).logits(PROMPT))


def test_two_engines_do_not_touch_each_other(ringed, plain):
    alone = [list(e.generate_tokens(PROMPT, 9, **DRAWN)) for e in (ringed, plain)]
    runs = [e.generate_tokens(PROMPT, 9, **DRAWN) for e in (ringed, plain)]
    together = list(zip(*runs, strict=True))
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


@pytest.mark.parametrize("what", ["generate_tokens", "logits"])
def test_an_overtaken_run_says_so(ringed, what):
    tokens = list(ringed.generate_tokens(PROMPT, 5, **GREEDY))
    first = ringed.generate_tokens(PROMPT, 5, **GREEDY)
    assert next(first) == tokens[0]
    if what == "logits":
        ringed.logits(LONG[:5])
    else:
        assert list(ringed.generate_tokens(PROMPT, 5, **GREEDY)) == tokens
    with pytest.raises(EngineError, match="overtaken by another on the same engine"):
        next(first)


def test_a_run_begins_with_its_first_token(ringed):
    tokens = list(ringed.generate_tokens(PROMPT, 5, **GREEDY))
    early = ringed.generate_tokens(PROMPT, 5, **GREEDY)
    list(ringed.generate_tokens(LONG[:5], 3))
    assert list(early) == tokens


def test_a_run_may_be_abandoned(ringed):
    tokens = list(ringed.generate_tokens(PROMPT, 5, **GREEDY))
    run = ringed.generate_tokens(PROMPT, 5, **GREEDY)
    assert list(itertools.islice(run, 2)) == tokens[:2]
    assert ringed.stats.n_generated == 2
    run.close()
    assert list(ringed.generate_tokens(PROMPT, 5, **GREEDY)) == tokens


def test_a_run_may_be_interrupted_at_the_worst_moment(ringed, monkeypatch):
    """When the old KV state is given away already, and the new one is not yet kept."""
    tokens = list(ringed.generate_tokens(PROMPT, 5, **GREEDY))
    programs = ringed._runner.programs._programs
    decode = programs["decode"]

    def interrupted(*args):
        decode(*args)
        raise KeyboardInterrupt

    run = ringed.generate_tokens(PROMPT, 5, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setitem(programs, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(run)
    assert list(ringed.generate_tokens(PROMPT, 5, **GREEDY)) == tokens


@pytest.mark.parametrize("what", ["generate_tokens", "logits"])
def test_what_an_earlier_run_broke_does_not_stay_broken(tmp_path, what):
    """Zero times NaN is NaN: keys and values that no query sees would still get in its way."""
    embedding = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    embedding[95] = np.nan
    tensors = {"token_embd.weight": dense(embedding)}
    data = tiny_models.tiny_model("gemma3", tied=False, tensors=tensors)
    engine = short_engine(tiny_models.load(tmp_path, data))
    tokens = list(engine.generate_tokens(PROMPT, 3, **GREEDY))
    if what == "logits":
        assert np.isnan(engine.logits([95] * N_CTX)).all()
    else:
        with pytest.raises(EngineError, match="no finite logits"):
            list(engine.generate_tokens([95] * N_CTX, 1))
    assert list(engine.generate_tokens(PROMPT, 3, **GREEDY)) == tokens
