"""Wrong usage of a command, and the reading of its flags."""

from collections.abc import Sequence

from absl import flags


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
    for word in argv[1:]:  # absl's own, which read files and hide mistakes
        if word.lstrip("-").split("=")[0] in ("flagfile", "undefok") and word.startswith("-"):
            raise UsageError(f"Unknown command line flag {word!r} (--help lists the flags)")
    try:
        return values(list(argv))[1:]
    except flags.Error as e:
        raise UsageError(f"{' '.join(str(e).split())} (--help lists the flags)") from None
