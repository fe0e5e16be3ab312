"""Runs lessons top to bottom and writes the notebook beside each: NN_name.py to NN_name.ipynb.

    pip install -e '.[notebooks]'
    python notebooks/execute.py [NN ...]

The text form is the source. Without numbers all lessons are run.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

SECONDS = 600  # of a cell, at most


def execute(source: Path) -> None:
    """Run one lesson, and write it with its outputs."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same at every run
    began = time.perf_counter()
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": source.parent}},
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
    )
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    print(f"{source.stem}: {time.perf_counter() - began:.0f} s")


def _joined(outputs: list) -> list:
    """What was printed piece by piece as one output."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    lessons = sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py"))
    for lesson in lessons:
        if len(sys.argv) == 1 or lesson.name[:2] in sys.argv[1:]:
            execute(lesson)
