"""scripts/gpu_check.sh: its processes, tables, random weights and search; and a rehearsal of it."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.gguf import open_gguf
from minfer_jax.model.load import read_model_config
from minfer_jax.model.registry import ARCHS
from minfer_jax.pallas import blocks
from minfer_jax.quant import xla
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.qtensor import from_blocks
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import architectures, exactness, failures, made, tuning, workers
from scripts.gpu_check.parts import PARTS, Part
from scripts.gpu_check.report import JSON, MARKDOWN, Report, shown
from scripts.gpu_check.rows import FAILED, MEASURED, OK, SKIPPED, Row, Setting, judged

ROOT = Path(__file__).resolve().parent.parent

# Speaks as `worker` does, of cases by name: one that dies, one that hangs, one that leaves the
# device unusable. Arguments: the file descriptor, and how many cases to leave out.
CHILD = """
import json, os, sys, time
out, cases = os.fdopen(int(sys.argv[1]), "w"), sys.argv[3:]
def say(**message): print(json.dumps(message), file=out, flush=True)
def row(name, state): say(row={"name": name, "state": state, "figures": {}, "note": ""})
say(cases=len(cases))
for name in cases[int(sys.argv[2]):]:
    say(begin=name)
    if name == "dies":
        sys.stderr.write("the last words\\n")
        os._exit(7)
    if name == "hangs": time.sleep(60)
    row(name, "FAILED" if name == "lost" else "ok")
    say(end=name)
    if name == "lost": sys.exit(0)
