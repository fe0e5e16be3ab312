"""Byte pair encoding by a list of merges."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.tokenizer import Tokenizer
from minfer_jax.vocab import BYTE, CONTROL, NORMAL, USER_DEFINED
from tests.helpers.vocabs import BPE_MERGES, BPE_SPECIAL, tiny_bpe

LLAMA3 = Tokenizer.from_metadata(tiny_bpe("llama-bpe"))
GPT2 = Tokenizer.from_metadata(tiny_bpe("gpt-2"))


def texts(tokenizer: Tokenizer, text: str, parse_special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
    return [tokenizer.tokens[token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        # From llama.cpp (b11434), given the same vocabulary.
        (LLAMA3, "hello world", ["hello", "Ġworld"]),
        (LLAMA3, "Hello  world", ["H", "e", "ll", "o", "Ġ", "Ġworld"]),
        (LLAMA3, "hello\n\nworld", ["hello", "ĊĊ", "w", "or", "ld"]),
        (GPT2, "hello\n\nworld", ["hello", "Ċ", "Ċ", "w", "or", "ld"]),
        (LLAMA3, "123456", ["123", "4", "5", "6"]),
        # The whole word is a token, which the merges alone do not reach: "ab" goes first.
        (LLAMA3, "abc abab ba", ["abc", "Ġ", "ab", "ab", "Ġ", "ba"]),
        (GPT2, "abc abab ba", ["ab", "c", "Ġ", "ab", "ab", "Ġ", "ba"]),
        (LLAMA3, "é 漢", ["Ã©", "Ġ", "æ", "¼", "¢"]),
        (LLAMA3, "helloworld hello", ["hello", "w", "or", "ld", "Ġ", "hello"]),
        (LLAMA3, "    x", ["ĠĠ", "Ġ", "Ġ", "x"]),
        # The longer of two special tokens, wherever the shorter begins.
        (LLAMA3, " <tool>> <tool>x", ["Ġ", "<tool>>", "Ġ", "<tool>", "x"]),
        (LLAMA3, "", []),
    ],
)
def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, text: str, expected: list[str]):
    assert texts(tokenizer, text) == expected


def test_control_tokens_are_parsed_only_where_asked():
    text = "<|begin|>hello<|end_of_text|>"
    assert LLAMA3.encode(text, add_bos=False, parse_special=True) == [0, 263, 1]
    ids = LLAMA3.encode(text, add_bos=False)
    assert not {0, 1} & set(ids)
    assert LLAMA3.decode(ids) == text


MARKUP = st.lists(st.sampled_from([*BPE_SPECIAL, "hello", " ", "\n", "é", "<", "|>"])).map("".join)


@given(st.text() | MARKUP)
def test_text_comes_back(text: str):
    for tokenizer in (LLAMA3, GPT2):
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


@given(st.text(alphabet=st.characters(categories=["Cs", "Lu"])))
def test_surrogates_become_replacement_characters(text: str):
    expected = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert LLAMA3.decode(LLAMA3.encode(text, add_bos=False)) == expected


def test_merges_cannot_make_a_control_token():
    metadata = tiny_bpe(merges=["ab c", *BPE_MERGES])
    kinds = metadata["tokenizer.ggml.token_type"].copy()
    kinds[metadata["tokenizer.ggml.tokens"].index("abc")] = CONTROL
    metadata["tokenizer.ggml.token_type"] = kinds
    assert texts(Tokenizer.from_metadata(metadata), "abc") == ["ab", "c"]
    assert texts(Tokenizer.from_metadata(metadata), "abc", parse_special=True) == ["abc"]


def test_a_byte_without_a_token_keeps_its_neighbours_apart():
    metadata = tiny_bpe("gpt-2")
    metadata["tokenizer.ggml.tokens"] = [
        "[no x]" if text == "x" else text for text in metadata["tokenizer.ggml.tokens"]
    ]
    # As in llama.cpp: nothing stands for the x, and "a" and "b" are not joined over it.
    assert texts(Tokenizer.from_metadata(metadata), "axb ab") == ["a", "b", "Ġ", "ab"]


def test_a_merge_whose_product_is_no_token_leaves_its_parts():
    tokenizer = Tokenizer.from_metadata(tiny_bpe("gpt-2", merges=["x y", "xy z", *BPE_MERGES]))
    assert texts(tokenizer, "xyzab") == ["x", "y", "z", "ab"]


def test_the_first_of_equal_merges_counts():
    tokenizer = Tokenizer.from_metadata(tiny_bpe("gpt-2", merges=["a b", "b a", "a b"]))
    assert texts(tokenizer, "aba") == ["ab", "a"]


def test_damaged_merges_are_left_out():
    merges = ["ab", " a", "a ", "", "\udc80 a", *BPE_MERGES]
    assert texts(Tokenizer.from_metadata(tiny_bpe(merges=merges)), "abab") == ["ab", "ab"]


def test_tokens_that_are_not_utf8_keep_their_bytes():
    metadata = tiny_bpe()
    tokens = [*metadata["tokenizer.ggml.tokens"], "a\udcff"]
    kinds = np.append(metadata["tokenizer.ggml.token_type"], np.int32(USER_DEFINED))
    tokenizer = Tokenizer.from_metadata(tiny_bpe(tokens=tokens, token_type=kinds))
    assert tokenizer.token_bytes(len(tokens) - 1) == b"a\xff"
    assert texts(tokenizer, "ab") == ["ab"]


def gemma4() -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "ab", "▁ab", "\n", "\n\n", "é", "▁▁", "</s>", "<|tool_response>"]
    kinds = [CONTROL] * 2 + [BYTE] * 256 + [NORMAL] * 9 + [USER_DEFINED] * 2
    values = {
        "model": "gemma4",
        "tokens": ["<bos>", "<eos>", *byte_tokens, *pieces],
        "token_type": np.array(kinds, np.int32),
        "merges": ["a b", "▁ ab", "▁ ▁"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": v for key, v in values.items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # From llama.cpp (b11434), given the same vocabulary.
        ("ab ab", ["ab", "▁ab"]),
        ("a  ab\n\nab\n\n\n", ["a", "▁", "▁ab", "\n\n", "ab", "\n", "\n", "\n"]),
        ("é漢", ["é", "<0xE6>", "<0xBC>", "<0xA2>"]),
        (" </s>", ["▁", "<0x3C>", "<0x2F>", "<0x73>", "<0x3E>"]),
    ],
)
def test_gemma4_merges_utf8(text: str, expected: list[str]):
    tokenizer = gemma4()
    assert texts(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.add_bos  # whatever the file says
    assert tokenizer.eog_ids == {1, 268}  # not "</s>", an HTML tag here


@pytest.mark.parametrize("unit", ["a", "ab", "hello", "1", "漢"])
def test_a_long_word_takes_linear_time(unit: str):
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            LLAMA3.encode(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(80_000) < 24 * seconds(10_000) + 0.03
