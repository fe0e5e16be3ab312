"""The flags of `python -m minfer_jax.generate`, and what they come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minfer_jax.adapter_flags import ADAPTER_FLAGS
from minfer_jax.dump_flags import DUMP_FLAGS, GraphDump, graph_dump
from minfer_jax.flag_table import HELP_ALL, Flag, help_rows
from minfer_jax.model_flags import (
    ANSWER_FLAGS,
    LOAD_FLAGS,
    ModelOptions,
    grouped_help,
    help_of,
    model_options,
    read,
)
from minfer_jax.output_flags import DRAFT_FLAGS, OUTPUT_FLAGS, output_options
from minfer_jax.sampling_flags import SAMPLING_FLAGS
from minfer_jax.usage import UsageError

CONVERSATION = ("-cnv", "--cnv")
_NO_TEMPLATE = ("-no-template", "--no-template")

_PROMPT_FLAGS = (
    Flag(
        name="cnv",
        kind=bool,
        text="a conversation, as python -m minfer_jax.chat",
        default=False,
        main=True,
    ),
    *ANSWER_FLAGS,
    Flag(
        name="no-template",
        kind=bool,
        text="the model sees the prompt as it is",
        default=False,
        main=True,
    ),
    Flag(
        name="context-shift",
        kind=bool,
        text="when the context is full, drop half and go on",
        default=False,
    ),
    Flag(
        name="keep",
        kind=int,
        text="prompt tokens that no shift drops; -1 for all",
        default=0,
        least=-1,
        argument="n_keep",
    ),
)
_GROUPS = (  # as --help-all lists them
    ("The prompt and the answer", _PROMPT_FLAGS),
    ("What the answer must be, and what is told of it", OUTPUT_FLAGS),
    ("Sampling", SAMPLING_FLAGS),
    ("The model", LOAD_FLAGS),
    ("Adapters", ADAPTER_FLAGS),
    ("Speculation", DRAFT_FLAGS),
    ("What the model does, written down instead of an answer", DUMP_FLAGS),
)
FLAGS = tuple(flag for _, group in _GROUPS for flag in group)

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
        common: the model, and how to draw from it; without a prompt, standard input is read.
        template: False to leave the chat template out, None to let the file decide.
        context_shift: go on when the context is full.
        keep: tokens of the prompt that no shift drops, besides BOS; all of it if negative.
        extra: further arguments of `LanguageModel.stream`.
        logprobs: how many likely tokens to tell beside each of the answer's; None to write text.
        samples: how many answers; more than one are written as JSON.
        draft: reference of a smaller model that guesses, or None.
        draft_max: guesses that one call checks, or None for the usual number.
        graph: files that the model's graph is to be written to, instead of an answer.
    """

    common: ModelOptions
    template: bool | None
    context_shift: bool
    keep: int
    extra: Mapping[str, Any]
    logprobs: int | None
    samples: int
    draft: str | None
    draft_max: int | None
    graph: GraphDump


def help_text() -> str:
    """Usage, examples and the flags that most people want."""
    return help_of(_TEXT, help_rows([*(flag for flag in FLAGS if flag.main), HELP_ALL]))


def help_all() -> str:
    """Usage, examples, all flags and the presets."""
    return help_of(_TEXT, grouped_help(_GROUPS))


def conversation(argv: Sequence[str]) -> list[str] | None:
    """The command line of `python -m minfer_jax.chat`, if that is what is asked for.

    Args:
        argv: of this command. With --no-template it is left to `parse`, which refuses it.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = argv[1:end]
    if not any(w in CONVERSATION for w in words) or any(w in _NO_TEMPLATE for w in words):
        return None
    return [argv[0], *(word for word in words if word not in CONVERSATION), *argv[end:]]


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown or a value out of its range.
    """
    value, positional = read(FLAGS, argv)
    common = model_options(value, positional)
    if value["keep"] and not value["context-shift"]:
        raise UsageError("--keep needs --context-shift: without it nothing is dropped")
    if value["cnv"]:
        raise UsageError(
            "--cnv takes no value, and needs the chat template: leave out --no-template"
        )
    if value["no-template"] and common.system is not None:
        raise UsageError("--system needs the chat template: leave out --no-template")
    if value["samples"] > 1:
        for name in ("context-shift", "logprobs", "draft-ngram", "draft"):
            if value[name] is not None and value[name] is not False:
                raise UsageError(f"--samples draws answers side by side: leave out --{name}")
    return Options(
        common=common,
        template=False if value["no-template"] else None,
        context_shift=value["context-shift"],
        keep=value["keep"],
        extra=output_options(value),
        logprobs=value["logprobs"],
        samples=value["samples"],
        draft=value["draft"],
        draft_max=value["draft-max"],
        graph=graph_dump(value),
    )