say(done=True)
"""


def setting(seconds: float = 60.0, **changes) -> Setting:
    until = time.time() + seconds
    plain = Setting(rehearse=False, models=None, parity=None, blocks=(), until=until)
    return replace(plain, **changes)


def a_part(n_workers: int, longest: float) -> Part:
    cases = {"cases": lambda setting: [], "title": "", "share": 1.0}
    return Part(**cases, workers=n_workers, longest=longest, timed=False)


def run_cases(monkeypatch, *cases: str, longest: float = 30.0, seconds: float = 60.0) -> list[Row]:
    """The rows of a part with such cases."""

    def of_child(name, shard, skip, fd, setting) -> list[str]:
        return [sys.executable, "-c", CHILD, str(fd), str(skip), *cases[shard[0] :: shard[1]]]

    found: list[Row] = []
    monkeypatch.setattr(workers, "_command", of_child)
    workers.run_part("some part", a_part(1, longest), setting(seconds), found.append)
    return found


def test_a_process_that_dies_costs_one_case(monkeypatch):
    first, dead, last = run_cases(monkeypatch, "first", "dies", "last")
    assert [(row.name, row.state) for row in (first, dead, last)] == [
        ("first", OK),
        ("dies", FAILED),
        ("last", OK),
    ]
    assert dead.note == "the process ended with 7: the last words"


def test_a_case_that_hangs_is_ended(monkeypatch):
    hung, last = run_cases(monkeypatch, "hangs", "last", longest=1.0)
    assert (hung.state, hung.note) == (FAILED, "it took too long")
    assert (last.name, last.state) == ("last", OK)


def test_after_a_lost_device_another_process_goes_on(monkeypatch):
    rows = run_cases(monkeypatch, "lost", "last")
    assert [(row.name, row.state) for row in rows] == [("lost", FAILED), ("last", OK)]


def test_the_time_ends_a_part(monkeypatch):
    monkeypatch.setattr(workers, "_GRACE", 0.0)
    hung, left = run_cases(monkeypatch, "hangs", "a", "b", seconds=1.0)
    assert (hung.name, hung.state, hung.note) == ("hangs", SKIPPED, "the time was over")
    assert (left.state, left.note) == (SKIPPED, "no time left for 2 cases of share 1 of 1")


def test_a_process_that_never_begins_is_not_started_for_ever(monkeypatch):
    monkeypatch.setattr(workers, "_command", lambda *_: [sys.executable, "-c", "import nothing"])
    found: list[Row] = []
    workers.run_part("some part", a_part(2, 30.0), setting(), found.append)
    assert [row.state for row in found] == [FAILED]
    assert found[0].note.endswith("No module named 'nothing'")


def test_settings_survive_the_way_to_another_process():
    given = setting(models=Path("/a"), blocks=(Path("/b"), Path("/c")))
    assert Setting.from_json(json.loads(json.dumps(given.as_json()))) == given


def test_a_check_that_cannot_be_made_is_a_row(monkeypatch):
    def refused() -> Row:
        raise ValueError("no such\nblock")

    row = failures.attempted("x", refused)
    assert (row.name, row.state, row.note) == ("x", FAILED, "ValueError: no such block")
    monkeypatch.setattr(failures, "usable", lambda: False)
    with pytest.raises(ValueError, match="no such"):
        failures.attempted("x", refused)


def test_nan_is_no_success():
    assert judged("x", float("nan"), 1.0).state == FAILED
    assert judged("x", 1.0, 1.0).state == OK


def test_report_is_written_row_by_row(tmp_path: Path, capsys):
    report = Report(tmp_path, {"budget, s": 5})
    report.add("speeds", Row(name="a|b", state=MEASURED, figures={"GB/s": 1234.5}))
    report.add("speeds", Row(name="c", state=FAILED, figures={"error": float("nan")}, note="why"))
    assert report.failures == 1
    assert capsys.readouterr().out.splitlines()[0].split() == [
        *("measured", "speeds", "a|b", "GB/s", "1234")
    ]
    assert (tmp_path / MARKDOWN).read_text().splitlines() == [
        "budget, s: 5",
        "",
        "## Speed of kernels",
        "",
        "| what | GB/s | error |    state | note |",
        "| ---- | ---: | ----: | -------: | ---: |",
        "| a\\|b | 1234 |       | measured |      |",
        "| c    |      |   nan |   FAILED |  why |",
    ]
    found = json.loads((tmp_path / JSON).read_text(), parse_constant=pytest.fail)
    assert found["parts"]["speeds"][1] == {
        **{"name": "c", "state": FAILED, "error": "nan", "note": "why"}
    }


@pytest.mark.parametrize(
    ("figure", "text"),
    [(0.0, "0"), (1.234e-7, "1.2e-07"), (0.5, "0.5"), (1234.5, "1234"), (2e6, "2.0e+06")],
)
def test_figures_have_the_digits_that_count(figure: float, text: str):
    assert shown(figure) == text


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_random_weights_have_the_planes_of_real_ones(fmt):
    shape = (40, 2 * max(fmt.block, 32))
    blocks = np.zeros((shape[0], shape[1] // fmt.block * fmt.block_bytes), np.uint8)
    real = jax.eval_shape(lambda: from_blocks(blocks, fmt.ggml_type))
    random = jax.eval_shape(lambda: made.weight(0, fmt.name, shape))
    assert jax.tree.structure(random) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(random), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "NVFP4", "BF16"])
def test_random_weights_are_around_zero(name: str):
    w = made.weight(0, name, (64, 512), layers=2, std=0.05).at(1)
    values = np.asarray(xla.dequantize(w, jnp.dtype(jnp.float32)))
    assert abs(values.mean()) < 0.02
    assert 0.025 < values.std() < 0.1  # scales of powers of two are that far off


def test_a_ring_holds_the_latest_positions():
    heads = made.Heads(name="", n=2, k=1, h=32, window=4)
    given = made.attention(heads, t=3, slots=8, filled=21, cache="float16", batch=2, padding=1)
    assert given.q_positions.tolist() == [[19, 20, -1], [14, 15, -1]]
    assert given.k_positions.tolist() == [
        [16, 17, 18, 19, 20, 13, 14, 15],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]


def test_every_architecture_has_a_wide_model(tmp_path: Path):
    for arch in ARCHS:
        (tmp_path / "model.gguf").write_bytes(architectures.tiny(arch))
        cfg = read_model_config(open_gguf(tmp_path / "model.gguf"))
        assert (cfg.arch, cfg.n_embd, cfg.head_dim, cfg.n_ff) == (arch, 256, 64, 256)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    a: int
    b: int


def compiled(config: Sizes):
    """A program whose time is least at a = 8, b = 1; a of 16 is refused, and b of 2 is wrong."""
    if config.a == 16:
        raise ValueError("too large")

    def program() -> list[jax.Array]:
        time.sleep(0.02 / config.a)
        return [jnp.full(4, 1.0 if config.b == 1 else 2.0)]

    return program


def test_descent_finds_the_fastest_that_is_right():
    until = time.time() + 60
    best, before, after, tried = tuning.descend(Sizes(a=2, b=1), compiled, 4, until)
    assert best == Sizes(a=8, b=1)
    assert before > 2 * after
    assert tried == 8  # a of 1 to 16 with b of 1, and a of 2, 4 and 8 with b of 2


def test_descent_ends_with_its_time():
    best, _, _, tried = tuning.descend(Sizes(a=2, b=1), compiled, 4, time.time())
    assert (best, tried) == (Sizes(a=2, b=1), 1)


def test_block_sizes_are_kept_beside_those_of_others(tmp_path: Path, monkeypatch):
    path = tmp_path / "blocks.json"
    path.write_text('{"other": {"matvec": {"x": {"a": 1}}}}')
    tuning.put(path, "device", "matvec", "case", {"a": 4})
    tuning.put(path, "device", "matvec", "no better", {})
    assert json.loads(path.read_text()) == {
        "device": {"matvec": {"case": {"a": 4}}},
        "other": {"matvec": {"x": {"a": 1}}},
    }
    monkeypatch.setattr(blocks, "table", lambda: json.loads(path.read_text()))
    monkeypatch.setattr(blocks, "device_kind", lambda: "device")
    assert blocks.chosen("matvec", "case", Sizes(a=2, b=3)) == Sizes(a=4, b=3)


def test_a_wrong_shape_is_no_small_error():
    with pytest.raises(ValueError, match=r"got float32\[2\], expected float32\[3\]"):
        exactness.error(jnp.ones(2), jnp.ones(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--parts", "speed"], "--parts speed: expected some of device,"),
        (["--models", "/no/such"], "--models /no/such: no such folder"),
        (["--budget", "0"], "--budget 0.0: expected seconds above 0"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, capsys, wrong: list[str], message: str):
    with pytest.raises(SystemExit) as end:
        command.main(["--out", str(tmp_path), *wrong])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.kernels
@pytest.mark.timeout(900)
def test_rehearsal(tmp_path: Path):
    table = blocks.__file__.replace("blocks.py", "blocks.json")
    before = Path(table).read_bytes()
    run = subprocess.run(
        [
            *(ROOT / "scripts" / "gpu_check.sh", "--rehearse", "--tune"),
            *("--budget", "3000", "--out", tmp_path / "out"),
        ],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = json.loads((tmp_path / "out" / JSON).read_text())
    wrong = [row for rows in found["parts"].values() for row in rows if row["state"] == FAILED]
    assert not wrong
    assert run.returncode == 0, run.stderr
    assert set(found["parts"]) == set(PARTS)
    assert all(row["kernels"] > 0 for row in found["parts"]["architectures"])
    assert json.loads((tmp_path / "out" / "blocks.json").read_text())
    assert Path(table).read_bytes() == before, "a rehearsal tells nothing about a device"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
