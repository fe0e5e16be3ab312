"""The page's server: what it gives, what a run tells, what it refuses."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from minfer_jax.language_model import from_file
from minfer_jax.model.names import ROWS
from minfer_jax.viz import hub as hubs
from minfer_jax.viz.hub import Hub
from minfer_jax.viz.live import Live, entropy
from minfer_jax.viz.request import MOST_TOKENS, Busy, Request, request_of
from minfer_jax.viz.routes import MAX_BODY, VizServer
from tests.helpers.tiny_models import endless_text_model, save

PROMPT = "hello world"


@contextmanager
def serving(live: Live | None, hub: Hub | None = None, trace: Path | None = None):
    with VizServer(0, hub or Hub(), live=live, trace=trace) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def hub() -> Hub:
    return Hub()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Live:
    data = endless_text_model(n_layer=2, n_ctx=128, n_head=2, n_head_kv=1)
    model = from_file(save(tmp_path_factory.mktemp("model"), data), precision="highest")
    assert model.tokenizer is not None
    return Live(model, model.tokenizer, hub.publish)


@pytest.fixture(scope="module")
def server(live: Live, hub: Hub) -> Iterator[VizServer]:
    with serving(live, hub) as running:
        yield running


def ask(
    server: VizServer,
    path: str,
    body: object = None,
    method: str | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def problem(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    found = json.loads(answer[2])
    assert found["ok"] is False
    return answer[0], found["error"]


@contextmanager
def listening(server: VizServer) -> Iterator[Iterator[dict]]:
    """The events from here on."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/viz/events")
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream"
    assert response.readline() == b": here\n"
    lines = iter(response.readline, b"")
    try:
        yield (json.loads(line[5:]) for line in lines if line.startswith(b"data:"))
    finally:
        connection.close()


def test_the_page(server: VizServer):
    for path, kind, part in (
        ("/", "text/html", b"<title>minfer_jax viz</title>"),
        ("/index.html", "text/html", b'src="/app.js"'),
        ("/style.css", "text/css", b"prefers-color-scheme"),
        ("/app.js", "text/javascript", b"EventSource"),
        ("/favicon.ico", "image/svg+xml", b"<svg"),
    ):
        status, headers, body = ask(server, path)
        assert status == 200 and part in body and headers["Content-Type"].startswith(kind)
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        # Nothing comes from elsewhere.
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in body
    for name in ("trace", "pane", "graph", "maps"):
        assert ask(server, f"/{name}.js")[0] == 200


def test_the_graph(server: VizServer, live: Live):
    graph = json.loads(ask(server, "/viz/graph")[2])
    assert (graph["format"], graph["model"], graph["n_layer"]) == ("minfer-live", "tiny.gguf", 2)
    assert [phase["kind"] for phase in graph["phases"]] == ["prefill", "decode"]
    names = [node["name"] for node in graph["phases"][1]["graph"]["nodes"]]
    assert {"embd", "blk.1.weights", "logits"} <= set(names)
    assert {name.rsplit(".", 1)[-1] for name in names[3:]} <= set(ROWS)
    info = json.loads(ask(server, "/viz/info")[2])
    assert info == {"model": "tiny.gguf", "trace": None, "running": False}


def test_a_run_is_told_as_it_goes(server: VizServer, live: Live):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with listening(server) as events:
        status, _, answer = ask(server, "/viz/run", body)
        found = []
        while not found or found[-1]["type"] != "finish":
            found.append(next(events))
    answer = json.loads(answer)
    assert status == 200 and answer["ok"] and answer["completion_tokens"] == 4
    assert answer["finish_reason"] == "length"
    hello, *rest, finish = found
    ids = live._model.encode_prompt(PROMPT)
    assert (hello["type"], hello["model"], hello["prompt_tokens"]) == (
        *("hello", "tiny.gguf"),
        len(ids),
    )
    assert [token for token, _ in hello["tokens"]] == ids
    assert hello["tokens"][0][1] == "<|im_start|>"  # a control token has a name to show
    assert (finish["text"], finish["tokens"]) == (answer["text"], 4)
    phases = [(e["kind"], e["index"]) for e in rest if e["type"] == "phase"]
    assert phases == [("prefill", 0), ("decode", 1)]
    steps = [e for e in rest if e["type"] == "step"]
    assert [e["phase"] for e in steps] == [0, 1, 1, 1, 1]
    assert [e["token"] for e in steps] == [None, *live.tokens[len(ids) :]]
    assert "".join(e["text"] for e in steps) == answer["text"]
    # The tokens are those of a plain run, and what is shown is what follows from the values.
    model = live._model
    assert model.generate(PROMPT, max_tokens=4, temperature=0.0) == answer["text"]
    logits = model.logits(live.tokens)
    for i, step in enumerate(steps):
        row = logits[len(ids) - 1 + i]
        assert step["logits_top"][0][0] == int(row.argmax())
        assert step["entropy"] == pytest.approx(entropy(row), abs=2e-3)
        assert len(step["logits_top"]) == len(step["top_text"]) == 5
    nodes = [e for e in rest if e["type"] == "node" and e["step"] == 2]
    graph = live.graph()["phases"][1]["graph"]["nodes"]
    assert {e["name"]: e["id"] for e in nodes} == {
        node["name"]: node["id"] for node in graph if node["op"] != "input"
    }
    residual = next(e for e in nodes if e["name"] == "blk.1.residual")
    whole = model.trace(live.tokens, "blk.1.residual")["blk.1.residual"][len(ids) + 1]
    assert residual["n"] == whole.size
    np.testing.assert_allclose(residual["values"], whole[:: residual["stride"]], atol=2e-4)
    assert residual["stats"]["max"] == pytest.approx(whole.max(), abs=2e-4)


