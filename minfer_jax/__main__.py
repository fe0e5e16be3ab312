"""`python -m minfer_jax`: which commands there are."""

import sys
from collections.abc import Sequence

from minfer_jax.command import guarded, leave, with_flags
from minfer_jax.usage import UsageError

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "a conversation",
    "models": "list, look at, download and remove models",
    "quantize": "make a smaller file of a model",
    "bench": "measure speed",
    "viz": "look inside a run, in a browser",
    "compare": "hold two models against each other; perplexity",
}

_TEXT = """\
usage: python -m minfer_jax.COMMAND

{commands}

  python -m minfer_jax.generate smollm2 "Why is the sky blue?"

Each of them tells more with --help; --version says which version this is.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, and words that it does not take.

    Returns:
        The exit status: 0, or 2 for wrong usage.
    """
    return guarded(lambda: with_flags(argv, help_text, list, _run))


def help_text() -> str:
    """Usage, and the commands."""
    rows = [f"  {name.ljust(9)} {text}" for name, text in COMMANDS.items()]
    return _TEXT.format(commands="\n".join(rows))


def _run(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        name = argv[1] if argv[1] in COMMANDS else next(iter(COMMANDS))
        raise UsageError(
            f"each command is a module of its own, as in python -m minfer_jax.{name} (--help lists"
            " them)"
        )
    sys.stdout.write(help_text())
    return 0


if __name__ == "__main__":
    leave(lambda: main(sys.argv))
