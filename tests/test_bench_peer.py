"""Peers of the bench: stand-ins that speak the protocol, and break it."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from minfer_jax import bench_peer, bench_worker
from minfer_jax.bench_peer import Job, LlamaBenchPeer, PackagePeer
from minfer_jax.bench_process import PeerError, Process

JOB = Job(model=Path("m.gguf"), n_ctx=64, threads=2, n_prompt=10, n_gen=0)
DECODE = Job(model=Path("m.gguf"), n_ctx=64, threads=2, n_prompt=7, n_gen=5)

# Answers "hello", then with flash_attn 4 s and without it 2 s; what it was asked goes to a file.
ANSWERS = """
    import json, os, sys
    settings, flash = {}, None
    for line in sys.stdin:
        with open(LOG, "a") as log:
            log.write(line)
        request = json.loads(line)
        if request["op"] == "hello":
            answer = {"version": "stand-in 1.0"}
        elif request["op"] == "load":
            flash = request["settings"]["flash_attn"]
            answer = {}
        else:
            answer = {"seconds": 4.0 if flash else 2.0}
        BODY
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a stand-in for the worker; the body may spoil its answers."""

    def make(body: str = "pass", *, code: str | None = None) -> Path:
        log = tmp_path / "asked"
        text = textwrap.dedent(code or ANSWERS.replace("BODY", body))
        path = tmp_path / "worker.py"
        path.write_text(f"LOG = {str(log)!r}\n{text}")
        monkeypatch.setattr(bench_peer, "_WORKER", path)
        return log

    return make


def children() -> set[str]:
    """Processes below this one."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def _no_child_stays():
    before = children() if sys.platform == "linux" else set()
    yield
    assert (children() if sys.platform == "linux" else set()) <= before


def test_the_fastest_settings_are_measured(worker):
    log = worker()
    peer = PackagePeer("llama.cpp")
    assert (peer.name, peer.version) == ("llama.cpp", "stand-in 1.0")
    peer.begin(JOB)
    assert peer.settings == {"flash_attn": False}
    assert peer.rate() == 10 / 2.0
    peer.end()
    assert log.read_text().count('"load"') == 2
    assert '"n_prompt": 10, "n_gen": 0' in log.read_text()


def test_a_decode_counts_generated_tokens(worker):
    worker()
    peer = PackagePeer("llama.cpp")
    peer.begin(DECODE)
    assert peer.rate() == 5 / 2.0
    peer.end()


def test_settings_that_crash_are_passed_over(worker):
    worker('if request["op"] == "run" and not flash: os.abort()')
    peer = PackagePeer("llama.cpp")
    peer.begin(JOB)
    assert (peer.settings, peer.rate()) == ({"flash_attn": True}, 10 / 4.0)
    peer.end()


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ('if request["op"] == "load": answer = {"error": "no such type"}', "no such type"),
        ('if request["op"] == "run": sys.exit("dead, and why")', "status 1: dead, and why"),
        ('if request["op"] == "run": print("xyzzy"); continue', "JSON object.*xyzzy"),
        ('if request["op"] == "run": print("[1]"); continue', "JSON object"),
        ('if request["op"] == "run": answer = {}', "positive number.*None"),
        ('if request["op"] == "run": answer = {"seconds": 0}', "positive number"),
        ('if request["op"] == "run": answer = {"seconds": float("nan")}', "positive number"),
    ],
)
def test_a_peer_that_cannot_run_is_one_line(worker, body, match):
    worker(body)
    peer = PackagePeer("llama.cpp")
    with pytest.raises(PeerError, match=f"^llama.cpp.*{match}") as caught:
        peer.begin(JOB)
    assert str(caught.value).isprintable()
    peer.end()


def test_a_peer_that_hangs_is_given_up(worker, monkeypatch):
    worker('if request["op"] == "load": import time; time.sleep(600)')
    peer = PackagePeer("llama.cpp")
    monkeypatch.setattr(bench_peer, "_TIME_LIMIT", 0.5)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"no answer within 0 s"):
        peer.begin(JOB)
    assert time.monotonic() - begin < 10


def test_an_answer_without_end_is_given_up():
    process = Process("x", [sys.executable, "-c", "while True: print('y' * 9999, end='')"])
    with pytest.raises(PeerError, match="x: an answer without end"):
        process.ask({}, time_limit=30)
    process.close()


def test_no_such_interpreter():
    with pytest.raises(PeerError, match="cannot run /no/python: No such file"):
        PackagePeer("llama.cpp", python="/no/python")


# The worker itself, with a stand-in for the package


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of packages for the child; it holds a llama_cpp whose runs sleep 10 ms a token."""
    about = tmp_path / "llama_cpp_python-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 9.9\n")
    (tmp_path / "llama_cpp.py").write_text(
        textwrap.dedent("""
            import time
            print("noise on standard output")
            class Llama:
                def __init__(self, model_path, *, n_ctx, n_threads, flash_attn, **more):
                    if model_path != "m.gguf":
                        raise ValueError("Failed to load")
                    assert (n_ctx, n_threads, more["n_batch"]) == (64, 2, 512)
                    self.n_tokens = 0
                def reset(self):
                    self.n_tokens = 0
                def eval(self, tokens):
                    self.n_tokens += len(tokens)
                    assert self.n_tokens <= 64
                    time.sleep(0.01 * len(tokens))
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_the_worker_runs_a_package(package):
    peer = PackagePeer("llama.cpp")
    assert peer.version == "llama-cpp-python 9.9"
    for job in (JOB, DECODE):
        peer.begin(job)
        assert 10 < peer.rate() <= 100  # tokens a second, at 10 ms a token
        peer.end()


