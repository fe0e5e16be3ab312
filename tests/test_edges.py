"""What a user may come upon at the edges: no prompt, no room, no end, no seed, no number.

Of models with text; what the engine does with tokens at its edges is in test_engine.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.bpe import BYTE_CHARACTERS
from minfer_jax.context import EngineError
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.vocab import CONTROL, END_OF_GENERATION, FILL_IN_THE_MIDDLE, FIM_ENDS, NORMAL
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import dense
from tests.helpers.vocabs import tiny_bpe

pytestmark = pytest.mark.usefixtures("shared_compiles")

N_CTX = 64
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}
DRAWN: dict[str, Any] = {"max_tokens": 16, "temperature": 2.0, "top_k": 0, "top_p": 1.0}
N_VOCAB = 3 + 256 + len(tiny_models.TEXT_MERGES)
LAST = N_VOCAB - 1


def load_text(folder, data: bytes) -> LanguageModel:
    return load(tiny_models.save(folder, data).path, precision="highest")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """It does not end, and writes what is seen on a screen."""
    data = tiny_models.endless_text_model(n_layer=2, n_ctx=N_CTX)
    return load_text(tmp_path_factory.mktemp("edges"), data)


def known(model: LanguageModel) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


# Prompts


def test_a_prompt_of_no_tokens(model, monkeypatch):
    with pytest.raises(EngineError, match="the prompt holds no tokens; give at least one"):
        model.generate("", template=False)
    assert model.generate("", **GREEDY), "an empty message is a prompt, with the template"
    monkeypatch.setattr(model, "tokenizer", dataclasses.replace(known(model), add_bos=True))
    assert model.generate("", template=False, **GREEDY), "and so is BOS"
    assert model.stats.n_prompt == 1


@pytest.mark.parametrize(("n", "n_drawn"), [(N_CTX - 2, 3), (N_CTX - 1, 2), (N_CTX, 1)])
def test_a_prompt_that_fills_the_context(model, n, n_drawn):
    text = model.generate("z" * n, template=False, **GREEDY)
    assert (model.stats.n_prompt, model.stats.n_generated) == (n, n_drawn)
    assert model.stats.finish_reason == "length"
    assert text


def test_a_prompt_of_one_token_too_many(model):
    for template, n in ((False, N_CTX + 1), (None, N_CTX)):
        with pytest.raises(EngineError, match=r"tokens, but the context holds 64: shorten it$"):
            model.generate("z" * n, template=template)


def test_tokens_that_the_model_has_no_rows_for(tmp_path):
    """A tokenizer larger than the model: refused, not taken for another token."""
    metadata = text_metadata({"<extra>": CONTROL})
    data = tiny_models.endless_text_model(n_layer=2, n_ctx=N_CTX, metadata=metadata)
    model = load_text(tmp_path, data)
    assert known(model).n_vocab == model.cfg.n_vocab + 1
    with pytest.raises(EngineError, match=f"token id {N_VOCAB} is outside the vocabulary"):
        list(model.stream_ids(known(model).encode("hello<extra>", parse_special=True)))
    assert model.generate("hello", **GREEDY)


def text_metadata(more: dict[str, int], **keys: Any) -> dict[str, Any]:
    """The tokenizer of `tiny_text_model` with tokens behind its own."""
    products = [merge.replace(" ", "") for merge in tiny_models.TEXT_MERGES]
    tokens = [*tiny_models.TEXT_CONTROL, *BYTE_CHARACTERS, *products, *more]
    kinds = [CONTROL] * 3 + [NORMAL] * (N_VOCAB - 3) + list(more.values())
    return tiny_bpe(
        "gpt-2",
        tokens=tokens,
        token_type=np.array(kinds, np.int32),
        merges=tiny_models.TEXT_MERGES,
        add_bos_token=False,
        **{"bos_token_id": 0, "eos_token_id": 2, **keys},
    )


# Ends


FIM_NAMES = [n for keys, names in FILL_IN_THE_MIDDLE.items() if keys[0] in FIM_ENDS for n in names]
KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", *FIM_ENDS)


def test_the_kinds_of_ends_are_llama_cpp_s():
    """Of llama-vocab.cpp, b11434: 22 names of tokens, the three keys, and what begins a file."""
    assert len(set(END_OF_GENERATION)) == 22
    assert len(KEYS) == 6
    assert len(FIM_NAMES) == 11


@pytest.mark.parametrize(
    ("text", "keys"),
    [(name, ()) for name in (*END_OF_GENERATION, *FIM_NAMES)] + [("<x>", (key,)) for key in KEYS],
)
def test_every_kind_of_end_ends_a_text(model, monkeypatch, text, keys):
    """The model draws one token again and again: an end by its name or by a key."""
    metadata = text_metadata({})
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[LAST] = text
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.merges"] = tiny_models.TEXT_MERGES[:-1]
    metadata |= {f"tokenizer.ggml.{key}": LAST for key in keys}
    monkeypatch.setattr(model, "tokenizer", Tokenizer.from_metadata(metadata))
    assert draw_only(model, monkeypatch, LAST) == ""
    assert (model.stats.n_generated, model.stats.finish_reason) == (0, "stop")


def test_what_is_no_end_does_not_end_a_text(model, monkeypatch):
    """The control of the test above."""
    assert draw_only(model, monkeypatch, LAST) == " world" * 16
    assert model.stats.finish_reason == "length"


def draw_only(model: LanguageModel, monkeypatch, token: int) -> str:
    bias = model.params.output.bias
    assert bias is not None
    bias = bias.at[token].set(jnp.float32(1e9))
    output = dataclasses.replace(model.params.output, bias=bias)
    monkeypatch.setattr(model.engine, "params", dataclasses.replace(model.params, output=output))
    return model.generate("hello", repeat_penalty=1.0, **GREEDY)


def test_stop_strings_that_get_in_each_other_s_way(model):
    """The one that is complete first counts; of those that end together, the longest."""
    text = model.generate("hello", **GREEDY)
    n = len(text)
    for stops, cut in (
        ([text[3:9], text[5:7]], 5),  # one inside the other
        ([text[3:6], text[4:9]], 3),  # they overlap
        ([text[3:5], text[3:9]], 3),  # one is the beginning of the other
        ([text[3:9], text[5:9]], 3),  # one is the end of the other
        ([text[2:4] + "\0", text[3:5]], 3),  # one that fails holds the other's beginning
        (["", text[5:7]], 5),
        (["", ""], n),
        ([text + "\0", text[-1] + "\0"], n),  # longer than the text; begun at its end
        ([text], 0),
    ):
        for order in itertools.permutations(stops):
            assert model.generate("hello", stop=order, **GREEDY) == text[:cut], stops
            assert model.stats.finish_reason == ("stop" if cut < n else "length")


def test_numbers_that_are_none(tmp_path):
    """What was written before stays written."""
    embedding = np.random.default_rng(0).standard_normal((N_VOCAB, 64), np.float32)
    embedding[LAST] = np.nan
    bias = np.full(N_VOCAB, -1e9, np.float32)
    bias[LAST] = 0
    tensors = {"token_embd.weight": dense(embedding), "output.bias": dense(bias)}
    data = tiny_models.tiny_text_model(n_layer=2, n_ctx=N_CTX, biases=("output",), tensors=tensors)
    model = load_text(tmp_path, data)
    pieces = model.stream("hello", repeat_penalty=1.0, **GREEDY)
    assert next(pieces) == " world"
    with pytest.raises(EngineError, match="the model gave no finite logits at position"):
        list(pieces)


# Seeds, and several models


def test_a_seed_that_is_drawn_can_be_used_again(model):
    fixed = model.generate("hello", seed=42, **DRAWN)
    assert model.generate("hello", **DRAWN) == fixed, "the default"
    assert model.stats.seed == 42
    texts, seeds = set(), set()
    for seed in (None, -1, None, np.int64(-1)):
        text = model.generate("hello", seed=seed, **DRAWN)
        drawn = model.stats.seed
        assert model.generate("hello", seed=drawn, **DRAWN) == text
        texts.add(text)
        seeds.add(drawn)
    assert len(texts) == len(seeds) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)
    ids = known(model).encode("hello")
    tokens = [list(model.generate_tokens(ids, seed=seed, **DRAWN)) for seed in (None, -1)]
    assert tokens[0] != tokens[1]
    assert list(model.generate_tokens(ids, seed=model.stats.seed, **DRAWN)) == tokens[1]


@pytest.mark.parametrize("seed", [np.int32(7), np.int64(7), np.uint64(2**64 - 1)])
def test_a_seed_of_numpy_s_is_a_seed(model, seed):
    options = {**DRAWN, "seed": int(seed)}
    assert model.generate("hello", **{**options, "seed": seed}) == model.generate(
        "hello", **options
    )
    assert talk(model, **{**options, "seed": seed}) == talk(model, **options)


def talk(model: LanguageModel, **options: Any) -> list[str]:
    """Two answers: the second has the next seed."""
    conversation = Conversation(model, **options)
    return ["".join(conversation.say("hello")) for _ in range(2)]


def test_a_conversation_with_a_seed_that_is_drawn(model):
    talks = [Conversation(model, seed=seed, **DRAWN) for seed in (None, -1)]
    first, second = ["".join(talk.say("hello")) for talk in talks]
    assert first != second
    again = Conversation(model, seed=model.stats.seed, **DRAWN)
    assert "".join(again.say("hello")) == second


@pytest.mark.parametrize("seed", [-2, 2**64, 1.5, "1", True])
def test_what_is_no_seed(model, seed):
    for call in (model.stream, model.generate, lambda text, seed: talk(model, seed=seed)):
        with pytest.raises(ValueError, match="seed must be an integer from 0"):
            call("hello", seed=seed)
    with pytest.raises(ValueError, match="seed must be"):
        model.generate_tokens([1], seed=seed)


def test_two_models_in_turn(model, tmp_path):
    data = tiny_models.endless_text_model(n_layer=2, n_ctx=N_CTX, seed=1)
    other = load_text(tmp_path, data)
    alone = [m.generate("hello", **DRAWN) for m in (model, other)]
    assert alone[0] != alone[1]
    streams = [m.stream("hello", reuse=False, **DRAWN) for m in (model, other)]
    together = list(itertools.zip_longest(*streams, fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*together, strict=True)] == alone
