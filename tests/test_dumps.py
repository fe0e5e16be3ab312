"""What `generate` writes down of a run: traces, logits, keys and values, times, graphs."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minfer_jax import generate
from minfer_jax.draw_time import seconds_a_draw, timing_line
from minfer_jax.dump_flags import asked
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.sampling import SamplingParams
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("cache_of_commands")

RUN = ("--temp", "1.5", "--seed", "5", "--ignore-eos", "-n", "6")
Ran = tuple[int, str, str]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("dumps")
    return str(tiny_models.save(folder, tiny_models.command_model()).path)


@pytest.fixture(scope="module")
def model(path) -> LanguageModel:
    return load(path)


@pytest.fixture
def run(capsys, path) -> Callable[..., Ran]:
    """Runs the command in this process; (status, standard output, standard error)."""

    def call(*argv: str, **environ: str | Path) -> Ran:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, str(value))
            capsys.readouterr()
            status = generate.main(["generate", path, "hello", *argv])
            return status, *capsys.readouterr()

    return call


def test_a_trace_and_dumps_of_one_run(run, model, tmp_path: Path):
    plain = run(*RUN)
    file, folder = tmp_path / "trace.json", tmp_path / "dump"
    folder.mkdir()
    status, out, err = run(*RUN, MINFER_TRACE=file, MINFER_GRAPH_DUMP=folder)
    assert (status, out) == plain[:2]
    assert f"[trace] wrote {file} (2 phases)" in err
    trace = json.loads(file.read_text(encoding="utf-8"))
    assert list(trace) == ["format", "version", "model", "prompt", "phases"]
    assert list(trace.values())[:4] == ["minfer-trace", 1, "tiny.gguf", "hello"]
    prefill, decode = trace["phases"]
    assert (prefill["kind"], decode["kind"]) == ("prefill", "decode")
    for phase in trace["phases"]:
        graph = phase["graph"]
        assert (graph["format"], graph["kind"]) == ("minfer-graph", phase["kind"])
        for step in phase["steps"]:
            assert [node["id"] for node in step["nodes"]] == [
                node["id"] for node in graph["nodes"] if node["op"] != "input"
            ]
    (first,) = prefill["steps"]
    assert (first["token"], first["text"]) == (None, "")

    # Its tokens are those of the run, and what is said after each is what the model says.
    ids = model.encode_prompt("hello")
    drawn = [step["token"] for step in decode["steps"]]
    assert len(drawn) == 5  # the sixth was drawn, and not run
    assert out.startswith(model.tokenizer.decode(drawn, continues=True).rstrip("\ufffd"))
    logits = model.logits([*ids, *drawn])[len(ids) - 1 :].astype(np.float64)
    for step, row in zip([first, *decode["steps"]], logits, strict=True):
        top, likely = zip(*step["logits_top"], strict=True)
        chances = np.exp(row) / np.exp(row).sum()
        assert len(top) == 5 and list(likely) == sorted(likely, reverse=True)
        np.testing.assert_allclose(likely, chances[list(top)], atol=2e-3)
    norm = next(n["id"] for n in prefill["graph"]["nodes"] if n["name"] == "output_norm")
    (node,) = [node for node in first["nodes"] if node["id"] == norm]
    assert node["n"] == len(ids) * model.cfg.n_embd and len(node["values"]) <= 64

    # The other dump of the same run.
    for tag, n in (("prefill", len(ids)), ("decode", len(ids) + 5)):
        found = np.fromfile(folder / f"logits_{tag}.f32", "<f4")
        np.testing.assert_allclose(found, logits[n - len(ids)], atol=0.05)
        assert f"[graph dump] wrote {folder / f'logits_{tag}.f32'} ({found.size} elems)" in err
        k = np.fromfile(folder / f"kv0k_{tag}.f32", "<f4")
        assert k.size == n * model.cfg.n_head_kv * model.cfg.head_dim
    assert f"[graph dump] prefill ids: {' '.join(map(str, ids[:8]))}" in err
    names = {f"kv0{kv}_{tag}.f32" for kv in "kv" for tag in ("prefill", "decode")}
    assert {p.name for p in folder.iterdir()} == names | {"logits_prefill.f32", "logits_decode.f32"}
    k, more = (np.fromfile(folder / f"kv0k_{tag}.f32", "<f4") for tag in ("prefill", "decode"))
    np.testing.assert_array_equal(more[: k.size], k)


def test_a_run_that_draws_nothing(run, tmp_path: Path):
    file = tmp_path / "trace.json"
    status, out, err = run("-n", "0", MINFER_TRACE=file)
    assert (status, out) == (0, ""), err
    prefill, decode = json.loads(file.read_text(encoding="utf-8"))["phases"]
    assert len(prefill["steps"]) == 1 and decode["steps"] == []


def test_a_failure_leaves_no_file(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "trace.json"
    file.write_text("old")
    monkeypatch.setattr("minfer_jax.trace_file.step_json", full)
    status, out, err = run(*RUN, MINFER_TRACE=file)
    assert status == 1 and out and "error: No space left on device" in err
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"] and file.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [
        ("MINFER_TRACE", "no/trace.json", "No such file"),
        ("MINFER_TRACE", ".", "no file"),
        ("MINFER_GRAPH_DUMP", "no", "No such file"),
        ("MINFER_GRAPH_DUMP", "file", "Not a directory"),
    ],
)
def test_where_nothing_can_be_written_is_said_first(run, tmp_path: Path, name, where, why):
    (tmp_path / "file").touch()
    status, out, err = run(*RUN, **{name: tmp_path / where})
    assert (status, out) == (2, "") and "Loading" not in err
    assert re.fullmatch(rf"error: {name}: cannot write .*: .*{why}.*\n", err)


@pytest.mark.parametrize("flags", [("--samples", "2"), ("--context-shift",)])
def test_only_one_whole_text_is_traced(run, tmp_path: Path, flags):
    status, _, err = run(*flags, MINFER_TRACE=tmp_path / "trace.json")
    assert status == 2 and f"leave out {flags[0]}" in err


def test_nothing_is_asked():
    told = asked({"MINFER_TIMING": "0", "MINFER_TRACE": ""})
    assert not told.wanted
    assert asked({"MINFER_TIMING": "1"}).wanted and not asked({"MINFER_TIMING": "1"}).rerun


def test_the_time_of_decoding(run):
    _, _, err = run(*RUN, MINFER_TIMING="1")
    number, share = r" *\d+\.\d\d", r" *\d+\.\d%"
    assert re.search(
        rf"\n\n\[MINFER_TIMING\] over 6 tokens: sample {number} ms/tok \({share}\), "
        rf"forward {number} ms/tok \({share}\)\n",
        err,
    )
    assert timing_line(4, 0.048, 0.0012) == (
        "\n[MINFER_TIMING] over 4 tokens: sample   1.20 ms/tok (10.0%), "
        "forward  10.80 ms/tok (90.0%)"
    )
    assert timing_line(0, 0.0, 0.0).endswith("forward   0.00 ms/tok ( 0.0%)")
    for sampling in (SamplingParams(), SamplingParams(typical_p=0.5)):
        assert 0 < seconds_a_draw(sampling, [1, 2, 2], 96) < 1


def test_graphs_in_place_of_an_answer(run, tmp_path: Path):
    dot, file = tmp_path / "graph.dot", tmp_path / "graph.json"
    argv = ("--dump-graph", dot, "--dump-graph-json", file, "--dump-graph-xla")
    status, out, err = run(*map(str, argv))
    assert (status, out) == (0, ""), err
    graph = json.loads(file.read_text(encoding="utf-8"))
    n = len(graph["nodes"])
    assert f"Graph DOT exported to {dot} ({n} nodes)\n" in err
    assert f"Graph JSON exported to {file} ({n} nodes, prefill)\n" in err
    assert dot.read_text(encoding="utf-8").count(" -> ") == sum(
        len(node["src"]) for node in graph["nodes"]
    )
    (logits,) = [node for node in graph["nodes"] if node["name"] == "logits"]
    assert logits["meta"]["xla"]
    status, out, err = run("--no-template", "--dump-graph", os.devnull)
    assert status == 2 and "it is there, and no file" in err
    status, out, err = run("--dump-graph-xla")
    assert status == 2 and "--dump-graph-json FILE" in err
