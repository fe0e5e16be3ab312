"""The flags of `python -m minfer_jax.viz`, and what they come to."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minfer_jax.adapter_flags import ADAPTER_FLAGS
from minfer_jax.flag_table import Flag, help_rows
from minfer_jax.model_flags import LOAD_FLAGS, MODEL_FLAGS, ModelOptions, help_of, model_options
from minfer_jax.model_flags import read as read_flags
from minfer_jax.usage import UsageError

PORT = 8081
N_CTX = 1024  # a page does not show more well

_VIZ_FLAGS = (
    Flag(name="trace", kind=str, text="show this trace; without MODEL, nothing is loaded"),
    Flag(
        name="port",
        kind=int,
        text="of this machine alone; 0 for any that is free",
        default=PORT,
        least=0,
        most=65535,
    ),
)
_OWN = tuple(
    dataclasses.replace(flag, default=N_CTX) if flag.name == "n-ctx" else flag
    for flag in (*LOAD_FLAGS, *ADAPTER_FLAGS)
)
_HIDDEN = tuple(f for f in MODEL_FLAGS if f.name not in {own.name for own in _OWN})
_TEXT = """\
usage: python -m minfer_jax.viz [flags] [MODEL | --trace FILE]

A page that shows a model at work, for a browser on this machine: every named
value of every layer as a prompt runs, the tokens with what else was likely,
attention maps, and what the model would say after each layer. FILE is a trace,
as MINFER_TRACE=FILE has python -m minfer_jax.generate write it. MODEL is a GGUF
file, a cached name, or an alias ({aliases}) [{default}].
Ctrl-C ends it.

  python -m minfer_jax.viz smollm2
  python -m minfer_jax.viz --trace run.json --port 9000

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        model: which to load and how; None for none.
        trace: a file, or None.
        port: to listen on, 0 for any.
    """

    model: ModelOptions | None
    trace: Path | None
    port: int


def help_text() -> str:
    """Usage, examples and flags."""
    return help_of(_TEXT, help_rows((*_VIZ_FLAGS, *_OWN)))


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown, a value is none that it takes, or words are left over.
    """
    value, positional = read_flags((*_VIZ_FLAGS, *_OWN, *_HIDDEN), argv)
    if len(positional) > 1:
        raise UsageError(f"{positional[1][:40]!r} is one word too many, expected [MODEL]")
    trace = value["trace"]
    if trace == "":
        raise UsageError("--trace is empty, expected a file")
    alone = trace is not None and not positional
    return Options(
        model=None if alone else model_options(value, positional),
        trace=None if trace is None else Path(trace).expanduser(),
        port=value["port"],
    )
