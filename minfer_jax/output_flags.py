"""The flags that say what an answer must be like, and what is told about it."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minfer_jax.batch import SIZES
from minfer_jax.decode_extended import N_TOP
from minfer_jax.flag_table import Flag
from minfer_jax.model_flags import as_text
from minfer_jax.prompt_file import read_text
from minfer_jax.speculation import MOST
from minfer_jax.usage import UsageError

if TYPE_CHECKING:
    from minfer_jax.constraint import Constraint

_NO_BREAKER = "none"  # llama.cpp's word
_BIAS = re.compile(r"(?P<token>\d{1,10})(?P<value>[+-](\d+(\.\d*)?([eE][+-]?\d+)?|inf))")

OUTPUT_FLAGS = (
    Flag(
        name="json-schema",
        kind=str,
        text="answer in JSON of this schema; @FILE reads it",
        main=True,
    ),
    Flag(name="regex", kind=str, text="answer in what this expression matches"),
    Flag(name="grammar", kind=str, text="answer in this GBNF or Lark grammar, or @FILE"),
    Flag(name="ignore-eos", kind=bool, text="never end by itself", default=False),
    Flag(name="logit-bias", kind=list, text="ID+N or ID-N: add to a token's logit; -inf bans it"),
    Flag(name="dry-sequence-breaker", kind=list, text="DRY's phrases end at this; or none"),
    Flag(name="logprobs", kind=int, text="tell tokens with N alternatives, as JSON", least=0),
    Flag(name="samples", kind=int, text="so many answers, as JSON", default=1, least=1, main=True),
)
DRAFT_FLAGS = (
    Flag(
        name="draft-ngram",
        kind=bool,
        text="faster where the text repeats itself: guess from it",
        default=False,
        main=True,
    ),
    Flag(name="draft", kind=str, text="a smaller model of the same vocabulary that guesses"),
    Flag(
        name="draft-max",
        kind=int,
        text="guesses that are checked at once [7; of a model 4]",
        least=1,
    ),
)


def output_options(value: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LanguageModel.stream` that these flags stand for, where they are given.

    Args:
        value: of each of OUTPUT_FLAGS and DRAFT_FLAGS, by name. A draft model is yet to be loaded.

    Raises:
        UsageError: flags exclude each other; a schema, expression, grammar or bias is none; there
            are too many samples, logprobs or guesses.
    """
    for name, most in (("logprobs", N_TOP), ("samples", SIZES[-1])):
        if value[name] is not None and value[name] > most:
            raise UsageError(f"--{name} is {value[name]}, expected {most} at most")
    options = _draft_options(value)
    if value["ignore-eos"]:
        options["ignore_eos"] = True
    if value["logit-bias"]:
        options["logit_bias"] = _logit_bias(value["logit-bias"])
    if breakers := [as_text(word) for word in value["dry-sequence-breaker"]]:
        options["dry_breakers"] = () if breakers == [_NO_BREAKER] else tuple(breakers)
    given = [name for name in ("json-schema", "regex", "grammar") if value[name] is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]}: give one of them")
    if given:
        options["constraint"] = _constraint(given[0], value[given[0]])
    return options


def _draft_options(value: dict[str, Any]) -> dict[str, Any]:
    most = value["draft-max"]
    if value["draft-ngram"] and value["draft"] is not None:
        raise UsageError("--draft-ngram and --draft: give one of them")
    if most is not None and not value["draft-ngram"] and value["draft"] is None:
        raise UsageError("--draft-max needs --draft-ngram or --draft: nothing is guessed without")
    if most is not None and most > MOST:
        raise UsageError(f"--draft-max is {most}, expected {MOST} at most")
    return {"draft_ngram": most or True} if value["draft-ngram"] else {}


def _logit_bias(words: Sequence[str]) -> dict[int, float]:
    """Of several for a token the last counts."""
    bias = {}
    for word in words:
        match = _BIAS.fullmatch(word)
        if match is None or float(match["value"]) == math.inf:
            raise UsageError(
                f"--logit-bias is {word[:40]!r}, expected a token's id and a number with its sign,"
                " such as 15043+1.5, or 15043-inf to ban it"
            )
        bias[int(match["token"])] = float(match["value"])
    return bias


def _constraint(flag: str, word: str) -> "Constraint":
    from minfer_jax.constraint import Constraint, ConstraintError  # takes a tenth of a second

    make = {
        "json-schema": Constraint.from_json_schema,
        "regex": Constraint.from_regex,
        "grammar": Constraint.from_grammar,
    }
    text = as_text(word)
    if text.startswith("@") and flag != "regex":
        text = read_text(word[1:], f"the file of --{flag}")
    try:
        return make[flag](text)
    except ConstraintError as e:
        raise UsageError(f"--{flag} is no {e}") from None
