"""The flags of every command that talks to a model, and what they come to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minfer_jax import sources
from minfer_jax.context import CHUNK, MAX_TOKENS, N_CTX
from minfer_jax.flag_table import Flag
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.sampling import SamplingParams
from minfer_jax.usage import UsageError


def _sampling(name: str, field: str, text: str) -> Flag:
    default = getattr(SamplingParams, field)
    return Flag(name=name, kind=type(default), text=text, default=default)


SAMPLING_FLAGS = (
    _sampling("temp", "temperature", "temperature of the draw; 0 takes the likeliest token"),
    _sampling("top-k", "top_k", "keep the k likeliest tokens; 0 keeps all"),
    _sampling("top-p", "top_p", "keep the likeliest up to this probability; 1 is off"),
    _sampling("min-p", "min_p", "drop what is below this times the top probability"),
    _sampling("repeat-penalty", "repeat_penalty", "weaken tokens among the last 64; 1 is off"),
    _sampling(
        "frequency-penalty",
        "frequency_penalty",
        "taken from a recent token's logit, per occurrence",
    ),
    _sampling("presence-penalty", "presence_penalty", "taken from a recent token's logit, once"),
    _sampling("seed", "seed", "same seed, same text"),
    Flag(name="greedy", kind=bool, text="the same as --temp 0", default=False),
)
MODEL_FLAGS = (
    *SAMPLING_FLAGS,
    Flag(
        name="n-predict",
        kind=int,
        text="tokens at most; -1 for all that fit",
        default=MAX_TOKENS,
        short="n",
        least=-1,
    ),
    Flag(name="stop", kind=list, text="end before this text; may be repeated"),
    Flag(name="system", kind=str, text="a system message before the prompt"),
    Flag(
        name="n-ctx",
        kind=int,
        text="positions of context, prompt included",
        default=N_CTX,
        least=1,
    ),
    Flag(
        name="prefill-chunk",
        kind=int,
        text="prompt tokens that are run at once",
        default=CHUNK,
        least=1,
    ),
    Flag(name="threads", kind=int, text="CPU threads; all if not given", short="t", least=1),
    Flag(
        name="precision",
        kind=str,
        text=f"{' or '.join(PRECISIONS)}: float32 throughout, or fast",
        default="default",
        choices=PRECISIONS,
    ),
    Flag(
        name="cache-type",
        kind=str,
        text=f"{', '.join(CACHE_TYPES)} [f16; at highest f32]",
        choices=tuple(CACHE_TYPES),
    ),
    Flag(name="meta", kind=bool, text="show metadata and memory at the start", default=False),
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model to load and how, and how to draw from it.

    Attributes:
        model: a model reference.
        prompt: the words after it, or None.
        system: a system message, or None.
        sampling: how to draw.
        max_tokens: tokens at most; None for as many as the context holds, or without end where
            it shifts.
        stop: strings that end the text.
        n_ctx: positions of context.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        prefill_chunk: prompt tokens that are run at once.
        threads: CPU threads, or None for all.
        meta: show metadata and memory.
    """

    model: str
    prompt: str | None
    system: str | None
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    n_ctx: int
    precision: str
    cache_type: str | None
    prefill_chunk: int
    threads: int | None
    meta: bool


def model_options(value: dict[str, Any], positional: Sequence[str]) -> ModelOptions:
    """What the flags of MODEL_FLAGS and the positional arguments come to.

    Args:
        value: of each flag, as `flag_table.read` gives it.
        positional: [MODEL] [PROMPT].

    Raises:
        UsageError: a value is out of its range.
    """
    model, prompt = _model_and_prompt(positional)
    return ModelOptions(
        model=model,
        prompt=prompt,
        system=value["system"],
        sampling=_sampling_params(value),
        max_tokens=None if value["n-predict"] < 0 else value["n-predict"],
        stop=tuple(value["stop"]),
        n_ctx=value["n-ctx"],
        precision=value["precision"],
        cache_type=value["cache-type"],
        prefill_chunk=value["prefill-chunk"],
        threads=value["threads"],
        meta=value["meta"],
    )


def _sampling_params(value: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(
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


def _model_and_prompt(positional: Sequence[str]) -> tuple[str, str | None]:
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
