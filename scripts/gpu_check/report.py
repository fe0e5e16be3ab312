"""The tables: on the terminal row by row, as Markdown and JSON in files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minfer_jax import bench_table, whole_file
from scripts.gpu_check.parts import PARTS
from scripts.gpu_check.rows import FAILED, Row

MARKDOWN, JSON = "gpu_check.md", "gpu_check.json"


class Report:
    """Rows of all parts; the files are written anew with every row, so that none is lost."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Writes nothing yet.

        Args:
            folder: where the files go; it is there.
            about: of the run as a whole, for the JSON file.
        """
        self._folder, self._about = folder, dict(about)
        self._rows: dict[str, list[Row]] = {}

    def add(self, part: str, row: Row) -> None:
        """Note a row, show it, and write the files."""
        self._rows.setdefault(part, []).append(row)
        print(f"{row.state:9}{part:14} {row.name:44} {' '.join(_told(row))}".rstrip(), flush=True)
        self.write()

    def finish(self, **about: Any) -> None:
        """Write the files with more about the run."""
        self._about |= about
        self.write()

    def rows(self, part: str) -> list[Row]:
        """Of one part, in the order in which they came."""
        return self._rows.get(part, [])

    @property
    def failures(self) -> int:
        """Rows that failed."""
        return sum(row.state == FAILED for rows in self._rows.values() for row in rows)

    def markdown(self) -> str:
        """All tables."""
        lines = [f"{key}: {value}\n" for key, value in self._about.items()]
        tables = [f"## {PARTS[part].title}\n\n{_table(rows)}" for part, rows in self._rows.items()]
        return "\n".join([*lines, *tables])

    def write(self) -> None:
        """Both files, each whole or as it was."""
        parts = {
            part: [
                {"name": r.name, "state": r.state, **_plain(r.figures), "note": r.note}
                for r in rows
            ]
            for part, rows in self._rows.items()
        }
        texts = {
            MARKDOWN: self.markdown(),
            JSON: json.dumps({**self._about, "parts": parts}, indent=1) + "\n",
        }
        for name, text in texts.items():
            with whole_file.replacing(self._folder / name, durable=False) as file:
                file.write(text.encode("utf-8"))


def _table(rows: list[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row.figures)
    columns = {
        "what": lambda row: row["name"],
        **{name: lambda row, name=name: shown(row["figures"].get(name, "")) for name in names},
        "state": lambda row: row["state"],
    }
    if any(row.note for row in rows):
        columns["note"] = lambda row: row["note"]
    plain = [{"name": r.name, "figures": r.figures, "state": r.state, "note": r.note} for r in rows]
    return bench_table.render(plain, columns, "md")


def _told(row: Row) -> list[str]:
    return [*(f"{name} {shown(value)}" for name, value in row.figures.items()), row.note]


def _plain(figures: Mapping[str, float | str]) -> dict[str, float | str]:
    """As JSON has them: it has no NaN."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else str(value)
        for name, value in figures.items()
    }


def shown(figure: float | str) -> str:
    """A figure with three digits that count."""
    if isinstance(figure, str):
        return figure
    if figure == 0 or 1e-3 <= abs(figure) < 1e5:
        return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
    return f"{figure:.1e}"
