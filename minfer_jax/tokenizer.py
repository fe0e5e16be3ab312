"""Text to token ids and back, as the GGUF file of a model says.

    vocab.py            what the tokens are
    special_tokens.py   finds tokens like <|im_end|> in a text
    bpe.py, spm.py      the two ways in which what is between them becomes ids
    pretokenizer.py     how bpe.py cuts text first
    stream_decoder.py   ids to text as they come

The ids are those of llama.cpp, but for two things. Text never becomes a control token unless asked
(there, the merges of some vocabularies lead to one), and no text ever gets two BOS.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from minfer_jax.bpe import CHARACTER_BYTES, BytePairEncoder
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from minfer_jax.special_tokens import SpecialToken, sort_special, split_special
from minfer_jax.spm import SentencePieceEncoder
from minfer_jax.stream_decoder import StreamDecoder
from minfer_jax.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenizerError,
    Vocab,
    number_array,
    read_flag,
    read_vocab,
    string_list,
)

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerError"]

# tokenizer.ggml.model, and what it stands for.
MODELS = {
    "gpt2": "byte pair encoding",
    "llama": "SentencePiece",
    "gemma4": "byte pair encoding over UTF-8",
}

logger = logging.getLogger("minfer_jax")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        vocab: the vocabulary.
        encoder: what turns text without special tokens into ids.
        byte_level: whether tokens are written in GPT-2's alphabet of bytes, rather than in UTF-8
            with U+2581 for the space.
        add_bos: whether a text begins with BOS where the caller does not say.
        add_space_prefix: whether text is given a space in front.
        user_defined: tokens that are looked for in every text.
        special: tokens that are looked for where special tokens are asked for.
    """

    vocab: Vocab = field(repr=False)
    encoder: BytePairEncoder | SentencePieceEncoder = field(repr=False)
    byte_level: bool
    add_bos: bool
    add_space_prefix: bool
    user_defined: Sequence[SpecialToken] = field(repr=False)
    special: Sequence[SpecialToken] = field(repr=False)

    @classmethod
    def from_gguf(cls, source: str | Path | GGUFFile) -> "Tokenizer":
        """Builds the tokenizer of a model.

        Args:
            source: the GGUF file, or where it is.

        Raises:
            GGUFError: there is no such file, or it is no GGUF file.
            TokenizerError: the file has no tokenizer, one of a kind that is not known, or a
                damaged one.
        """
        file = source if isinstance(source, GGUFFile) else open_gguf(source)
        try:
            return cls.from_metadata(file.metadata)
        except TokenizerError as error:
            raise TokenizerError(f"{file.path}: {error}") from None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's keys describe.

        Args:
            metadata: keys and values, as `GGUFFile.metadata` has them.

        Raises:
            TokenizerError: as for `from_gguf`.
        """
        model = metadata.get("tokenizer.ggml.model")
        if not isinstance(model, str) or model not in MODELS:
            kinds = ", ".join(f"'{name}' ({what})" for name, what in MODELS.items())
            raise TokenizerError(
                f"tokenizer.ggml.model is {ascii(model)[:80]}, expected one of {kinds}: "
                f"the model can be used by token ids only"
            )
        vocab = read_vocab(metadata)
        if model == "llama":
            encoder, row = _sentencepiece(metadata, vocab), None
        else:
            row = PRE_TOKENIZERS["gemma4"] if model == "gemma4" else _pre_tokenizer(metadata)
            encoder = _byte_pairs(metadata, vocab, row)

        default_bos = row is None or row.add_bos
        add_bos = default_bos if vocab.add_bos is None else vocab.add_bos
        if row is PRE_TOKENIZERS["gemma4"]:  # files say otherwise, and are wrong
            add_bos = True
        special = sort_special(
            SpecialToken(
                text=vocab.tokens[i],
                token_id=i,
                control=vocab.kinds[i] != USER_DEFINED,
                strip_right=i in vocab.strip_right,
            )
            for i in np.flatnonzero(np.isin(vocab.kinds, (CONTROL, USER_DEFINED, UNKNOWN))).tolist()
        )
        prefix = read_flag(metadata, "tokenizer.ggml.add_space_prefix")
        return cls(
            vocab=vocab,
            encoder=encoder,
            byte_level=row is not None and row.byte_level,
            add_bos=add_bos,
            add_space_prefix=row is None and prefix is not False,
            user_defined=[token for token in special if not token.control],
            special=special,
        )

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.vocab.tokens)

    @property
    def n_known(self) -> int:
        """Number of tokens without those at the end that only fill up the vocabulary."""
        used = np.flatnonzero(np.asarray(self.vocab.kinds) != UNUSED)
        return int(used[-1]) + 1 if used.size else self.n_vocab

    @property
    def tokens(self) -> Sequence[str]:
        """Text of each token, as in the file."""
        return self.vocab.tokens

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.vocab.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self.vocab.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens after which generation is over: end of text, of turn, of message, of file."""
        return self.vocab.eog_ids

    @property
    def bos_token(self) -> str:
        """Text of the token that begins a text, "" if there is none."""
        return "" if self.bos_id is None else self.tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        """Text of the token that ends a text, "" if there is none."""
        return "" if self.eos_id is None else self.tokens[self.eos_id]

    @property
    def control_texts(self) -> Sequence[str]:
        """Texts that `encode` turns into control tokens where asked, the longest first."""
        return [token.text for token in self.special if token.control]

    def encode(
        self,
        text: str,
        add_bos: bool | None = None,
        parse_special: bool = False,
        *,
        literal: Iterable[tuple[int, int]] = (),
        after: int | None = None,
    ) -> list[int]:
        """Turns text into ids.

        Args:
            text: any text; surrogates, which are no characters, become U+FFFD.
            add_bos: whether to begin with BOS, if the vocabulary has one and the text (with
                `parse_special`) does not begin with it already. None: what the file says, and
                then EOS at the end too if the file says that.
            parse_special: whether control tokens written in the text become those tokens. Only
                for text that the program wrote, such as a rendered chat template: what a user
                wrote must not end a turn. User-defined tokens are found either way.
            literal: stretches of the text, (start, stop) in characters, that someone else wrote:
                what is in them, even in part, becomes no control token.
            after: the token that the text goes on from, if it begins nowhere: then there is no BOS
                or EOS, and the vocabulary's space in front only where that token is a special one.

        Returns:
            Ids, each of them in [0, n_vocab).
        """
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        tokens = self.special if parse_special else self.user_defined
        ids: list[int] = []
        after_special = after is None or any(token.token_id == after for token in self.special)
        for piece in split_special(text, tokens, literal):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            else:
                prefix = " " if self.add_space_prefix and after_special else ""
                ids += self.encoder.encode(prefix + piece)
                after_special = False
        if after is not None:
            return ids

        bos_id, eos_id = self.bos_id, self.eos_id
        if self.add_bos if add_bos is None else add_bos:
            if bos_id is not None and ids[:1] != [bos_id]:
                ids.insert(0, bos_id)
        if add_bos is None and self.vocab.add_eos:
            if eos_id is not None and ids[-1:] != [eos_id]:
                ids.append(eos_id)
        return ids

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, continues: bool = False
    ) -> str:
        """Turns ids into text.

        Args:
            ids: ids in [0, n_vocab).
            skip_special: whether control tokens are left out, rather than written as their names.
            continues: as for `stream_decoder`.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: there is no such id.
        """
        decoder = StreamDecoder(
            self.token_bytes if skip_special else self._shown_bytes,
            strip_space=self.add_space_prefix and not continues,
        )
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, *, continues: bool = False) -> StreamDecoder:
        """Returns a decoder that turns ids into text as they come, leaving control tokens out.

        Args:
            continues: whether the text goes on from one before it, as what a model generates
                does. If not, the space that `encode` puts in front of a text, in vocabularies
                where it does, is taken off again.
        """
        return StreamDecoder(self.token_bytes, strip_space=self.add_space_prefix and not continues)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for in text, none for a control token.

        Args:
            token_id: id in [0, n_vocab).

        Raises:
            TokenizerError: there is no such id.
        """
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token id {token_id} is not in [0, {self.n_vocab})")
        text, kind = self.tokens[token_id], self.vocab.kinds[token_id]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == NORMAL and self.byte_level and all(c in CHARACTER_BYTES for c in text):
            return bytes(CHARACTER_BYTES[c] for c in text)
        if kind == NORMAL and not self.byte_level:
            text = text.replace(SPACE, " ")
        written_out = kind in (NORMAL, USER_DEFINED) or token_id in self.vocab.shown
        return _utf8(text) if written_out else b""

    def _shown_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        if self.vocab.kinds[token_id] in (CONTROL, UNKNOWN):
            return _utf8(self.tokens[token_id])
        return data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    logger.warning(
        "tokenizer.ggml.pre is %s; cutting text in the default way, which may not be the model's",
        "missing" if name is None else f"{ascii(name)[:80]}, which is not known",
    )
    return PRE_TOKENIZERS["default"]


def _byte_pairs(metadata: Mapping[str, Any], vocab: Vocab, row: PreTokenizer) -> BytePairEncoder:
    hidden = {i for i, kind in enumerate(vocab.kinds) if kind in (CONTROL, UNKNOWN)}
    return BytePairEncoder(
        vocab.ids,
        string_list(metadata, "tokenizer.ggml.merges"),
        row,
        frozenset(vocab.tokens[i] for i in hidden),
    )


def _sentencepiece(metadata: Mapping[str, Any], vocab: Vocab) -> SentencePieceEncoder:
    found = number_array(metadata, "tokenizer.ggml.scores", len(vocab.tokens))
    scores = [0.0] * len(vocab.tokens) if found is None else found.tolist()
    shown = (~np.isin(vocab.kinds, (CONTROL, UNKNOWN, BYTE))).tolist()
    by_text = dict(zip(compress(vocab.tokens, shown), compress(scores, shown), strict=True))
    return SentencePieceEncoder(by_text, vocab.ids, vocab.unknown_id)