def test_attention_and_lens_of_the_latest_run(server: VizServer, live: Live):
    live.run(Request(prompt=PROMPT, max_tokens=2, temperature=0.0))
    t, model = len(live.tokens), live._model
    weights = model.trace(live.tokens, "blk.1.weights")["blk.1.weights"]
    for head in range(2):
        status, _, data = ask(server, f"/viz/attention?layer=1&head={head}")
        assert status == 200 and len(data) == t * t
        found = np.frombuffer(data, np.uint8).reshape(t, t)
        np.testing.assert_allclose(found / 255, weights[head], atol=0.003)
    lens = json.loads(ask(server, "/viz/lens")[2])
    ids, probabilities = np.array(lens["ids"]), np.array(lens["probabilities"])
    assert ids.shape == probabilities.shape == (2, t)
    assert set(lens["text"]) == {str(i) for i in ids.ravel()}
    # After the last layer it is what the model says.
    logits = model.logits(live.tokens)
    assert (ids[-1] == logits.argmax(-1)).all()
    softmax = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(probabilities[-1], 1 / softmax.sum(-1), atol=1e-3)
    # After the first, what it would say if the second added nothing.
    skipped = model.patch({"blk.1.attn_out": 0.0, "blk.1.down": 0.0}).logits(live.tokens)
    assert (ids[0] == skipped.argmax(-1)).all()
    for query, told in (
        ("layer=2&head=0", "layer is 2, expected 0 to 1"),
        ("layer=0&head=2", "head is 2, expected 0 to 1"),
    ):
        assert problem(ask(server, f"/viz/attention?{query}")) == (400, told)
    for query in ("layer=-1&head=0", "layer=0", "layer=1e3&head=0", "layer=999999999&head=0"):
        assert problem(ask(server, f"/viz/attention?{query}"))[0] == 400


def test_two_runs_compile_as_much_as_one(live: Live):
    live.run(Request(prompt=PROMPT, max_tokens=3))
    recorder = live._recorder
    assert recorder is not None
    live.run(Request(prompt=PROMPT, max_tokens=5))
    assert live._recorder is recorder
    assert [c.name for c in recorder.compiles] == [recorder.compiles[0].name, "record 1"]


def test_one_run_at_a_time_and_its_end(server: VizServer, live: Live):
    with listening(server) as events:
        thread = threading.Thread(
            target=ask, args=(server, "/viz/run", {"prompt": PROMPT, "max_tokens": 90})
        )
        thread.start()
        assert next(events)["type"] == "hello"
        again = ask(server, "/viz/run", {"prompt": PROMPT})
        assert problem(again) == (409, "a run is going: wait, or stop it")
        assert problem(ask(server, "/viz/lens"))[0] == 409
        assert ask(server, "/viz/stop", {})[0] == 200
        thread.join(60)
        finish = next(e for e in events if e["type"] == "finish")
        assert finish["reason"] == "stopped" and finish["tokens"] < 90
    assert not live.running


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil"])
def test_another_host_is_refused(server: VizServer, host: str):
    status, told = problem(ask(server, "/viz/graph", Host=host))
    assert status == 403 and f"localhost:{server.port}" in told
    assert ask(server, "/viz/info", Host=f"localhost:{server.port}")[0] == 200


