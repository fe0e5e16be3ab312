"""`python -m minfer_jax.bench` from outside: the table, the notes, and how it ends."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from minfer_jax import (
    bench,
    bench_compile,
    bench_drafts,
    bench_memory,
    bench_plot,
    bench_tests,
    host,
    plotting,
)
from minfer_jax.bench_flags import parse
from minfer_jax.bench_peer import Job, PackagePeer
from minfer_jax.bench_process import PeerError
from minfer_jax.bench_tests import BenchTest, all_tests, measure
from minfer_jax.command import guarded
from minfer_jax.engine import Engine
from minfer_jax.language_model import load
from minfer_jax.quant import native
from tests.helpers import tiny_models
from tests.helpers.ran import Ran

pytestmark = pytest.mark.usefixtures("one_compile_cache")

COMMAND = (sys.executable, "-m", "minfer_jax.bench")
FIRST = "model size params backend threads test ts_mean ts_stddev".split()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    data = tiny_models.tiny_model("llama", n_layer=2, n_ctx=256)
    return str(tiny_models.save(tmp_path_factory.mktemp("models"), data).path)


@pytest.fixture(scope="module")
def engine(path) -> Engine:
    return load(path, n_ctx=64).engine


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command in this process, where memory reads 10 GB/s and then 20."""

    def call(*argv: str) -> Ran:
        rates = iter([10e9, 20e9])
        monkeypatch.setattr(bench_memory, "ceiling", lambda threads: next(rates))
        monkeypatch.setenv("NPROC", "2")  # so that what -t sets is undone
        capsys.readouterr()
        status = bench.main(["bench", *argv])
        return Ran(status, *capsys.readouterr())

    return call


# The table


def test_markdown_is_the_table_and_nothing_else(run, path):
    ran = run(path, "-p", "20", "-n", "4", "-d", "0,8", "-r", "2")
    assert ran.status == 0
    head, rule, *rows = [line.split("|")[1:-1] for line in ran.out.splitlines()]
    assert [cell.strip() for cell in head] == (
        "model,size,params,backend,threads,test,t/s,GB/s,of memory".split(",")
    )
    assert [cell.strip().endswith(":") for cell in rule] == [False] + [True] * 8
    assert [row[5].strip() for row in rows] == ["pp20", "tg4", "tg4 @ d8"]
    assert all(" ± " in row[6] for row in rows)
    assert {row[4].strip() for row in rows} == {"2"}
    assert ran.err.startswith("Threads: 2 of ")
    assert "Compiled: 2 programs in " in ran.err
    assert "Memory: 20.0 GB/s at most" in ran.err


def test_json_says_everything(run, path):
    ran = run(path, "-p", "20", "-n", "4", "-d", "8", "-r", "3", "-o", "json")
    prefill, decode = json.loads(ran.out)
    keys = [key for key in decode if key != "samples_ts"]
    assert keys[: len(FIRST)] == FIRST
    n_params = 2 * 96 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert (decode["params"], decode["size"]) == (n_params, 4 * n_params)
    assert (decode["model"], decode["backend"]) == (Path(path).stem, "CPU")
    for row in (prefill, decode):
        samples = row["samples_ts"]
        assert len(samples) == 3 and min(samples) > 0
        assert row["ts_mean"] == pytest.approx(sum(samples) / 3, abs=0.02)
        assert row["ts_median"] == sorted(samples)[1]
        assert row["n_ctx"] == 20 + 4 + 16
        assert row["cache_type"] == "float16"
        assert row["kernels"] == (native.isa() or "xla")
        assert row["memory_ceiling_gb_per_s"] == 20.0
        assert row["peak_rss_bytes"] > 50e6 and row["load_seconds"] > 0 and row["peers"] == []
    read = 4 * (n_params - 96 * 64)  # untied: one row of the table, which is not counted
    assert decode["weight_bytes"] == pytest.approx(read, rel=0.01)  # and RoPE's frequencies
    expected = decode["weight_bytes"] * decode["ts_median"] / 1e9
    assert decode["gb_per_s"] == pytest.approx(expected, abs=0.01)
    assert decode["ceiling_share"] == pytest.approx(expected / 20, abs=0.01)
    assert prefill["gb_per_s"] is None and prefill["ceiling_share"] is None
    # The prefill's run compiled both programs.
    assert prefill["compile_seconds"] > 0 and prefill["compile_cached"] in (True, False)
    assert decode["compile_seconds"] == 0 and decode["compile_cached"] is None


