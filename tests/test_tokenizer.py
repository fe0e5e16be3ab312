"""What both kinds of tokenizers share: BOS and EOS, special tokens, decoding, damaged files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.gguf import GGUFError, open_gguf
from minfer_jax.special_tokens import SpecialToken, sort_special, split_special
from minfer_jax.tokenizer import Tokenizer, TokenizerError
from minfer_jax.vocab import CONTROL, NORMAL, UNUSED
from tests.helpers.gguf_builder import build_gguf
from tests.helpers.vocabs import tiny_bpe, tiny_spm

BPE = Tokenizer.from_metadata(tiny_bpe("qwen2"))
SPM = Tokenizer.from_metadata(tiny_spm())


def with_tokens(metadata: dict[str, Any], extra: dict[str, int]) -> Tokenizer:
    """The tokenizer with more tokens, whose ids follow those that are there; name to kind."""
    names, kinds = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    changed = {
        names: [*metadata[names], *extra],
        kinds: np.append(metadata[kinds], np.array(list(extra.values()), np.int32)),
    }
    return Tokenizer.from_metadata(metadata | changed)


def test_reads_a_file(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(build_gguf({"general.architecture": "llama", **tiny_bpe()}, {}))
    for source in (path, str(path), open_gguf(path)):
        tokenizer = Tokenizer.from_gguf(source)
        assert tokenizer.n_vocab == len(tokenizer.tokens) == 4 + 256 + 19
        assert (tokenizer.bos_id, tokenizer.bos_token) == (0, "<|begin|>")
        assert (tokenizer.eos_id, tokenizer.eos_token) == (1, "<|end_of_text|>")
        assert tokenizer.encode("hello world") == [0, 263, 268]


@pytest.mark.parametrize("model", ["test", "bert", "t5", "rwkv", "plamo2", "no_vocab", 5, None])
def test_unknown_models_are_named_with_those_that_are_known(tmp_path: Path, model: Any):
    path = tmp_path / "tiny.gguf"
    metadata = tiny_bpe(model=model)
    path.write_bytes(build_gguf({"general.architecture": "llama", **metadata}, {}))
    with pytest.raises(TokenizerError, match=r"tiny\.gguf: tokenizer.ggml.model is") as caught:
        Tokenizer.from_gguf(path)
    message = str(caught.value)
    assert repr(model) in message and "'gpt2'" in message and "'llama'" in message
    assert "\n" not in message


def test_a_file_that_is_no_gguf(tmp_path: Path):
    with pytest.raises(GGUFError, match=r"missing\.gguf"):
        Tokenizer.from_gguf(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (tiny_bpe(tokens=None), r"'tokenizer\.ggml\.tokens' is missing"),
        (tiny_bpe(tokens=[]), r"'tokenizer\.ggml\.tokens' is not a list of strings"),
        (tiny_bpe(tokens=np.arange(3)), r"'tokenizer\.ggml\.tokens' is not a list of strings"),
        (tiny_bpe(merges=None), r"'tokenizer\.ggml\.merges' is missing"),
        (tiny_bpe(merges=7), r"'tokenizer\.ggml\.merges' is not a list of strings"),
        (tiny_bpe(token_type=np.ones(9, np.int32)), "has 9 numbers, expected 279"),
        (tiny_spm(scores=np.ones(9, np.float32)), "has 9 numbers, expected 291"),
        (tiny_spm(scores="high"), "has str, expected 291"),
    ],
)
def test_damaged_metadata(metadata: dict[str, Any], message: str):
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_metadata(metadata)
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_are_as_good_as_none():
    tokenizer = Tokenizer.from_metadata(tiny_bpe(bos_token_id=10**6, eos_token_id=-1))
    assert tokenizer.bos_id is None and tokenizer.eos_id is None
    assert tokenizer.bos_token == tokenizer.eos_token == ""
    assert tokenizer.encode("hello", add_bos=True) == [263]


def test_empty_tokens_and_equal_tokens_are_no_trouble():
    metadata = tiny_spm()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[5] = ""  # instead of <0x01>
    tokens[6] = tokens[7]
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.tokens[5] == "[EMPTY_5]"
    assert tokenizer.encode("\x03", add_bos=False) == [260, 7]


@pytest.mark.parametrize(("name", "pre"), [("missing", None), ("'brand-new'", "brand-new")])
def test_an_unknown_pre_tokenizer_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, name: str, pre: str | None
):
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        tokenizer = Tokenizer.from_metadata(tiny_bpe(pre=pre))
    assert len(caplog.records) == 1 and f"tokenizer.ggml.pre is {name}" in caplog.text
    # The default cuts digits into threes, and line breaks one by one.
    ids = tokenizer.encode("123123\n\nhello")
    assert [tokenizer.tokens[i] for i in ids] == ["123", "123", "Ċ", "Ċ", "hello"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (tiny_bpe("llama-bpe"), True),
        (tiny_bpe("tekken"), True),
        (tiny_bpe("qwen2"), False),
        (tiny_bpe("gpt-2"), False),
        (tiny_spm(), True),
        (tiny_bpe("qwen2", add_bos_token=True), True),
        (tiny_bpe("llama-bpe", add_bos_token=False), False),
        (tiny_spm(add_bos_token=False), False),
    ],
)
def test_bos_where_the_file_or_else_its_kind_says_so(metadata: dict[str, Any], expected: bool):
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.add_bos is expected
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_id) is expected
    assert tokenizer.encode("hello", add_bos=True)[0] == tokenizer.bos_id
    assert tokenizer.encode("hello", add_bos=False)[0] != tokenizer.bos_id
    assert tokenizer.encode("") == [tokenizer.bos_id] * expected


@pytest.mark.parametrize("metadata", [tiny_bpe(), tiny_spm()])
def test_never_two_bos(metadata: dict[str, Any]):
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.bos_id is not None
    prompt = tokenizer.bos_token + "hello"
    for add_bos in (None, True, False):
        ids = tokenizer.encode(prompt, add_bos=add_bos, parse_special=True)
        assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    # What a user typed is no BOS, so one is added.
    assert tokenizer.encode(prompt).count(tokenizer.bos_id) == 1


def test_eos_at_the_end_where_the_file_says_so():
    tokenizer = Tokenizer.from_metadata(tiny_spm(add_eos_token=True))
    assert tokenizer.encode("hello") == [1, 281, 2]
    assert tokenizer.encode("hello</s>", parse_special=True) == [1, 281, 2]
    assert tokenizer.encode("hello", add_bos=True) == [1, 281]


def test_sentencepiece_has_its_special_tokens_in_known_places():
    missing = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
    tokenizer = Tokenizer.from_metadata(tiny_spm(**missing))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert Tokenizer.from_metadata(tiny_bpe(**missing)).bos_id is None


# What llama.cpp's llama_vocab_is_eog says, of the ids after those of tiny_bpe: 279, 280, ...
@pytest.mark.parametrize(
    ("names", "keys", "expected"),
    [
        ([], {}, {1}),
        (["<|im_start|>", "<|im_end|>", "<|eom_id|>"], {}, {1, 280, 281}),
        (["<x>"], {"eot_token_id": 279}, {1, 279}),
        (["<x>"], {"eom_token_id": 279}, {1, 279}),
        (["<x>"], {"eos_token_id": 279}, {1, 279}),  # <|end_of_text|> by its name
        (["<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"], {}, {1, 280, 281}),
        (["<x>", "<|fim_pad|>"], {"fim_pad_token_id": 279}, {1, 279}),
        (["<|end|>"], {}, {1, 279}),
        (["<|end|>", "<|return|>", "<|call|>"], {}, {1, 280, 281}),
        (["<|end|>", "<|flush|>", "<|calls|>"], {}, {1, 280, 281}),
        (["</s>"], {}, {1, 279}),
        (["</s>", "<|tool_response>"], {}, {1, 280}),
    ],
)
def test_what_ends_generation(names: list[str], keys: dict[str, Any], expected: set[int]):
    tokenizer = with_tokens(tiny_bpe(**keys), dict.fromkeys(names, CONTROL))
    assert tokenizer.eog_ids == expected


def test_a_name_that_ends_generation_makes_a_control_token():
    tokenizer = with_tokens(tiny_bpe(), {"<|im_end|>": NORMAL, "<fim_prefix>": NORMAL})
    for token_id, text in ((279, "<|im_end|>"), (280, "<fim_prefix>")):
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == [token_id]
        assert token_id not in tokenizer.encode(text)
        assert tokenizer.token_bytes(token_id) == b""


def test_marks_of_an_answer_are_shown_but_not_taken_from_text():
    tokenizer = with_tokens(tiny_bpe(), {"<|channel|>": CONTROL})
    assert tokenizer.encode("<|channel|>", add_bos=False, parse_special=True) == [279]
    assert 279 not in tokenizer.encode("<|channel|>")
    assert tokenizer.decode([279, 263]) == "<|channel|>hello"


def test_decoding_leaves_control_tokens_out_or_writes_their_names():
    ids = [0, 263, 268, 2, 1]
    assert BPE.decode(ids) == "hello world<tool>"
    assert BPE.decode(ids, skip_special=False) == "<|begin|>hello world<tool><|end_of_text|>"
    assert SPM.decode([1, 281, 286, 2]) == "hello world"
    assert SPM.decode([1, 281, 286, 2], skip_special=False) == "<s> hello world</s>"


def test_the_space_in_front_is_taken_off_unless_the_text_goes_on():
    ids = [281, 286]  # "▁hello", "▁world"
    assert SPM.decode(ids) == "hello world"
    assert SPM.decode(ids, continues=True) == " hello world"
    assert SPM.decode([287]) == " "  # of two spaces one is the text's own
    assert SPM.decode([280]) == "hello"
    assert BPE.decode([268]) == " world"
    decoder = SPM.stream_decoder(continues=True)
    assert decoder.push(281) == " hello"


def test_bytes_of_tokens():
    assert BPE.token_bytes(BPE.tokens.index("Ġworld")) == b" world"
    assert BPE.token_bytes(BPE.tokens.index("æ")) == b"\xe6"
    assert SPM.token_bytes(SPM.tokens.index("<0xE6>")) == b"\xe6"
    assert SPM.token_bytes(SPM.tokens.index("▁world")) == b" world"
    assert SPM.token_bytes(0) == SPM.token_bytes(1) == b""
    assert BPE.token_bytes(BPE.tokens.index("<tool>")) == b"<tool>"
    # A token outside the alphabet of bytes stands for itself; one that is not used, for nothing.
    extra = with_tokens(tiny_bpe(), {"漢 a": NORMAL, "[PAD]": UNUSED, "<0x41>": 6, "<0xZZ>": 6})
    assert [extra.token_bytes(i) for i in range(279, 283)] == [
        "漢 a".encode(),
        b"",
        b"A",
        b"<0xZZ>",
    ]


@pytest.mark.parametrize("token_id", [-1, 279, 10**12])
def test_ids_that_there_are_not(token_id: int):
    with pytest.raises(TokenizerError, match=rf"token id {token_id} is not in \[0, 279\)"):
        BPE.decode([263, token_id])


@given(st.lists(st.integers(0, 278)))
def test_streaming_gives_what_decoding_gives(ids: list[int]):
    for tokenizer in (BPE, SPM):
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(token_id) for token_id in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@given(st.text())
def test_streaming_gives_whole_characters(text: str):
    decoder = BPE.stream_decoder()
    so_far = ""
    for token_id in BPE.encode(text, add_bos=False):
        so_far += decoder.push(token_id)
        assert text.startswith(so_far)
    assert decoder.flush() == "" and so_far == text


def test_streaming_ends_with_what_is_left():
    decoder = BPE.stream_decoder()
    first, second, third = BPE.encode("漢", add_bos=False)
    assert [decoder.push(i) for i in (first, second, third, first, second)] == [
        "",
        "",
        "漢",
        "",
        "",
    ]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize("tokenizer", [BPE, SPM])
def test_literal_stretches_hold_no_control_token(tokenizer: Tokenizer):
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    text = f"{eos}hello{bos}{eos} <tool>{eos}"
    start = text.index("hello")
    stop = text.index("<tool>") + len("<tool>")
    ids = tokenizer.encode(text, parse_special=True, literal=[(start, stop)])
    assert ids.count(tokenizer.bos_id or 0) == (1 if tokenizer.add_bos else 0)
    assert ids.count(tokenizer.eos_id or 0) == 2
    assert tokenizer.tokens.index("<tool>") in ids
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "").replace(
        eos, "", 1
    ).removesuffix(eos)
    # A part is enough.
    inside = [(len(eos) - 1, len(eos))]
    ids = tokenizer.encode(eos, add_bos=False, parse_special=True, literal=inside)
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == eos


def test_control_texts():
    assert BPE.control_texts == ["<|end_of_text|>", "<|begin|>"]
    assert SPM.control_texts == ["<unk>", "</s>", "<s>"]


def special(*texts: str, strip_right: bool = False) -> list[SpecialToken]:
    return sort_special(
        SpecialToken(text=text, token_id=token_id, control=True, strip_right=strip_right)
        for token_id, text in enumerate(texts)
    )


@pytest.mark.parametrize(
    ("texts", "text", "expected"),
    [
        (["<a>"], "", []),
        (["<a>"], "x<a><a>y", ["x", 0, 0, "y"]),
        (["aa"], "aaaaa", [0, 0, "a"]),
        (["<a>", "<a>>"], "<a>><a>", [1, 0]),
        (["abc", "bcde"], "abcde abc", ["a", 1, " ", 0]),  # the longer first, though further right
        (["\n", "\n\n", "\n\n\n"], "\n\n\n\n\nx", [2, 1, "x"]),
        (["é", "ab"], "éab", [0, 1]),
    ],
)
def test_splits_at_special_tokens(texts: list[str], text: str, expected: list[str | int]):
    assert split_special(text, special(*texts)) == expected


def test_special_tokens_can_swallow_white_space():
    tokens = special("<a>", "\n<b>", strip_right=True)
    assert split_special("<a> \t x<a>  \n<b>", tokens) == [0, "x", 0, 1]


@given(st.text("ab<>"), st.lists(st.text("ab<>", min_size=1, max_size=3), unique=True, max_size=6))
def test_splitting_loses_nothing(text: str, texts: list[str]):
    pieces = split_special(text, special(*texts))
    assert "".join(texts[p] if isinstance(p, int) else p for p in pieces) == text
    assert not any(t in p for t in texts for p in pieces if isinstance(p, str))
