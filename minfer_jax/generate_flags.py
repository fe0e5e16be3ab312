"""The flags of `python -m minfer_jax.generate`, and what they come to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

from minfer_jax import sources
from minfer_jax.context import CHUNK, MAX_TOKENS, N_CTX
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.sampling import SamplingParams
from minfer_jax.usage import UsageError, read_flags

_NUMBERS: tuple[tuple[str, float | int | None, str], ...] = (  # name, default, help
    ("temp", SamplingParams.temperature, "temperature of the draw; 0 takes the likeliest token"),
    ("top-k", SamplingParams.top_k, "keep the k likeliest tokens; 0 keeps all"),
    ("top-p", SamplingParams.top_p, "keep the likeliest up to this probability; 1 is off"),
    ("min-p", SamplingParams.min_p, "drop what is below this times the top probability"),
    ("repeat-penalty", SamplingParams.repeat_penalty, "weaken tokens among the last 64; 1 is off"),
    (
        "frequency-penalty",
        SamplingParams.frequency_penalty,
        "taken from a recent token's logit, per occurrence",
    ),
    (
        "presence-penalty",
        SamplingParams.presence_penalty,
        "taken from a recent token's logit, once",
    ),
    ("seed", SamplingParams.seed, "same seed, same text"),
    ("n-predict", MAX_TOKENS, "tokens at most; -1 for all that fit"),
    ("n-ctx", N_CTX, "positions of context, prompt included"),
    ("prefill-chunk", CHUNK, "prompt tokens that are run at once"),
    ("keep", 0, "prompt tokens that no shift drops; -1 for all"),
    ("threads", None, "CPU threads; all if not given"),
)
_LEAST = (("n-predict", -1), ("n-ctx", 1), ("prefill-chunk", 1), ("keep", -1), ("threads", 1))
_SHORT = {"n-predict": "n", "threads": "t"}
_SWITCHES = (
    ("greedy", "the same as --temp 0"),
    ("no-template", "the model sees the prompt as it is"),
    ("context-shift", "when the context is full, drop half and go on"),
    ("meta", "show metadata and memory, then generate"),
)
_TEXTS = (
    ("stop", "end before this text; may be repeated"),
    ("system", "a system message before the prompt"),
    ("precision", f"{' or '.join(PRECISIONS)}: float32 throughout, or fast"),
    ("cache-type", f"{', '.join(CACHE_TYPES)} [f16; at highest f32]"),
)


def _define() -> flags.FlagValues:
    """The flags, none of them set."""
    values = flags.FlagValues()
    for name, default, text in _NUMBERS:
        short = _SHORT.get(name)
        if isinstance(default, float):
            flags.DEFINE_float(name, default, text, short_name=short, flag_values=values)
        else:
            flags.DEFINE_integer(name, default, text, short_name=short, flag_values=values)
    for name, text in _SWITCHES:
        flags.DEFINE_bool(name, False, text, flag_values=values)
    texts = dict(_TEXTS)
    flags.DEFINE_multi_string("stop", [], texts["stop"], flag_values=values)
    flags.DEFINE_string("system", None, texts["system"], flag_values=values)
    enums = (("precision", "default", PRECISIONS), ("cache-type", None, tuple(CACHE_TYPES)))
    for name, default, choices in enums:
        flags.DEFINE_enum(name, default, choices, texts[name], flag_values=values)
    return values


_TEXT = """\
usage: python -m minfer_jax.generate [flags] [MODEL] [PROMPT]

Writes the answer to standard output, all else to standard error.
MODEL is a GGUF file, a cached name, or an alias ({aliases}); if left out,
{default}. PROMPT is read from standard input if left out; a lone argument with
a space in it is a PROMPT.

  python -m minfer_jax.generate smollm2 "Why is the sky blue?"
  python -m minfer_jax.generate ./model.gguf "Once upon" --no-template -n 64
  python -m minfer_jax.generate gemma3 --greedy --stop END < ask.txt > out.txt

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        model: a model reference.
        prompt: None to read standard input.
        system: a system message, or None.
        template: False to leave the chat template out, None to let the file decide.
        sampling: how to draw.
        max_tokens: tokens at most; None for as many as the context holds, or without end where
            it shifts.
        stop: strings that end the text.
        n_ctx: positions of context.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        prefill_chunk: prompt tokens that are run at once.
        context_shift: go on when the context is full.
        keep: tokens of the prompt that no shift drops, besides BOS; all of it if negative.
        threads: CPU threads, or None for all.
        meta: show metadata and memory.
    """

    model: str
    prompt: str | None
    system: str | None
    template: bool | None
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    n_ctx: int
    precision: str
    cache_type: str | None
    prefill_chunk: int
    context_shift: bool
    keep: int
    threads: int | None
    meta: bool


def help_text() -> str:
    """Usage, examples and flags."""
    numbers = [(n, text if d is None else f"{text} [{d}]") for n, d, text in _NUMBERS]
    rows = [
        f"  {f'-{_SHORT[name]}, ' if name in _SHORT else ''}--{name}".ljust(22) + text
        for name, text in (*numbers, *_TEXTS, *_SWITCHES)
    ]
    return _TEXT.format(
        aliases=", ".join(sources.ALIASES), default=sources.DEFAULT_MODEL, flags="\n".join(rows)
    )


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown or a value out of its range.
    """
    values = _define()
    positional = read_flags(values, argv)
    value: dict[str, Any] = values.flag_values_dict()
    try:
        sampling = SamplingParams(
            temperature=0.0 if value["greedy"] else value["temp"],
            top_k=value["top-k"],
            top_p=value["top-p"],
            min_p=value["min-p"],
            repeat_penalty=value["repeat-penalty"],
            frequency_penalty=value["frequency-penalty"],
            presence_penalty=value["presence-penalty"],
            seed=value["seed"],
        )
    except ValueError as e:
        raise UsageError(str(e)) from None
    for name, least in _LEAST:
        if value[name] is not None and value[name] < least:
            raise UsageError(f"--{name} is {value[name]}, expected {least} or more")
    if value["keep"] and not value["context-shift"]:
        raise UsageError("--keep needs --context-shift: without it nothing is dropped")
    if value["no-template"] and value["system"] is not None:
        raise UsageError("--system needs the chat template: leave out --no-template")
    model, prompt = _model_and_prompt(positional)
    return Options(
        model=model,
        prompt=prompt,
        system=value["system"],
        template=False if value["no-template"] else None,
        sampling=sampling,
        max_tokens=None if value["n-predict"] < 0 else value["n-predict"],
        stop=tuple(value["stop"]),
        n_ctx=value["n-ctx"],
        precision=value["precision"],
        cache_type=value["cache-type"],
        prefill_chunk=value["prefill-chunk"],
        context_shift=value["context-shift"],
        keep=value["keep"],
        threads=value["threads"],
        meta=value["meta"],
    )


def _model_and_prompt(positional: list[str]) -> tuple[str, str | None]:
    """Words after the model make the prompt; a lone argument with a space is a prompt."""
    words = [w.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for w in positional]
    if not words:
        return sources.DEFAULT_MODEL, None
    if len(words) == 1 and _is_prompt(positional[0]):
        return sources.DEFAULT_MODEL, words[0]
    return positional[0], " ".join(words[1:]) if len(words) > 1 else None


def _is_prompt(word: str) -> bool:
    """Whether a lone argument is words to answer: no model reference but a path has a space."""
    return " " in word and not word.endswith(".gguf") and not os.path.exists(word)