def test_csv_is_all_quoted(run, path):
    ran = run(path, "-p", "0", "-n", "3", "-r", "1", "-o", "csv")
    head, row = ran.out.splitlines()
    assert head.startswith(",".join(f'"{key}"' for key in FIRST))
    assert row.startswith('"') and row.endswith('"') and row.count('","') == head.count('","')
    (cells,) = csv.DictReader(ran.out.splitlines())
    assert (cells["test"], cells["ts_stddev"]) == ("tg3", "0.00")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-p 0 -n 4", 20),  # with the 16 to spare
        ("-p 9,30 -n 4,8", 54),
        ("-p 9 -n 4 -d 0,100", 120),
        ("-p 0 -n 4 --n-ctx 64", 64),
        ("-p 0 -n 4 --n-ctx 2", 5),  # never below need
        ("-p 0 -n 4 -d 250", 256),  # nor above the model's maximum
        ("-n 4 -p 256", 256),
        ("--compile", 256),
        ("--compile --n-ctx 40", 40),
    ],
)
def test_the_context_is_what_the_tests_need(flags, expected):
    options = parse(["bench", *flags.split()])
    tests = all_tests(options.n_prompt, options.n_gen, options.depths)
    assert bench._n_ctx(options, tests, 256) == expected


def test_what_does_not_fit_is_refused_before_loading(run, path):
    ran = run(path, "-p", "0", "-n", "4", "-d", "253")
    assert (ran.status, ran.out) == (1, "")
    assert "error: the tests take 257 positions, and the model has 256" in ran.err
    assert "Loading" not in ran.err


@pytest.mark.parametrize(
    ("argv", "status", "match"),
    [
        (("/no/such.gguf",), 1, "no such file"),
        (("-p", "0", "-n", "0"), 2, "both 0"),
        (("--bogus",), 2, "--bogus"),
    ],
)
def test_bad_input_is_told_in_one_line(run, argv, status, match):
    ran = run(*argv)
    assert (ran.status, ran.out) == (status, "")
    *_, last = ran.err.splitlines()
    assert last.startswith("error: ") and match in last
    assert ran.err.count("error") == 1


