"""What an answer must look like: a JSON schema, a regular expression, a grammar.

llguidance follows the text and says which tokens may come next; `Matcher` hands that to the engine
as a bit mask. A token that ends the answer is among them exactly where the text is complete. So an
answer that ends by itself always fits; one that is cut, by max_tokens or a full context, is the
beginning of one that does, as the run's `finish_reason`, "length", tells.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from minfer_jax.tokenizer import Tokenizer
from minfer_jax.vocab import CONTROL, UNKNOWN, UNUSED

MOST_TEXT = 1 << 20  # characters of a schema or an expression
MOST_GRAMMAR = 1 << 18  # of a grammar: the time that llguidance takes grows with the square
_NOTHING = "no token of the vocabulary can go on from here"
_MOST_MESSAGE = 400  # characters
# A regex once more, and a picture of where in it: what llguidance says before it says why.
_POINTED = re.compile(r"at \d+\(\d+\): invalid regex .*\nerror: ", re.DOTALL)
# Between the parts of JSON; without a bound, small models write white space until they are stopped.
_SPACE = r" |\n[ \t]{0,24}"

# What a grammar may cost, in llguidance's units: at most a few seconds when it is built, some
# milliseconds a token, and a few hundred megabytes. These are its defaults; without the dump of its
# state that would follow an error.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class ConstraintError(ValueError):
    """A constraint that cannot be used, or that no text can go on to meet. One line."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What an answer must look like, whatever the model.

    Attributes:
        grammar: the same as llguidance takes it.
    """

    grammar: str

    @classmethod
    def from_json_schema(cls, schema: str | Mapping[str, Any] | bool) -> "Constraint":
        """Answers that are JSON and conform to a schema; `True` stands for any JSON.

        Properties come in the schema's order. What llguidance cannot follow is refused; its own
        options may be in the schema, under "x-guidance".

        Args:
            schema: as JSON text, or as what such text stands for.

        Raises:
            ConstraintError: it is no JSON, no schema, or says what llguidance does not know.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            _check_text("JSON schema", text)
            value = json.loads(text)
            if value is True:
                value = {}
            if isinstance(value, dict):  # what else it is, llguidance says
                value = _with_bounded_space(value)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value))
        except ConstraintError:
            raise
        except (ValueError, TypeError, RecursionError) as e:
            raise ConstraintError(f"JSON schema: {_line(str(e))}") from None
        return cls(grammar=_checked("JSON schema", grammar))

    @classmethod
    def from_regex(cls, regex: str) -> "Constraint":
        """Answers that a regular expression matches from end to end.

        Raises:
            ConstraintError: it is none, in the syntax of Rust's `regex`.
        """
        _check_text("regex", regex)
        return cls(grammar=_checked("regex", llguidance.LLMatcher.grammar_from_regex(regex)))

    @classmethod
    def from_grammar(cls, grammar: str) -> "Constraint":
        """Answers that a grammar derives.

        Args:
            grammar: GBNF, as llama.cpp reads it, with a rule named root; or llguidance's variant of
                Lark, with a rule named start; or llguidance's own JSON, {"grammars": [..]}.

        Raises:
            ConstraintError: it is none of these.
        """
        _check_text("grammar", grammar, MOST_GRAMMAR)
        if grammar.lstrip().startswith("{"):
            return cls(grammar=_checked("grammar", grammar))
        try:
            lark = any_to_lark(grammar)
        except Exception as e:  # noqa: BLE001 - that is what the converter raises
            raise ConstraintError(f"grammar: {_line(str(e))}") from None
        return cls(grammar=_checked("grammar", llguidance.LLMatcher.grammar_from_lark(lark)))


