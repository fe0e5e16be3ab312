"""What `bench --compile` found, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer_jax.bench_table import Row
from minfer_jax.gguf_header import one_line
from minfer_jax.plotting import figure, save

_STAGES = {"trace": "#8fb8de", "lower": "#4f86c6", "compile": "#1f4e8c"}
_CACHED = "#d1495b"
_WORK = "#5b8e7d"


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Seconds by stage, working memory and speed of every program, a row each.

    Args:
        rows: of `bench_sweep.measure`.
        path: the file to write; its ending says the kind (.png, .svg, .pdf).
        title: over all.

    Raises:
        PlotError: matplotlib is not installed, or knows no such kind of file.
        OSError: the file cannot be written.
    """
    names = _names(rows)
    picture, (seconds, memory, speed) = figure(
        1, 3, size=(12.0, 1.6 + 0.3 * len(rows)), widths=(2.2, 1.0, 1.0)
    )
    places = range(len(rows))
    left = [0.0] * len(rows)
    for stage, color in _STAGES.items():
        took = [row[f"{stage}_seconds"] for row in rows]
        seconds.barh(places, took, left=left, color=color, label=stage)
        left = [a + b for a, b in zip(left, took, strict=True)]
    cached = [(i, row["cached_seconds"]) for i, row in enumerate(rows)]
    known = [(i, s) for i, s in cached if s is not None]
    seconds.plot(
        [s for _, s in known],
        [i for i, _ in known],
        linestyle="none",
        marker="D",
        markersize=4,
        color=_CACHED,
        label="compile, from the cache",
    )
    memory.barh(places, [row["temp_bytes"] / 1e6 for row in rows], color=_WORK)
    speed.barh(places, [row["ts_median"] for row in rows], color=_WORK)
    speed.set_xscale("log")
    for axes, label in ((seconds, "seconds"), (memory, "working memory, MB"), (speed, "tokens/s")):
        axes.set_xlabel(label)
        axes.set_yticks(places, names if axes is seconds else [""] * len(names))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    seconds.legend(frameon=False, fontsize=8)
    picture.suptitle(one_line(title), fontsize=11, parse_math=False)
    save(picture, path)


def _names(rows: Sequence[Row]) -> list[str]:
    """Program, and whatever of its engine's labels is not the same in all rows."""
    labels: dict[str, Any] = {"n_ctx": "n_ctx {}", "cache_type": "{}", "layers": "{}"}
    differ = [key for key in labels if len({row[key] for row in rows}) > 1]
    return [
        ", ".join([row["program"], *(labels[key].format(row[key]) for key in differ)])
        for row in rows
    ]