def test_a_file_that_is_no_model(run, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF nothing more")
    ran = run(str(tmp_path / "x.gguf"))
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("no"), 1, "error: no\n"),
        (OSError(28, "No space left"), 1, "error: No space left\n"),
        (OSError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
        (OSError("no folder"), 1, "error: no folder\n"),
        (MemoryError(), 1, "error: out of memory; try a smaller model or --n-ctx\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_what_ends_a_command_early_is_told(capsys, error, status, said):
    def run() -> int:
        raise error

    assert guarded(run) == status
    assert capsys.readouterr() == ("", said)


def test_help(run):
    ran = run("--help")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("usage: python -m minfer_jax.bench")


# Peers


class Recorder:
    """A peer that notes its turns in a list it shares, and runs at 10 tokens a second."""

    version, settings = "1.0", {"fast": True}

    def __init__(self, name: str, turns: list[str]):
        self.name, self.turns = name, turns

    def begin(self, job: Job) -> None:
        self.turns.append(f"{self.name} begins {job.n_prompt} {job.n_gen}")

    def rate(self) -> float:
        self.turns.append(self.name)
        return 10.0

    def end(self) -> None:
        self.turns.append(f"{self.name} ends")


def test_turns_are_strictly_one_after_the_other(engine, monkeypatch):
    turns: list[str] = []

    def ours(engine, ids, n_gen):
        turns.append("ours")
        return 30.0

    monkeypatch.setattr(bench_tests, "our_rate", ours)
    peers = [Recorder("a", turns), Recorder("b", turns)]
    result = measure(
        engine,
        BenchTest(n_gen=4, depth=6),
        peers,  # pyright: ignore  a stand-in
        model=Path("m.gguf"),
        threads=2,
        repeat=2,
    )
    warm_up = ["ours", "a begins 6 4", "b begins 6 4"]
    assert turns == [*warm_up, *["ours", "a", "b"] * 2, "a ends", "b ends"]
    assert [p.rates.samples for p in result.peers] == [(10.0, 10.0)] * 2
    assert result.rates.samples == (30.0, 30.0)


def test_a_peer_is_ended_when_another_fails(engine):
    turns: list[str] = []

    class Broken(Recorder):
        def rate(self) -> float:
            raise PeerError("broken")

    peers = [Recorder("a", turns), Broken("b", turns)]
    with pytest.raises(PeerError, match="broken"):
        measure(
            engine,
            BenchTest(n_gen=2),
            peers,  # pyright: ignore  stand-ins
            model=Path("m.gguf"),
            threads=2,
            repeat=2,
        )
    assert turns[-2:] == ["a ends", "b ends"]


def test_ratios_are_printed(run, path, monkeypatch):
    monkeypatch.setattr(bench, "PackagePeer", lambda name, python: Recorder(name, []))
    monkeypatch.setattr(bench_tests, "our_rate", lambda engine, ids, n_gen: 25.0)
    flags = (path, "-p", "0", "-n", "2", "-r", "2", "--vs", "llama.cpp")
    ran = run(*flags, "-o", "json")
    ((row,),) = [json.loads(ran.out)]
    assert row["peers"] == [
        {
            "name": "llama.cpp",
            "version": "1.0",
            "settings": {"fast": True},
            "ts_mean": 10.0,
            "ts_stddev": 0.0,
            "samples_ts": [10.0, 10.0],
            "ts_median": 10.0,
            "ratio": 2.5,
        }
    ]
    assert "Peer: llama.cpp (1.0)" in ran.err
    assert "tg2: llama.cpp (1.0) fast=1" in ran.err
    head, _, line = run(*flags).out.splitlines()
    assert head.endswith("| llama.cpp t/s | ratio |")
    assert line.endswith("|  10.00 ± 0.00 |  2.50 |")
    both = run(*flags, "--vs", "ik_llama.cpp").out.splitlines()[0]
    assert "| llama.cpp ratio | ik_llama.cpp t/s | ik_llama.cpp ratio |" in both
    (cells,) = csv.DictReader(run(*flags, "-o", "csv").out.splitlines())
    assert cells["llama.cpp ts_mean"] == "10.00" and cells["llama.cpp ratio"] == "2.50"


def test_a_missing_peer_is_told_before_anything_long(run, path, monkeypatch):
    monkeypatch.setattr(bench, "PackagePeer", PackagePeer)
    ran = run(path, "-p", "4", "-n", "0", "--vs", "ik_llama.cpp")
    assert (ran.status, ran.out) == (1, "")
    assert "pip install ik-llama-cpp-python" in ran.err.splitlines()[-1]
    assert "Loading" not in ran.err


# Compiling


def test_compile_times_every_program(run, path):
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    before = jax.config.values["jax_compilation_cache_dir"]
    ran = run(path, "--compile", "--n-ctx", "32", "-o", "json")
    assert jax.config.values["jax_compilation_cache_dir"] == before or before is None
    assert ran.status == 0
    rows = json.loads(ran.out)
    assert [row["program"] for row in rows] == [
        "prefill 32",
        "decode",
        "decode extended",
        "logits 32",
    ]
    for row in rows:
        assert row["compile_seconds"] > 0 and row["cached_seconds"] is not None
        assert row["hlo_instructions"] > 50 and row["stored_bytes"] > 1000
        assert row["argument_bytes"] > 4 * 60_000  # the weights
        assert row["output_bytes"] >= row["alias_bytes"] > 0
        assert row["ts_median"] > 0
    # Each program was compiled once and found once; whatever small ones are beside them do as well.
    assert hits.count("/jax/compilation_cache/cache_hits") >= len(rows)
    logits = 32 * 96 * 4  # bytes; and a pointer to them
    assert logits <= rows[3]["output_bytes"] - rows[0]["output_bytes"] <= logits + 64


def test_compile_as_a_table(engine):
    before = len(engine.compiles)
    (name, recipe), *_ = engine.recipes().items()
    assert name == "prefill 32"
    (row,) = bench_compile.measure({name: recipe}, repeat=2)
    cells = [cell(row) for cell in bench_compile.COLUMNS.values()]
    assert cells[0] == "prefill 32" and all(cells)
    assert len(engine.compiles) == before


def test_compile_over_shapes_with_a_picture_and_the_programs_as_texts(run, path, tmp_path):
    folder, picture = tmp_path / "programs", tmp_path / "cost.png"
    shapes = ("--n-ctx", "16,32", "--layers", "looped,unrolled", "--prefill-chunk", "16")
    ran = run(path, "--compile", *shapes, "--plot", str(picture), "--write", str(folder))
    assert ran.status == 0
    assert "16 programs, of 4 combinations" in ran.err
    head, _, *lines = ran.out.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:4]] == ["program", "n_ctx", "layers"]
    told = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines]
    assert len(told) == 16 and told[0] == ("prefill 16", "16", "looped")
    assert told[-1] == ("logits 16", "32", "unrolled")
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) == 4 * 16
    stem = f"{Path(path).stem}-32-float16-unrolled-decode"
    texts = {n: (folder / n).read_text() for n in names if n.startswith(f"{stem}.")}
    assert texts[f"{stem}.stablehlo.txt"].startswith("module @jit")
    assert texts[f"{stem}.before.hlo.txt"].startswith("HloModule")
    assert "fusion" in texts[f"{stem}.after.hlo.txt"]
    assert "temp_bytes " in texts[f"{stem}.memory.txt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cost.gif", "ends in .png, .svg, .pdf"),
        ("nowhere/cost.png", "there is no folder"),
        ("", "ends in .png"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_told_first(run, path, tmp_path, name, words):
    ran = run(path, "--compile", "--plot", str(tmp_path / name))
    assert ran.status == 1 and words in ran.err and "Compiling" not in ran.err


def test_a_plot_of_a_model_of_any_name_and_never_over_it(run, path, tmp_path):
    rows = [
        {
            **dict.fromkeys(("n_ctx", "cache_type", "layers", "program"), "x"),
            **dict.fromkeys(("trace_seconds", "lower_seconds", "compile_seconds"), 1.0),
            **{"cached_seconds": None, "temp_bytes": 1, "ts_median": 1.0},
        }
    ]
    bench_plot.draw(rows, tmp_path / "cost.png", title="a$x^$ \\frac.gguf")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    model = tmp_path / "model.png"
    model.write_bytes(Path(path).read_bytes())
    ran = run(str(model), "--compile", "--plot", str(model))
    assert ran.status == 1 and "would be lost" in ran.err and "Loading" not in ran.err
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(plotting.PlotError, match=r"folder.png is a folder"):
        plotting.check(tmp_path / "folder.png")


def test_programs_go_into_a_folder(run, path):
    for name in (path, ""):
        ran = run(path, "--compile", "--write", name)
        assert ran.status == 2 and "expected a folder" in ran.err


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pyright: ignore  as if not there
    with pytest.raises(plotting.PlotError, match=r"pip install 'minfer-jax\[plot\]'"):
        plotting.check(tmp_path / "a.png")


# Threads, and the end of a process


def test_threads_and_affinity(monkeypatch):
    monkeypatch.setattr(host, "processors", lambda: (0, 1, 2, 5))
    monkeypatch.setenv("NPROC", "1")  # so that it is as it was afterwards
    monkeypatch.delenv("NPROC")
    assert host.use_threads(None) == 4
    assert "NPROC" not in os.environ
    assert host.use_threads(3) == 3 and os.environ["NPROC"] == "3"
    assert host.use_threads(None) == 3
    assert host.use_threads(99) == 4 and os.environ["NPROC"] == "4"
    monkeypatch.setenv("NPROC", "many")
    assert host.use_threads(None) == 4
    assert bench._ranges((0, 1, 2, 5)) == "0-2,5"
    assert bench._ranges((3,)) == "3"


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_process_of_its_own_keeps_to_its_affinity(path):
    one = min(os.sched_getaffinity(0))
    pinned = "import os, sys; os.sched_setaffinity(0, {%d}); os.execv(sys.executable, sys.argv[1:])"
    flags = (path, "-p", "0", "-n", "2", "-r", "1", "-o", "json")
    ran = subprocess.run(
        [sys.executable, "-c", pinned % one, *COMMAND, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)[0]["threads"] == 1
    assert ran.stderr.startswith(f"Threads: 1 of 1 processors ({one})")


@pytest.mark.skipif(sys.platform != "linux", reason="signals and pipes as Linux has them")
def test_ctrl_c_and_a_closed_pipe_are_quiet(path):
    flags = [path, "-p", "0", "-n", "8", "-r", "100000000"]
    ran = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stderr is not None
    for line in ran.stderr:
        if line.startswith(b"Loaded"):
            break
    time.sleep(0.3)
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate(timeout=60)
    assert (ran.returncode, out) == (130, b"")
    assert err.strip().splitlines()[-1] == b"interrupted" and b"Traceback" not in err

    end = subprocess.run(
        f"{' '.join(COMMAND)} --help | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (end.stdout, end.stderr) == ("0\n", "")


# Guesses


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> str:
    data = tiny_models.tiny_text_model(n_layer=1, n_ctx=2048)
    return str(tiny_models.save(tmp_path_factory.mktemp("models"), data, "speaking.gguf").path)


def test_guesses_are_measured_beside_none(run, path, speaking):
    ran = run(speaking, "--draft-ngram", "-n", "20", "-r", "2", "-o", "json")
    assert ran.status == 0
    rows = json.loads(ran.out)
    assert [row["test"] for row in rows][:3] == ["edit", "edit t=0.8", "quotes"]
    for row in rows:
        assert row["same"] is True and row["model"] == "speaking"
        assert 0 < row["n_generated"] <= 20 < row["n_prompt"]
        assert 0 <= row["n_accepted"] <= row["n_drafted"]
        assert len(row["samples_plain"]) == len(row["samples_drafted"]) == 2
        assert row["ratio"] > 0
    ran = run(speaking, "--draft", speaking, "--draft-max", "2", "-n", "4", "-r", "1")
    assert ran.status == 0 and ran.out.count("yes") == len(rows)
    head = [cell.strip() for cell in ran.out.splitlines()[0].split("|")[1:-1]]
    assert head == list(bench_drafts.COLUMNS)


def test_guesses_need_a_model_that_speaks_alike(run, path, speaking):
    assert "no tokenizer" in run(path, "--draft-ngram").err.splitlines()[-1]
    assert "no tokenizer" in run(speaking, "--draft", path).err.splitlines()[-1]
