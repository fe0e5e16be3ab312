"""The flags of `python -m minfer_jax.generate`, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax import sources
from minfer_jax.flag_table import Flag, help_rows, read
from minfer_jax.model_flags import MODEL_FLAGS, ModelOptions, model_options
from minfer_jax.usage import UsageError

FLAGS = (
    *MODEL_FLAGS,
    Flag(name="no-template", kind=bool, text="the model sees the prompt as it is", default=False),
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
    ),
)

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
    """

    common: ModelOptions
    template: bool | None
    context_shift: bool
    keep: int


def help_text() -> str:
    """Usage, examples and flags."""
    return _TEXT.format(
        aliases=", ".join(sources.ALIASES), default=sources.DEFAULT_MODEL, flags=help_rows(FLAGS)
    )


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
    if value["no-template"] and common.system is not None:
        raise UsageError("--system needs the chat template: leave out --no-template")
    return Options(
        common=common,
        template=False if value["no-template"] else None,
        context_shift=value["context-shift"],
        keep=value["keep"],
    )
