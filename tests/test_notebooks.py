"""The lessons: each notebook is its script, executed; each script runs, and in time."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
CPU_SECONDS = 2 * 120  # two minutes of two cores
MACHINE = re.compile(r"/(home|root|tmp|usr|opt|var|work|Users|private)/|site-packages|[A-Z]:\\\\")

lesson = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def cells_of_script(text: str) -> list[tuple[str, str]]:
    """Kind and source of each cell of the percent format."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [re.sub("^# ?", "", line) for line in body.strip().split("\n")]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip()))
    return cells


def outputs_of(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def test_there_are_as_many_notebooks_as_scripts():
    notebooks = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    assert notebooks == [path.stem for path in SCRIPTS]
    assert [name[:2] for name in notebooks] == [f"{i:02}" for i in range(1, 9)]


@lesson
def test_a_notebook_is_its_script_executed(script: Path):
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert found == cells_of_script(script.read_text()), (
        f"run `python notebooks/execute.py {script.name[:2]}`"
    )
    counts = [c["execution_count"] for c in notebook["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@lesson
def test_outputs_are_pictures_and_text_without_errors_or_paths(script: Path):
    outputs = outputs_of(json.loads(script.with_suffix(".ipynb").read_text()))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] in ("stream", "display_data"), output
        if output["output_type"] == "stream":
            text = "".join(output["text"])
            assert output["name"] == "stdout", text
        else:
            text = "".join(output["data"]["text/plain"])
        assert not MACHINE.search(text), text


def test_what_a_machine_s_path_is():
    assert MACHINE.search("file /home/someone/model.gguf") and MACHINE.search("in /tmp/a")
    assert not MACHINE.search("tokens/s, 9/3 heads, https://example.org/work")


@lesson
def test_links_lead_somewhere(script: Path):
    for target in re.findall(r"\]\(([^)]*\.ipynb)\)", script.read_text()):
        assert (FOLDER / target).is_file()


@pytest.mark.model
@pytest.mark.timeout(900)
@lesson
def test_a_lesson_runs_in_time(script: Path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=FOLDER,
        env=environment | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stderr == ""
    # Of the processor, not of the clock: other work on the machine makes a lesson wait.
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took < CPU_SECONDS
