"""The flags of a command as a table of rows: how they are read, and how `--help` lists them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

from minfer_jax.usage import UsageError, read_flags

_COLUMN = 22  # where the help's second column begins, if no name is longer
_DEFINE: dict[type, Any] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        name: without its dashes.
        kind: bool for a switch; float, int or str for one that takes a value; list for text that
            may be given several times.
        text: what it does, for the help.
        default: the value where it is not given; shown by the help where it is a number.
        short: another name, of one letter.
        choices: what the text may be; empty for any.
        least, most: the number must not be below, or above, these.
        argument: what Python's functions call it, where that is not its name with underscores.
        main: whether a short help lists it.
    """

    name: str
    kind: type
    text: str
    default: bool | float | str | Sequence[str] | None = None
    short: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    argument: str = ""
    main: bool = False


HELP_ALL = Flag(name="help-all", kind=bool, text="all flags, and the presets of --config")
"""For the last row of a short help; `command.with_flags` answers it."""


def read(table: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read a command line.

    Args:
        table: the flags that there are.
        argv: the program's name, then flags and positional arguments in any order.

    Returns:
        The value of each flag by name, and the positional arguments.

    Raises:
        UsageError: a flag is unknown, or its value is none that it takes.
    """
    values = flags.FlagValues()
    for flag in table:
        names: dict[str, Any] = {"short_name": flag.short, "flag_values": values}
        if flag.choices:
            flags.DEFINE_enum(flag.name, flag.default, flag.choices, flag.text, **names)  # pyright: ignore
        elif flag.kind is list:
            default: Any = flag.default or []
            flags.DEFINE_multi_string(flag.name, default, flag.text, **names)
        else:
            _DEFINE[flag.kind](flag.name, flag.default, flag.text, **names)
    positional = read_flags(values, argv)
    value: dict[str, Any] = values.flag_values_dict()
    for flag in table:
        number = value[flag.name]
        low = flag.least is not None and number is not None and number < flag.least
        high = flag.most is not None and number is not None and number > flag.most
        if low or high:
            end = "or more" if flag.most is None else f"to {flag.most}"
            raise UsageError(f"--{flag.name} is {number}, expected {flag.least} {end}")
    return value, positional


def help_rows(table: Sequence[Flag]) -> str:
    """One line a flag: its names, what it does, and a number's default."""
    names = [f"  {f'-{flag.short}, ' if flag.short else ''}--{flag.name}" for flag in table]
    column = max(_COLUMN, *(len(name) + 1 for name in names))
    return "\n".join(
        name.ljust(column) + flag.text + _default(flag)
        for name, flag in zip(names, table, strict=True)
    )


def _default(flag: Flag) -> str:
    number = flag.kind in (float, int) and flag.default is not None
    return f" [{flag.default}]" if number else ""
