"""SentencePiece's byte pair encoding by scores."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.spm import SentencePieceEncoder
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.vocab import CONTROL
from tests.helpers.vocabs import tiny_spm

SPM = Tokenizer.from_metadata(tiny_spm())
NO_PREFIX = Tokenizer.from_metadata(tiny_spm(add_space_prefix=False))


def texts(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
    return [tokenizer.tokens[token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        # From llama.cpp (b11434), given the same vocabulary.
        (SPM, "hello world", ["▁hello", "▁world"]),
        (NO_PREFIX, "hello world", ["hello", "▁world"]),
        (SPM, " hello", ["▁▁", "hello"]),
        (NO_PREFIX, " hello", ["▁hello"]),
        # "he", "ll", "lo" and "oé" score the same, so the leftmost goes first.
        (SPM, "helloéworld", ["▁", "hell", "oé", "w", "or", "ld"]),
        (SPM, "hello  world\n", ["▁hello", "▁", "▁world", "<0x0A>"]),
        (SPM, "漢字", ["▁", "漢", "<0xE5>", "<0xAD>", "<0x97>"]),
        (SPM, "lllll hehello ", ["▁", "ll", "ll", "l", "▁", "he", "hello", "▁"]),
        (SPM, "  ", ["▁▁", "▁"]),
        (NO_PREFIX, "  ", ["▁▁"]),
        # Text after a special token begins anew, with a space.
        (SPM, "a<tool>hello", ["▁", "<0x61>", "<tool>", "▁hello"]),
        (NO_PREFIX, "a<tool>hello", ["<0x61>", "<tool>", "hello"]),
        (SPM, "", []),
    ],
)
def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, text: str, expected: list[str]):
    assert texts(tokenizer, text) == expected


def test_control_tokens_are_parsed_only_where_asked():
    text = "<s>hello</s>world"
    assert texts(SPM, text, parse_special=True) == ["<s>", "▁hello", "</s>", "▁world"]
    # Here merges lead to control tokens, and llama.cpp follows them: "</" and "s>" make "</s>".
    assert texts(SPM, text) == ["▁", "<", "s>", "hello", "</", "s>", "w", "or", "ld"]


def reference(scores: dict[str, float], text: str) -> list[str]:
    """Joins the best neighbours, over and over, by looking at all of them each time."""
    symbols = list(text)
    while True:
        joined = [a + b for a, b in pairwise(symbols)]
        known = [(-scores[pair], index) for index, pair in enumerate(joined) if pair in scores]
        if not known:
            return symbols
        index = min(known)[1]
        symbols[index : index + 2] = [joined[index]]


SMALL = st.sampled_from("ab▁<")
PIECES = st.dictionaries(
    st.text(SMALL, min_size=2, max_size=5), st.integers(0, 4).map(float), max_size=40
)


@given(PIECES, st.text(SMALL, max_size=60))
def test_merges_like_the_definition(pieces: dict[str, float], text: str):
    scores = pieces | dict.fromkeys("ab▁<", -9.0)
    ids = {piece: index for index, piece in enumerate(scores)}
    encoder = SentencePieceEncoder(scores, ids, None)
    assert encoder.encode(text) == [ids[symbol] for symbol in reference(scores, text)]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_text_comes_back(text: str):
    if "<tool>" not in text:  # the text after it is given a space
        for tokenizer in (SPM, NO_PREFIX):
            ids = tokenizer.encode(text, add_bos=False)
            assert tokenizer.decode(ids) == text
            assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # From llama.cpp (b11434), given the same vocabulary under the name "Phi-3 mini".
        ("<tool> \n hello", ["<tool>", "▁hello"]),
        ("</s>  </s>", ["</s>", "</s>"]),
        ("<s> hello", ["<s>", "▁▁", "hello"]),
        ("<|endoftext|> hello", ["<|endoftext|>", "▁▁", "hello"]),
        ("<|u|>\t<|u|>  w", ["<|u|>", "<|u|>", "▁w"]),
    ],
)
def test_special_tokens_of_phi3_swallow_white_space(text: str, expected: list[str]):
    metadata = tiny_spm()
    extra = {
        "tokens": [*metadata["tokenizer.ggml.tokens"], "<|endoftext|>", "<|u|>"],
        "scores": np.append(metadata["tokenizer.ggml.scores"], np.zeros(2, np.float32)),
        "token_type": np.append(metadata["tokenizer.ggml.token_type"], [CONTROL, CONTROL]),
    }
    tokenizer = Tokenizer.from_metadata(tiny_spm(**extra) | {"general.name": "Phi-3 mini"})
    assert texts(tokenizer, text, parse_special=True) == expected


def test_without_byte_tokens_a_character_is_unknown():
    scores = {"a": -1.0, "b": -1.0, "ab": -2.0}
    ids = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    assert SentencePieceEncoder(scores, ids, 0).encode("ab漢b") == [3, 0, 2]
    assert SentencePieceEncoder(scores, ids, None).encode("ab漢b") == [3, 2]


@pytest.mark.parametrize("unit", ["l", "hello", "▁", "hello ", "漢é"])
def test_a_long_text_takes_linear_time(unit: str):
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            SPM.encode(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(40_000) < 24 * seconds(5_000) + 0.03