def test_what_the_package_refuses_is_told(package):
    peer = PackagePeer("llama.cpp")
    with pytest.raises(PeerError, match=r"^llama.cpp: ValueError: Failed to load$"):
        peer.begin(Job(model=Path("other.gguf"), n_ctx=64, threads=2, n_prompt=1, n_gen=0))


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(PeerError, match="-m pip install ik-llama-cpp-python") as caught:
        PackagePeer("ik_llama.cpp")
    assert sys.executable in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_worker_imports_nothing_of_ours():
    text = Path(bench_worker.__file__).read_text()
    assert "from minfer_jax" not in text
    assert set(bench_worker.PEERS) == set(bench_peer.PACKAGES)
    for name, (package, _, _) in bench_worker.PEERS.items():
        assert package == bench_peer.PACKAGES[name].name


class FakeC:
    """The calls of ik_llama.cpp's interface that the worker makes."""

    def __init__(self):
        self.batches: list[tuple[list[int], list[int], list[int]]] = []
        self.cleared = 0

    def llama_backend_init(self):
        pass

    def llama_model_default_params(self):
        return type("Params", (), {})()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path, params):
        assert (path, params.n_gpu_layers, params.repack_tensors) == (b"m.gguf", 0, True)
        return 1

    def llama_init_from_model(self, model, params):
        assert (params.n_ctx, params.n_batch, params.n_ubatch) == (2048, 512, 512)
        assert (params.n_threads, params.n_threads_batch, params.flash_attn) == (2, 2, False)
        return 2

    def llama_batch_init(self, n, embd, n_seq):
        batch = type("Batch", (), {})()
        arrays = {name: [0] * n for name in ("token", "pos", "n_seq_id", "logits")}
        vars(batch).update(arrays, seq_id=[[0] for _ in range(n)])
        return batch

    def llama_kv_cache_clear(self, context):
        self.cleared += 1

    def llama_decode(self, context, batch):
        n = batch.n_tokens
        wanted = [i for i in range(n) if batch.logits[i]]
        self.batches.append((batch.token[:n], batch.pos[:n], wanted))
        return 0 if self.cleared < 3 else 7


def test_ik_llama_cpp_gets_batches_in_their_places():
    c = FakeC()
    settings = {"flash_attn": False, "repack": True}
    engine = bench_worker.IkLlamaCpp(c, model="m.gguf", n_ctx=2048, threads=2, settings=settings)
    assert bench_worker._seconds(engine, 600, 2) > 0
    assert [(len(t), p[0], p[-1], w) for t, p, w in c.batches] == [
        (512, 0, 511, [511]),
        (88, 512, 599, [87]),
        (1, 600, 600, [0]),
        (1, 601, 601, [0]),
    ]
    assert max(max(t) for t, _, _ in c.batches) < 96  # any vocabulary has them
    bench_worker._seconds(engine, 1, 0)
    assert c.batches[-1][1] == [0]
    with pytest.raises(RuntimeError, match="status 7"):
        bench_worker._seconds(engine, 1, 0)


# llama-bench


@pytest.fixture
def llama_bench(tmp_path):
    """Makes a stand-in for the program."""

    def make(code: str) -> str:
        path = tmp_path / "llama-bench"
        path.write_text(f"#!{sys.executable}\nimport json, sys\nargs = sys.argv[1:]\n{code}\n")
        path.chmod(0o755)
        return str(path)

    return make


HELP = "if '--help' in args: sys.exit(0)\n"


def test_llama_bench_is_run_for_each_repetition(llama_bench, tmp_path):
    log = tmp_path / "args"
    program = llama_bench(
        f"{HELP}open({str(log)!r}, 'a').write(' '.join(args) + '\\n')\n"
        "print(json.dumps([{'samples_ts': [41.5], 'avg_ts': 41.5, 'build_commit': 'abc123'}]))"
    )
    peer = LlamaBenchPeer(program)
    peer.begin(JOB)
    assert (peer.rate(), peer.version) == (41.5, "llama-bench abc123")
    peer.end()
    peer.begin(DECODE)
    peer.end()
    prefill, again, decode = log.read_text().splitlines()
    assert prefill == again
    assert prefill == "-m m.gguf -o json -r 1 -t 2 -ngl 0 -b 512 -ub 512 -p 10 -n 0"
    assert decode.endswith("-p 0 -n 5 -d 7")


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("sys.exit('unknown model architecture')", "status 1: unknown model architecture"),
        ("print('hello')", "expected its JSON, and it says 'hello'"),
        ("print('[]')", "expected its JSON"),
        ("print('[{\"samples_ts\": []}]')", "expected its JSON"),
        ("print('[{\"samples_ts\": [0]}]')", "positive number"),
    ],
)
def test_a_llama_bench_that_fails_is_one_line(llama_bench, code, match):
    peer = LlamaBenchPeer(llama_bench(HELP + code))
    with pytest.raises(PeerError, match=match) as caught:
        peer.begin(JOB)
    assert str(caught.value).isprintable()


def test_no_such_llama_bench(tmp_path):
    with pytest.raises(PeerError, match=r"cannot run .*nothing: No such file"):
        LlamaBenchPeer(os.path.join(tmp_path, "nothing"))
