"""Traces and patches of an engine: values of a text's own rows, and what compiles."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax import tracing
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.language_model import LanguageModel, from_file
from minfer_jax.model.patches import Add, Replace
from tests.helpers.tiny_engines import N_CTX, short_engine
from tests.helpers.tiny_models import load, save, tiny_model, tiny_text_model

IDS = [(11 * i * i + 5 * i + 2) % 96 for i in range(N_CTX)]
CLOSE = 2e-4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return short_engine(load(tmp_path_factory.mktemp("model"), tiny_model("gemma3")))


def traces(engine: Engine) -> list[str]:
    return [c.name for c in engine.compiles if c.name.startswith("trace")]


def test_values_of_a_text_s_own_rows(engine: Engine):
    names = ["logits", "blk.*.residual", "blk.1.scores", "blk.2.weights", "embd"]
    trace = engine.trace(IDS[:5], names)
    assert list(trace) == [
        *("embd", "blk.0.residual", "blk.1.scores", "blk.1.residual"),
        *("blk.2.weights", "blk.2.residual", "blk.3.residual", "logits"),
    ]
    assert trace.tokens == IDS[:5]
    assert trace["blk.1.scores"].shape == trace["blk.2.weights"].shape == (4, 5, 5)
    assert trace["embd"].shape == (5, engine.cfg.n_embd)
    assert trace.logits is trace["logits"] and trace.logits.shape == (5, engine.cfg.n_vocab)
    np.testing.assert_allclose(trace.logits, engine.logits(IDS[:5]), atol=CLOSE)
    np.testing.assert_allclose(trace["blk.2.weights"].sum(-1), 1.0, atol=1e-5)
    assert repr(trace) == "Trace(5 tokens, 8 values, 0.0 MB)"
    # A text that begins alike has these values too, in a program for more rows.
    longer = engine.trace(IDS[:20], names)
    np.testing.assert_allclose(longer["blk.3.residual"][:5], trace["blk.3.residual"], atol=CLOSE)
    np.testing.assert_allclose(
        longer["blk.2.weights"][:, :5, :5], trace["blk.2.weights"], atol=1e-5
    )
    with pytest.raises(KeyError):
        trace["blk.0.up"]


def test_all_of_the_context(engine: Engine):
    trace = engine.trace(IDS, "output_norm")
    np.testing.assert_allclose(trace.logits, engine.logits(IDS), atol=CLOSE)
    assert traces(engine)[-1] == f"trace {N_CTX}"
    with pytest.raises(EngineError, match="41 tokens"):
        engine.trace([*IDS, 1], "output_norm")


def test_what_compiles(engine: Engine):
    # Prime every shape once.
    vector = np.linspace(0, 1, engine.cfg.n_embd, dtype=np.float32)
    engine.trace(IDS[:6], "blk.0.up")
    engine.patch({"blk.0.up": Add(0.0)}).logits(IDS[:6])
    engine.patch({"blk.0.residual": Add(vector)}).logits(IDS[:6])
    before = traces(engine)
    for n in (5, 7, 8):
        engine.trace(IDS[:n], "blk.3.up")
    plain = engine.trace(IDS[:6], "blk.2.up").logits
    sums = [
        engine.patch({f"blk.{layer}.residual": Add(vector * scale)}).logits(IDS[:n])
        for layer, scale, n in ((0, 1.0, 6), (3, 2.0, 6), (2, -1.0, 8))
    ]
    assert traces(engine) == before
    assert abs(sums[0] - plain).max() > 0.1 and abs(sums[1] - sums[0]).max() > 0.1

    def double(x: jax.Array) -> jax.Array:
        return x * 2.0

    for _ in range(2):
        engine.patch({"blk.1.up": double}).logits(IDS[:6])
    assert len(traces(engine)) == len(before) + 1
    engine.trace(IDS[:6], "blk.[01].up")
    assert len(traces(engine)) == len(before) + 2


def test_patches_of_a_text_s_rows(engine: Engine):
    ids, others = IDS[:6], IDS[10:16]
    wanted = engine.trace(others, "*")
    for patch in (
        {"blk.3.residual": wanted["blk.3.residual"]},
        {"blk.3.residual": Replace(wanted["blk.3.residual"])},
        {"embd": lambda x: jnp.asarray(np.pad(wanted["embd"], ((0, 2), (0, 0))))[None]},
    ):
        np.testing.assert_allclose(engine.patch(patch).logits(ids), wanted.logits, atol=CLOSE)
    # At one position.
    where = np.arange(6)[:, None] == 2
    patched = engine.patch({"blk.1.attn_out": Replace(0.0, where)})
    found = patched.trace(ids, ["blk.1.attn_out", "blk.0.residual"])
    expected = engine.trace(ids, ["blk.1.attn_out", "blk.0.residual"])
    assert not found["blk.1.attn_out"][2].any() and expected["blk.1.attn_out"][2].any()
    np.testing.assert_allclose(found["blk.0.residual"], expected["blk.0.residual"], atol=1e-5)
    np.testing.assert_allclose(found.logits[:2], expected.logits[:2], atol=CLOSE)
    assert abs(found.logits[2:] - expected.logits[2:]).max(1).min() > 1e-3
    # Of attention, whose slots are padded as well.
    uniform = np.tril(np.ones((6, 6), np.float32)) / np.arange(1, 7)[:, None]
    assert (
        engine.patch({"blk.1.weights": uniform}).trace(ids, "blk.1.weights")["blk.1.weights"]
        == uniform.astype(np.float32)
    ).all()


def test_what_does_not_fit_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(EngineError, match=r"'blk.9.up' is no name of a value here"):
        engine.trace(IDS[:4], "blk.9.up")
    with pytest.raises(EngineError, match="'up' is no name"):
        engine.patch({"up": 0.0})
    wrong = engine.patch({"blk.0.residual": np.zeros((8, 64))})
    with pytest.raises(EngineError, match=r"\[8, 64\], expected \[1, 6, 64\] \(B T D\)"):
        wrong.logits(IDS[:6])
    with pytest.raises(EngineError, match="takes token ids"):
        engine.patch({}).logits("hello")
    with pytest.raises(EngineError, match="no tokens"):
        engine.trace([], "embd")
    monkeypatch.setattr(tracing, "MAX_BYTES", 50_000)
    with pytest.raises(
        EngineError,
        match=r"70 values of 0.684 MB .* 0.05 MB .*is scores, \[1, 4, 32, 32\] or 0.016 MB each",
    ):
        engine.trace(IDS[:30], ["blk.*.*", "embd"])


def test_the_text_that_is_held_is_left_alone(engine: Engine):
    tokens = list(engine.generate_tokens(IDS[:6], 4, temperature=0.0))
    engine.trace(IDS[6:12], "embd")
    more = list(engine.continue_tokens(3))
    assert engine.tokens == IDS[:6] + tokens + more
    assert list(engine.generate_tokens(IDS[:6], 7, temperature=0.0)) == tokens + more


def test_programs_of_functions_are_not_kept_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracing, "MOST_PROGRAMS", 1)
    first, second = (engine.patch({"logits": lambda x, n=n: x + n}) for n in (1.0, 2.0))
    expected = engine.logits(IDS[:4])
    for patched, more in ((first, 1.0), (second, 2.0), (first, 1.0)):
        np.testing.assert_allclose(patched.logits(IDS[:4]), expected + more, atol=CLOSE)


def test_the_engine_s_context_decides_on_rope(tmp_path: Path):
    keys = {"rope.scaling.original_context_length": 16}
    model = load(tmp_path, tiny_model("phi3", long_factors=True, keys=keys, n_layer=1))
    assert model[0].long_rope is not None
    logits = []
    for n_ctx in (16, 32):
        engine = short_engine(model, n_ctx=n_ctx)
        logits.append(engine.trace(IDS[:6], "embd").logits)
        np.testing.assert_allclose(logits[-1], engine.logits(IDS[:6]), atol=CLOSE)
    assert abs(logits[0] - logits[1]).max() > 1e-2


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("text")
    return from_file(save(folder, tiny_text_model(n_layer=1)), n_ctx=32, precision="highest")


def test_a_text_in_words(language_model: LanguageModel):
    trace = language_model.trace("hello world", "blk.0.residual")
    assert language_model.tokenizer is not None
    assert trace.tokens == language_model.tokenizer.encode("hello world")
    same = language_model.trace(trace.tokens, "blk.0.residual")
    np.testing.assert_array_equal(same["blk.0.residual"], trace["blk.0.residual"])
    patched = language_model.patch({"logits": Add(1.0)})
    np.testing.assert_allclose(patched.logits("hello world"), trace.logits + 1.0, atol=CLOSE)
