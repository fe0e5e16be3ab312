"""Rows of figures as Markdown for a reader, as CSV for a spreadsheet, as JSON for a program."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minfer_jax.gguf_header import one_line

FORMATS = ("md", "csv", "json")
_DIGITS = 2  # after the point, of every float

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]  # title -> the text of a row's cell


def render(rows: Sequence[Row], columns: Columns, output: str) -> str:
    """The table as text, with a newline at its end.

    Args:
        rows: all with the same keys. A value may be a list of rows itself, each with a "name".
        columns: what Markdown shows. The first is aligned left, the others right.
        output: one of FORMATS.

    Returns:
        md: a table as GitHub draws it. csv: every cell quoted; a list of rows becomes columns
        "NAME KEY", other lists are left out. json: an array of objects. Floats are rounded to two
        digits in the latter two.
    """
    if output == "md":
        return _markdown(rows, columns)
    rounded = [_rounded(row) for row in rows]
    if output == "json":
        return json.dumps(rounded, indent=2, ensure_ascii=False) + "\n"
    text = io.StringIO()
    flat = [_flat(row) for row in rounded]
    writer = csv.DictWriter(text, list(flat[0]), quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _markdown(rows: Sequence[Row], columns: Columns) -> str:
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    cells = [[one_line(text).replace("|", "\\|") for text in line] for line in cells]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first, *others = zip(line, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append(f"| {' | '.join(aligned)} |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


def _flat(row: Row) -> dict[str, Any]:
    """A row without lists; floats keep their digits after the point, and None is empty."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            for inner in value:
                if isinstance(inner, dict):
                    name = inner["name"]
                    out |= {f"{name} {k}": v for k, v in _flat(inner).items() if k != "name"}
        elif isinstance(value, dict):
            out[key] = " ".join(f"{k}={_text(v)}" for k, v in value.items())
        else:
            out[key] = _text(value)
    return out


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.{_DIGITS}f}"
    return "" if value is None else str(value)
