"""What the commands share: their streams, and how whatever ends them early is told in one line."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from absl import flags

from minfer_jax import memory
from minfer_jax.gguf_header import one_line
from minfer_jax.usage import UsageError

Options = TypeVar("Options")

_PACKAGE = "minfer-jax"

# What a terminal obeys, but for the tab and the line break, and the sign that stands for it: U+241B
# for ESC.
_SIGNS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def guarded(run: Callable[[], int]) -> int:
    """Run the body of a command.

    Args:
        run: the body; its exit status is kept.

    Returns:
        The exit status: that of `run`; 1 where it raises ValueError or OSError, or memory ran out,
        after one line on standard error; 130 after Ctrl-C; 0 where whoever read standard output has
        gone.
    """
    # Where the caller has closed them there are none, and print would send one into the other.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore
    try:
        return run()
    except BrokenPipeError:
        # Let the interpreter's last flush go elsewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        told = [str(part) for part in (e.filename, e.strerror) if part]
        return fail(": ".join(told) or str(e))
    except ValueError as e:
        return fail(str(e))
    except (MemoryError, RuntimeError) as e:
        if memory.ran_out(e):
            return fail("out of memory; try a smaller model or --n-ctx")
        raise
    except KeyboardInterrupt:
        say("\ninterrupted")
        return 130


def with_flags(
    argv: Sequence[str],
    help_text: Callable[[], str],
    parse: Callable[[Sequence[str]], Options],
    run: Callable[[Options], int],
    help_all: Callable[[], str] | None = None,
) -> int:
    """Read the flags of a command and run it; its exit status, 2 for wrong usage, told in a line.

    --help, --help-all and --version are answered here, whatever stands beside them.

    Args:
        argv: the program's name, flags and positional arguments.
        help_text: what --help prints.
        parse: what reads them.
        run: the command; it too may raise UsageError.
        help_all: what --help-all prints, where there is more to say.
    """
    if help_all is not None and any(a in ("-help-all", "--help-all") for a in argv[1:]):
        sys.stdout.write(help_all())
        return 0
    if any(a in ("-h", "-help", "--help") for a in argv[1:]):
        sys.stdout.write(help_text())
        return 0
    if "--version" in argv[1:]:
        print(_version())
        return 0
    try:
        return run(parse(argv))
    except UsageError as e:
        return fail(str(e), 2)


def _version() -> str:
    from importlib import metadata  # which no answer need wait for

    try:
        return f"{_PACKAGE} {metadata.version(_PACKAGE)}"
    except metadata.PackageNotFoundError:
        return f"{_PACKAGE}, which is not installed: it runs from its folder"


def keep_arguments(argv: list[str]) -> list[str]:
    """For absl, which wants its own flags parsed: those of a command are parsed by itself."""
    flags.FLAGS(argv[:1])
    return argv


def shown(text: str) -> str:
    """What a model wrote, as standard output takes it: a terminal must not obey it."""
    return text.translate(_SIGNS) if sys.stdout.isatty() else text


def say(line: str) -> None:
    """Print a line on standard error; nothing depends on its being read."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> int:
    """Say what went wrong, in one line whatever names are in it; the exit status to go with it."""
    say(f"error: {one_line(message)}")
    return status


def leave(run: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit status.

    After Ctrl-C or SIGTERM it ends at once, as jax may not survive a shutdown in mid-compile. One
    more, which comes while the first is reported or later, ends it without a word.
    """
    try:
        status = run()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        os._exit(130)
    if status in (130, 143):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    sys.exit(status)