def test_another_page_is_refused(server: VizServer):
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}"):
        answer = ask(server, "/viz/run", {"prompt": "x"}, Origin=origin)
        assert problem(answer)[0] == 403
    own = ask(server, "/viz/stop", {}, Origin=f"http://127.0.0.1:{server.port}")
    assert own[0] == 200


def test_bodies_that_are_refused(server: VizServer):
    long = {"prompt": "x" * MAX_BODY}
    assert problem(ask(server, "/viz/run", long))[0] == 413
    assert problem(ask(server, "/viz/run", b"{}", Content_Length="9" * 40))[0] == 413
    assert problem(ask(server, "/viz/run", b"{}", Content_Length="-1"))[0] == 411
    assert problem(ask(server, "/viz/run", b"{}", Content_Type="text/plain"))[0] == 415
    for body in (b"", b"{", b"[1]", b"[" * 100_000, b"\xff\xff"):
        assert problem(ask(server, "/viz/run", body))[0] == 400
    assert problem(ask(server, "/viz/run", {"prompt": "a " * 4000}))[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": " "},
        {"prompt": 3},
        {"prompt": "x", "max_tokens": MOST_TOKENS + 1},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "max_tokens": 2.0},
        {"prompt": "x", "max_tokens": True},
        {"prompt": "x", "temperature": float("nan")},
        {"prompt": "x", "temperature": -0.1},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "temperature": 10**400},
        {"prompt": "x", "seed": -1},
    ],
)
def test_requests_that_are_refused(body: dict):
    with pytest.raises(ValueError, match="expected"):
        request_of(body)


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/static/app.js", "/%2e%2e/x", "//etc/passwd", "/app.js/..", "*"]
)
def test_there_are_no_other_paths(server: VizServer, path: str):
    assert problem(ask(server, path))[0] == 404


def test_methods(server: VizServer):
    assert problem(ask(server, "/viz/run"))[0] == 405
    assert problem(ask(server, "/viz/graph", {}))[0] == 405
    assert ask(server, "/", method="DELETE")[0] == 501


def test_without_a_model(tmp_path: Path):
    trace = tmp_path / "run.json"
    trace.write_text("{}")
    with serving(None, trace=trace) as server:
        assert ask(server, "/")[0] == 200
        info = json.loads(ask(server, "/viz/info")[2])
        assert info == {"model": None, "trace": "run.json", "running": False}
        for path in ("/viz/graph", "/viz/lens", "/viz/attention?layer=0&head=0"):
            assert problem(ask(server, path))[0] == 404
        assert problem(ask(server, "/viz/run", {"prompt": "x"}))[0] == 404
        assert ask(server, "/viz/trace")[2] == b"{}"
        trace.unlink()
        assert problem(ask(server, "/viz/trace")) == (404, "the trace is no longer there")
    with serving(None) as server:
        assert problem(ask(server, "/viz/trace"))[0] == 404


def test_nothing_was_run_yet(live: Live):
    fresh = Live(live._model, live._tokenizer, lambda event: None)
    with pytest.raises(ValueError, match="nothing was run yet"):
        fresh.lens()
    assert fresh._run_lock.acquire(blocking=False)
    with pytest.raises(Busy):
        fresh.lens()


def test_a_slow_listener_is_told_that_it_missed_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hubs, "BUFFER", 3)
    monkeypatch.setattr(hubs, "PATIENCE", 0.01)
    hub = Hub()
    with hub.listener() as slow:
        assert slow is not None
        for i in range(9):
            hub.publish({"i": i})
        found = [json.loads(event) for event in slow.take(1.0)]
        assert found == [{"i": 0}, {"i": 1}, {"i": 2}, {"type": "lag"}]
        hub.publish({"i": 9})
        assert slow.take(1.0) == ['{"i":9}'] and slow.take(0.01) == []
    monkeypatch.setattr(hubs, "MOST_LISTENERS", 0)
    with hub.listener() as refused:
        assert refused is None


def test_a_port_that_is_taken():
    with (
        serving(None) as server,
        pytest.raises(ValueError, match=f"port {server.port} cannot be had"),
    ):
        VizServer(server.port, Hub(), live=None, trace=None)


def test_entropy():
    assert entropy(np.zeros(8, np.float32)) == 3.0
    assert entropy(np.array([0.0, -np.inf, -np.inf], np.float32)) == 0.0
    assert entropy(np.log(np.array([0.5, 0.25, 0.25], np.float32))) == 1.5
