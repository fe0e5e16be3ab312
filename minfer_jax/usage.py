"""Wrong usage of a command, and the reading of its flags."""

import re
from collections.abc import Sequence

from absl import flags

from minfer_jax.nearest import did_you_mean

_ABSLS_OWN = ("flagfile", "undefok")  # they read files and hide mistakes
_ILLEGAL = re.compile(r"flag --([^=]*)=(.*?): ", re.DOTALL)  # as absl says it


class UsageError(ValueError):
    """A wrong flag or argument. One line."""


def read_flags(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Set flags from a command line.

    Args:
        values: the flags, which are set here.
        argv: the program's name, then flags and positional arguments in any order.

    Returns:
        The positional arguments.

    Raises:
        UsageError: a flag is unknown, or its value is none that it takes.
    """
    try:
        for word in argv[1:]:
            name = word.lstrip("-").split("=")[0]
            if name in _ABSLS_OWN and word.startswith("-"):
                raise flags.UnrecognizedFlagError(name)
        return values(list(argv))[1:]
    except flags.UnrecognizedFlagError as e:
        known = [f"--{name}" for name in values if len(name) > 1 and name not in _ABSLS_OWN]
        name = _as_typed(e.flagname, argv)
        problem = f"there is no flag {name[:40]!r}{did_you_mean(name, known)}"
        if " " in name:
            problem += ", and words that begin with - go behind --"
    except flags.IllegalFlagValueError as e:
        problem = str(e)
        if match := _ILLEGAL.match(problem):
            expected = _expected(values[match[1]])
            problem = f"--{match[1]} is {match[2][:40]!r}, expected {expected}"
    except flags.Error as e:
        problem = str(e)
    raise UsageError(f"{' '.join(problem.split())} (--help lists the flags)")


def _as_typed(name: str, argv: Sequence[str]) -> str:
    """A flag with its dashes."""
    words = (word.split("=")[0] for word in argv if word.startswith("-"))
    return next((word for word in words if word.lstrip("-") == name.lstrip("-")), f"--{name}")


def _expected(flag: flags.Flag) -> str:
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        return f"one of {', '.join(parser.enum_values)}"
    return "true or false" if flag.boolean else parser.syntactic_help
