"""The vocabulary of a GGUF file: its tokens, what each of them is, and which of them are special.

A file says most of it under `tokenizer.ggml.*`. What it leaves out, and where converters are known
to have written something else than the model means, is decided as llama.cpp does: by the names of
the tokens in the tables below.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SPACE = "\u2581"  # stands for the space, in vocabularies that are not written in GPT-2's alphabet

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Turns end here, whatever type the file gives these tokens.
END_OF_GENERATION = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# Fill-in-the-middle: the key under which a file may name the token (with the older one, if any),
# and the names that stand for it in files that do not.
FILL_IN_THE_MIDDLE = {
    ("fim_pre_token_id", "prefix_token_id"): (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    ("fim_suf_token_id", "suffix_token_id"): (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    ("fim_mid_token_id", "middle_token_id"): (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    ("fim_pad_token_id",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep_token_id",): (
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
    ),
    ("fim_sep_token_id",): ("<|file_sep|>",),
}
# A model that writes one of these has begun another file: the answer is over.
FIM_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")

# Control tokens that are written out all the same: they mark the parts of gpt-oss's answers.
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Vocab:
    """Tokens by id, and the special ones among them.

    Attributes:
        tokens: text of each token, as in the file.
        kinds: what each of them is: NORMAL to BYTE above (0 where the file has something else).
        ids: text to id; of equal texts the last.
        bos_id: begin of text, or None.
        eos_id: end of text, or None.
        unknown_id: what stands for text that no token covers, or None.
        eog_ids: tokens after which generation is over.
        add_bos: whether the file asks for BOS before a text; None where it does not say.
        add_eos: whether the file asks for EOS after a text.
        shown: ids of control tokens that are written out like text.
        strip_right: ids of special tokens that swallow the white space after them.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool
    shown: frozenset[int]
    strip_right: frozenset[int]


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Reads the vocabulary from a file's metadata.

    Args:
        metadata: keys and values of the GGUF file, with `tokenizer.ggml.tokens` among them.

    Raises:
        TokenizerError: the tokens or their types are missing or damaged.
    """
    tokens = string_list(metadata, "tokenizer.ggml.tokens")
    if "" in tokens:  # as llama.cpp names them, so that each can be told from the others
        tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    kinds = _read_kinds(metadata, tokens)

    def token_id(*keys: str, default: int | None = None) -> int | None:
        for key in keys:
            found = metadata.get(f"tokenizer.ggml.{key}")
            if type(found) is int and 0 <= found < len(tokens):
                return found
        return default if default is not None and default < len(tokens) else None

    # SentencePiece models have these places for them; others have none unless they say so.
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    bos_id = token_id("bos_token_id", default=1 if is_sentencepiece else None)
    eos_id = token_id("eos_token_id", default=2 if is_sentencepiece else None)
    unknown_id = token_id("unknown_token_id", default=0 if is_sentencepiece else None)

    ends: set[int] = set()
    for keys, names in FILL_IN_THE_MIDDLE.items():
        fim_id = token_id(*keys)
        if fim_id is None:
            fim_id = next((ids[name] for name in names if name in ids), None)
            if fim_id is not None:
                kinds[fim_id] = CONTROL
        if fim_id is not None and keys[0] in FIM_ENDS:
            ends.add(fim_id)
    for name in END_OF_GENERATION:
        if name in ids:
            ends.add(ids[name])
            kinds[ids[name]] = CONTROL
    ends.update(
        found
        for found in (eos_id, token_id("eot_token_id"), token_id("eom_token_id"))
        if found is not None
    )
    shown = {ids[name] for name in SHOWN if name in ids}
    names = {tokens[index] for index in ends}
    # gpt-oss and Solar: the end of a message, after which the next one of the same turn follows.
    has_call = "<|call|>" in names or "<|calls|>" in names
    if "<|end|>" in names and has_call and ("<|return|>" in names or "<|flush|>" in names):
        ends.remove(ids["<|end|>"])
        shown.add(ids["<|end|>"])
    # Gemma 4: an HTML tag like any other.
    if "</s>" in names and ("<|tool_response>" in names or "<|plamo:eos|>" in names):
        ends.remove(ids["</s>"])
        kinds[ids["</s>"]] = NORMAL

    return Vocab(
        tokens=tokens,
        kinds=kinds,
        ids=ids,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown_id,
        eog_ids=frozenset(ends),
        add_bos=read_flag(metadata, "tokenizer.ggml.add_bos_token"),
        add_eos=bool(read_flag(metadata, "tokenizer.ggml.add_eos_token")),
        shown=frozenset(shown),
        strip_right=_stripping(metadata, ids, kinds),
    )


def string_list(metadata: Mapping[str, Any], key: str) -> list[str]:
    """Returns an array of strings, which must be there and not be empty; else TokenizerError."""
    found = metadata.get(key)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise TokenizerError(
            f"metadata key '{key}' is {'missing' if found is None else 'not a list of strings'}; "
            f"expected the strings of the model's tokenizer: convert the model again"
        )
    return found


def read_flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    """Returns a truth value, or None where the file has none (or something else)."""
    found = metadata.get(key)
    return found if isinstance(found, bool) else None


def number_array(metadata: Mapping[str, Any], key: str, size: int) -> np.ndarray | None:
    """Returns the first `size` numbers of an array, None if there is none; else TokenizerError."""
    found = metadata.get(key)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or len(found) < size:
        have = f"{len(found)} numbers" if isinstance(found, np.ndarray) else type(found).__name__
        raise TokenizerError(f"metadata key '{key}' has {have}, expected {size}: one a token")
    return found[:size]


def _read_kinds(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    found = number_array(metadata, "tokenizer.ggml.token_type", len(tokens))
    if found is None:
        return [NORMAL] * len(tokens)
    kinds: list[int] = found.tolist()
    for index in np.flatnonzero(found == BYTE).tolist():
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[index]):
            kinds[index] = NORMAL
    return kinds


def _stripping(
    metadata: Mapping[str, Any], ids: Mapping[str, int], kinds: Sequence[int]
) -> frozenset[int]:
    """Special tokens that swallow the white space after them: those of Phi-3, by its name."""
    name = metadata.get("general.name")
    if not isinstance(name, str) or not re.search("phi-?3", name.lower()):
        return frozenset()
    special = {i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED, UNKNOWN)}
    return frozenset(special - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")})
