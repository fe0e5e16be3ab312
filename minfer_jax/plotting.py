"""matplotlib, which only pictures need: loaded when the first is drawn, without a display."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer_jax.whole_file import replacing

ENDINGS = (".png", ".svg", ".pdf")


class PlotError(ValueError):
    """A picture cannot be drawn. One line."""


def check(path: Path) -> None:
    """Whether a picture can be drawn there, asked before anything long begins.

    Raises:
        PlotError: matplotlib is not installed, the ending is none of ENDINGS, there is no such
            folder, or a folder of that name.
    """
    if path.suffix.lower() not in ENDINGS:
        raise PlotError(f"{path}: a plot is a file that ends in {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise PlotError(f"{path} is a folder; the path of a file is expected")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("a plot needs matplotlib: pip install 'minfer-jax[plot]'") from None


def figure(
    rows: int,
    columns: int,
    *,
    size: tuple[float, float],
    widths: Sequence[float] | None = None,
    heights: Sequence[float] | None = None,
) -> tuple[Any, Any]:
    """A figure of matplotlib and its axes, as `Figure.subplots` gives them.

    Args:
        rows, columns: of axes.
        size: width and height, inches.
        widths, heights: of the columns and rows, relative to each other; None for alike.
    """
    from matplotlib.figure import Figure  # the figure alone: pyplot would look for a display

    picture = Figure(figsize=size, layout="constrained")
    axes = picture.subplots(rows, columns, width_ratios=widths, height_ratios=heights)
    return picture, axes


def save(picture: Any, path: Path) -> None:
    """Write a figure, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    data = io.BytesIO()
    with warnings.catch_warnings():  # a name may have signs that the font lacks: boxes are drawn
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        picture.savefig(data, format=path.suffix.lower().lstrip("."), dpi=150)
    with replacing(path, durable=False, shared=True) as file:
        file.write(data.getvalue())
