"""What a check finds, and what it is made of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK = "ok"
FAILED = "FAILED"
REFUSED = "refused"  # by the kernel's own `supports`: the plain form serves
SKIPPED = "skipped"  # for want of time, or of a file
MEASURED = "measured"  # a figure that is neither right nor wrong


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table.

    Attributes:
        name: of what was checked.
        state: one of the five above.
        figures: what was found, by column: a number, or text.
        note: in words: why it failed, or was left out.
    """

    name: str
    state: str
    figures: Mapping[str, float | str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A piece of a part: what is lost with it if it crashes."""

    name: str
    run: Callable[[], Iterable[Row]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all parts are told.

    Attributes:
        rehearse: on a CPU, with kernels interpreted and tiny shapes: only to try the script.
        models: a folder of GGUF files, or None.
        parity: a folder of reference results with `arch/NAME.gguf` and `.npz`, or None.
        blocks: where tuning writes the table of block sizes.
        until: when the part's time is over, in seconds since the epoch.
    """

    rehearse: bool
    models: Path | None
    parity: Path | None
    blocks: tuple[Path, ...]
    until: float

    def as_json(self) -> dict[str, object]:
        """Plain values, for `from_json` in another process."""
        return {
            "rehearse": self.rehearse,
            "models": None if self.models is None else str(self.models),
            "parity": None if self.parity is None else str(self.parity),
            "blocks": [str(path) for path in self.blocks],
            "until": self.until,
        }

    @staticmethod
    def from_json(values: Mapping) -> "Setting":
        """Of what `as_json` gave."""
        paths = {k: None if values[k] is None else Path(values[k]) for k in ("models", "parity")}
        blocks = tuple(Path(path) for path in values["blocks"])
        return Setting(rehearse=values["rehearse"], until=values["until"], blocks=blocks, **paths)


def judged(name: str, error: float, limit: float, note: str = "", **figures: float) -> Row:
    """A row that is ok if an error is within its limit; NaN is not."""
    state = OK if error <= limit else FAILED
    return Row(
        name=name, state=state, figures={"error": error, "limit": limit, **figures}, note=note
    )