def _with_bounded_space(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, unless it says itself what white space there may be."""
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict) or any(name.startswith("whitespace") for name in given):
        return schema
    return {**schema, "x-guidance": {**given, "whitespace_pattern": _SPACE}}


class Vocabulary:
    """A tokenizer as llguidance needs it. Takes 0.3 seconds for 49152 tokens, 2 for 262144."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        """Reads all tokens.

        Args:
            tokenizer: of the model.
            n_vocab: rows of its logits.

        Raises:
            ConstraintError: no token ends an answer.
        """
        ends = sorted(i for i in tokenizer.eog_ids if i < n_vocab)
        if not ends:
            raise ConstraintError("the model has no token that ends an answer: give no constraint")
        self.n_vocab = n_vocab
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokenizer, n_vocab, ends[0])),
            eos_token=ends,
        )

    def matcher(self, constraint: Constraint) -> "Matcher":
        """Follows a text from its beginning.

        Raises:
            ConstraintError: the constraint takes more than llguidance is given.
        """
        matcher = llguidance.LLMatcher(
            self._tokens, constraint.grammar, log_level=0, limits=_LIMITS
        )
        return Matcher(matcher, self.n_vocab)


class Matcher:
    """A text in progress under a constraint: what the engine calls a TokenConstraint."""

    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int) -> None:
        """See `Vocabulary.matcher`."""
        self._matcher = matcher
        self._mask = np.zeros(-(-n_vocab // 32), np.uint32)
        self._check()

    def mask(self) -> np.ndarray:
        """Tokens that may come next: bit i of word w is token 32 w + i.

        Returns:
            uint32 [ceil(V / 32)], a new array.

        Raises:
            ConstraintError: no token may, or to find out takes more than llguidance is given.
        """
        mask = self._mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if not mask.any():
            raise ConstraintError(f"the constraint: {_NOTHING}")
        return mask.copy()

    def accept(self, token: int) -> None:
        """Go on by a token of the mask that does not end the answer.

        Raises:
            ConstraintError: it is not allowed.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can be added."""
        return self._matcher.is_stopped()

    def copy(self) -> "Matcher":
        """Another at the same place of the same text."""
        return Matcher(self._matcher.deep_copy(), 32 * len(self._mask))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the constraint: {_line(self._matcher.get_error())}")


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end: int) -> None:
        special = (CONTROL, UNKNOWN, UNUSED)
        kinds = tokenizer.vocab.kinds[:n_vocab]
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = [i for i, kind in enumerate(kinds) if kind in special]
        self.tokens = [tokenizer.token_bytes(i) for i in range(len(kinds))]
        self.tokens += [b""] * (n_vocab - len(kinds))  # never allowed
        for i in self.special_token_ids:  # a grammar may ask for them by name
            self.tokens[i] = tokenizer.tokens[i].encode("utf-8", "surrogateescape")
        self._encoder = tokenizer.encoder

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that goes on from another."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encoder.encode(text)


def _check_text(what: str, text: str, most: int = MOST_TEXT) -> None:
    if not isinstance(text, str):
        raise ConstraintError(f"{what}: it is {type(text).__name__}, expected text")
    if len(text) > most:
        raise ConstraintError(f"{what}: it has {len(text)} characters, at most {most} do")
    if half := next((c for c in text if "\ud800" <= c <= "\udfff"), None):
        raise ConstraintError(f"{what}: it has {half!r}, which is no character")


def _checked(what: str, grammar: str) -> str:
    """The grammar, if llguidance takes it."""
    if message := llguidance.LLMatcher.validate_grammar(grammar, limits=_LIMITS):
        if what == "regex":
            message = _POINTED.sub("", message)
        raise ConstraintError(f"{what}: {_line(message)}")
    return grammar


def _line(message: str) -> str:
    """What llguidance says, in one line: without the picture of where it is, or where Rust was."""
    message = re.split("<backtrace>|<non-verbose", message)[0]
    if message.strip() == "NoExtensionBias":
        return _NOTHING
    message = message.replace("panic: ", "it is too much for llguidance: ", 1)
    lines = [line.strip() for line in message.splitlines()]
    said = [x for x in lines if x.strip("^ ") and not x.partition("|")[0].strip().isdigit()]
    text = " ".join(said)[:_MOST_MESSAGE]
    return text if text.isprintable() else ascii(text)
