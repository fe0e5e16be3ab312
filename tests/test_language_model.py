"""Text in, text out: loading, streaming, stop strings, and models without a tokenizer."""

import dataclasses
import itertools
import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import minfer_jax
from minfer_jax.gguf import GGUFError
from minfer_jax.language_model import from_file, load
from minfer_jax.model.config import ModelError
from minfer_jax.prompt import encode_prompt
from minfer_jax.sampling import SamplingParams
from minfer_jax.sources import SourceError
from minfer_jax.tokenizer import Tokenizer, TokenizerError
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import dense

N_CTX = 64
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
DRAWN: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 2.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 3,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Its bias keeps the model from ending, and makes it write mostly what is seen on a screen."""
    n = 3 + 256 + len(tiny_models.TEXT_MERGES)
    bias = np.full(n, -1.0, np.float32)
    bias[:3] = -1e9
    bias[3 : 3 + 94] = bias[-len(tiny_models.TEXT_MERGES) :] = 2.0
    data = tiny_models.tiny_text_model(
        n_layer=2, biases=("output",), tensors={"output.bias": dense(bias)}
    )
    return tiny_models.save(tmp_path_factory.mktemp("text"), data).path


@pytest.fixture(scope="module")
def model(path):
    return load(path, n_ctx=N_CTX, precision="highest")


@pytest.fixture(scope="module")
def mute(tmp_path_factory):
    """A model whose tokenizer is of no kind that is known."""
    data = tiny_models.tiny_model("llama", n_layer=1, metadata={"tokenizer.ggml.model": "test"})
    file = tiny_models.save(tmp_path_factory.mktemp("mute"), data)
    return load(file.path, n_ctx=N_CTX, precision="highest")


def test_load_by_path(path, model):
    assert minfer_jax.load is load
    assert isinstance(model, minfer_jax.LanguageModel)
    assert model.file.path == path
    assert model.engine.n_ctx == N_CTX
    assert model.cfg.n_layer == 2
    assert model.cfg.precision == "highest"
    assert model.params is model.engine.params
    assert model.stats is model.engine.stats
    assert model.tokenizer is not None
    assert model.tokenizer.n_vocab == model.cfg.n_vocab
    assert load(str(path), n_ctx=10**9).engine.n_ctx == model.cfg.n_ctx_train


@pytest.mark.parametrize(
    ("precision", "cache_type", "dtype"),
    [
        ("highest", None, "float32"),
        ("default", None, "float16"),
        ("highest", "bf16", "bfloat16"),
        ("default", "f32", "float32"),
    ],
)
def test_the_cache_type(path, precision, cache_type, dtype):
    model = load(path, n_ctx=N_CTX, precision=precision, cache_type=cache_type, prefill_chunk=16)
    assert model.cfg.cache_dtype == dtype
    assert model.generate("hello", max_tokens=1) is not None
    arrays = model.engine.snapshot().rows.arrays
    assert {a.dtype.name for a in arrays} == {dtype}
    assert [c.name for c in model.engine.compiles] == ["prefill 16", "decode"]


def test_loading_reports_its_progress(path):
    sizes = []
    load(path, on_bytes=sizes.append)
    total = sum(info.nbytes for info in tiny_models.open_gguf(path).tensors.values())
    assert len(sizes) > 10
    assert 0.99 * total < sum(sizes) <= total, "vectors are small and may go unreported"


def test_a_tokenizer_that_is_given_is_used(path):
    file = tiny_models.open_gguf(path)
    tokenizer = Tokenizer.from_gguf(file)
    assert from_file(file, tokenizer=tokenizer).tokenizer is tokenizer


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        load(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(GGUFError):
        load(tmp_path / "bad.gguf")
    file = tiny_models.save(tmp_path, tiny_models.tiny_model("llama"))
    with pytest.raises(ValueError, match="precision"):
        load(file.path, precision="low")
    with pytest.raises(
        ValueError, match="cache_type is 'f8', expected one of f32, f16, bf16, q8_0"
    ):
        load(file.path, cache_type="f8")
    with pytest.raises(ValueError, match="n_ctx is 0"):
        load(file.path, n_ctx=0)
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        load(file.path, prefill_chunk=0)
    data = tiny_models.tiny_model("llama", tensors={"output_norm.weight": None})
    with pytest.raises(ModelError, match=r"output_norm\.weight is missing"):
        load(tiny_models.save(tmp_path, data).path)


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_the_stream_joins_to_the_text(model, options):
    pieces = list(model.stream("hello world", **options))
    assert len(pieces) > 1
    assert all(pieces), "no empty pieces"
    text = model.generate("hello world", **options)
    assert "".join(pieces) == text
    assert model.stats.n_generated == 24
    assert model.stats.finish_reason == "length"


def test_the_text_is_that_of_the_tokens(model):
    ids = model.encode_prompt("hello world")
    assert ids == encode_prompt(model.file, model.tokenizer, "hello world")
    default = {"repeat_penalty": SamplingParams.repeat_penalty}
    tokens = list(model.generate_tokens(ids, 24, temperature=0.0, **default))
    text = model.tokenizer.decode(tokens, continues=True)
    assert model.generate("hello world", **GREEDY) == text
    assert "".join(model.stream_ids(ids, **GREEDY)) == text


def test_text_has_the_samplers_defaults_and_tokens_have_no_penalty(model):
    explicit = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repeat_penalty": 1.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 42,
    }
    text = model.generate("hello", max_tokens=24)
    assert model.generate("hello", max_tokens=24, **explicit) == text
    ids = model.encode_prompt("hello")
    tokens = list(model.generate_tokens(ids, 24))
    assert tokens == list(model.generate_tokens(ids, 24, **explicit | {"repeat_penalty": 1.0}))


def test_system_and_template(model):
    greedy = model.generate("hello", **GREEDY)
    assert model.generate([{"role": "user", "content": "hello"}], **GREEDY) == greedy
    assert model.generate("hello", system="hello", **GREEDY) != greedy
    plain = model.generate("hello", template=False, **GREEDY)
    assert model.stats.n_prompt == 1
    assert plain != greedy


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_stop_strings_cut_exactly(model, options):
    """Stops of one character up to those that span several tokens, from every place."""
    text = model.generate("hello", **options)
    assert len(text) > 20
    for start, length in itertools.product(range(0, 18, 3), (1, 2, 5)):
        stop = text[start : start + length]
        found = model.generate("hello", stop=[stop, "\0never"], **options)
        assert found == text[: text.find(stop)]
        assert model.stats.finish_reason == "stop"
        assert model.stats.n_generated <= 24
    assert model.generate("hello", stop=["\0never"], **options) == text
    assert model.stats.finish_reason == "length"
    assert model.generate("hello", stop=[text + "more"], **options) == text, "nothing stays held"


def test_a_run_after_a_stop_is_a_new_one(model):
    text = model.generate("hello", **GREEDY)
    stream = model.stream("hello", stop=[text[5:8]], **GREEDY)
    assert "".join(stream) == text[: text.find(text[5:8])]
    assert model.generate("hello", **GREEDY) == text


@pytest.mark.parametrize("end", [0, 2])
def test_an_end_token_ends_the_text_and_is_not_part_of_it(model, monkeypatch, end):
    assert model.tokenizer.eog_ids == {0, 2}
    bias = model.params.output.bias.at[end].set(jnp.float32(1e9))
    output = dataclasses.replace(model.params.output, bias=bias)
    monkeypatch.setattr(model.engine, "params", dataclasses.replace(model.params, output=output))
    assert model.generate("hello", **GREEDY) == ""
    assert (model.stats.n_generated, model.stats.finish_reason) == (0, "stop")


# States


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_a_saved_answer_goes_on_elsewhere(path, model, tmp_path, options):
    whole = model.generate("hello", **options)
    part = model.generate("hello", **{**options, "max_tokens": 9})
    model.save_state(tmp_path / "state")
    other = load(path, n_ctx=N_CTX, precision="highest")
    other.load_state(tmp_path / "state")
    assert part + "".join(other.continue_stream(max_tokens=15)) == whole
    assert list(model.continue_tokens(15)) == other.engine.tokens[-15:]
    assert other.engine.tokens == model.engine.tokens


def test_a_stop_string_ends_a_continued_answer(model):
    whole = model.generate("hello", **GREEDY)
    rest = whole.removeprefix(model.generate("hello", **{**GREEDY, "max_tokens": 9}))
    stop = rest[3:5]
    text = "".join(model.continue_stream(max_tokens=15, stop=stop))
    assert text == rest[: rest.find(stop)]


def test_a_character_may_be_begun_by_one_run_and_ended_by_the_next(model):
    """As here, where the last token yielded is replaced by the first byte of one."""
    first = model.tokenizer.encode("\u00e9")[-2]
    list(model.generate_tokens([3, 4], 1, temperature=0.0))
    model.engine._session.tokens[-1] = first
    model.engine._runner.kv.keep(0)
    text = "".join(model.continue_stream(max_tokens=4))
    expected = model.tokenizer.decode(model.engine.tokens[2:], continues=True)
    assert text == expected


def test_a_state_of_another_file_is_refused(path, model, mute, tmp_path):
    model.generate("hello", max_tokens=2)
    model.save_state(tmp_path / "state")
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(changed)
    other = load(tmp_path / "other.gguf", n_ctx=N_CTX, precision="highest")
    with pytest.raises(ValueError, match="saved with another model file"):
        other.load_state(tmp_path / "state")


def test_a_shift_keeps_the_beginning_and_bos(model, monkeypatch):
    """n_keep is of the prompt, without BOS, as llama.cpp counts."""
    kept = []
    for add_bos in (False, True):
        tokenizer = dataclasses.replace(model.tokenizer, add_bos=add_bos)
        monkeypatch.setattr(model, "tokenizer", tokenizer)
        for n_keep in (0, 3, -1):
            list(model.stream("hello", context_shift=True, n_keep=n_keep, **GREEDY))
            kept.append(model.engine._session.options.n_keep)
    n = model.stats.n_prompt
    assert kept == [0, 3, n - 1, 1, 4, n], "BOS makes the prompt longer by one"
    text = model.generate("hello", context_shift=True, **{**GREEDY, "max_tokens": 200})
    assert (model.stats.n_generated, model.stats.finish_reason) == (200, "length")
    assert model.stats.n_dropped > 0
    assert len(text) > 100


def test_max_tokens_zero(model):
    assert model.generate("hello", max_tokens=0) == ""
    assert model.stats.n_prompt > 0


def test_unknown_options_are_refused_at_once(model):
    for call in (model.stream, model.generate):
        with pytest.raises(TypeError, match="temprature"):
            call("hello", temprature=0.5)
    with pytest.raises(ValueError, match="top_k"):
        model.stream("hello", top_k=-1)
    with pytest.raises(ValueError, match="context holds 64"):
        model.stream("hello" * 100)


def test_a_model_without_tokenizer_takes_tokens(mute, caplog):
    assert mute.tokenizer is None
    tokens = list(mute.generate_tokens([1, 2, 3], 4, temperature=0.0))
    rows = mute.logits([1, 2, 3, *tokens])
    assert rows[2:-1].argmax(-1).tolist() == tokens
    assert mute.logits([1, 2, 3], chunk=1).shape == (3, mute.cfg.n_vocab)


@pytest.mark.parametrize("how", ["stream", "generate", "encode_prompt", "stream_ids"])
def test_a_model_without_tokenizer_refuses_text(mute, how):
    prompt = [1, 2, 3] if how == "stream_ids" else "hello"
    with pytest.raises(TokenizerError) as caught:
        getattr(mute, how)(prompt)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"{mute.file.path}: ")
    assert "token ids" in message, "what to do instead"


def test_why_there_is_no_tokenizer_is_logged(mute, caplog):
    with caplog.at_level(logging.INFO, "minfer_jax"):
        from_file(mute.file)
    assert "tokenizer.ggml.model is 'test'" in caplog.text
