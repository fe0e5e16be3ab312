"""The viz command: its flags, and the traces that it takes."""

import json
from pathlib import Path

import pytest

from minfer_jax.usage import UsageError
from minfer_jax.viz import main, stored
from minfer_jax.viz.flags import N_CTX, PORT, parse
from minfer_jax.viz.stored import TraceError, check_trace

GRAPH = {"nodes": [{"id": 0, "name": "embd"}]}
TRACE = {
    "format": "minfer-trace",
    "version": 1,
    "model": "m.gguf",
    "phases": [{"kind": "prefill", "graph": GRAPH, "steps": [{"token": None, "nodes": []}]}],
}


def write(folder: Path, value: object) -> Path:
    path = folder / "run.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_flags():
    options = parse(["viz"])
    assert options.model is not None and options.trace is None
    assert (options.model.model, options.model.n_ctx, options.port) == ("smollm2", N_CTX, PORT)
    options = parse(["viz", "--trace", "run.json", "--port=0"])
    assert (options.model, options.trace, options.port) == (None, Path("run.json"), 0)
    options = parse(["viz", "m.gguf", "--trace=run.json", "--n-ctx=64"])
    assert options.model is not None
    assert (options.model.model, options.model.n_ctx) == ("m.gguf", 64)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port=70000"], "--port is 70000"),
        (["--trace="], "--trace is empty"),
        (["m.gguf", "hello"], "'hello' is one word too many"),
        (["--prot=1"], "--port"),
    ],
)
def test_wrong_usage(words: list[str], told: str):
    with pytest.raises(UsageError, match=told):
        parse(["viz", *words])


def test_a_trace(tmp_path: Path):
    check_trace(write(tmp_path, TRACE))
    check_trace(write(tmp_path, {**TRACE, "phases": []}))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "its format is 'list'"),
        ({}, "its format is 'None'"),
        ({**TRACE, "format": "minfer-graph"}, "its format is 'minfer-graph'"),
        ({**TRACE, "version": 2}, "version 2, expected 1"),
        ({**TRACE, "phases": {}}, "its phases are not"),
        ({**TRACE, "phases": [{"kind": "prefill", "graph": GRAPH}]}, "its phases are not"),
        ({**TRACE, "phases": [{"kind": "x", "graph": {"nodes": [1]}, "steps": []}]}, "its phases"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, value: object, told: str):
    with pytest.raises(TraceError, match=told):
        check_trace(write(tmp_path, value))


def test_traces_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match="no such file"):
            check_trace(path)
    monkeypatch.setattr(stored, "MAX_BYTES", 10)
    with pytest.raises(TraceError, match="expected at most"):
        check_trace(write(tmp_path, TRACE))


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["viz", "--trace", str(write(tmp_path, "{}"))]) == 1
    assert main(["viz", "--port=-1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in told] == ["error:", "error:"]
    assert main(["viz", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--trace" in out and "--port" in out and "--n-predict" not in out
