"""`python -m minfer_jax.generate` from outside: what goes to which stream, and the exit statuses.

Most tests call `main` in this process; what needs a process of its own has one, and few have.
"""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from minfer_jax import generate, model_command
from minfer_jax.generate_flags import help_all, help_text
from minfer_jax.language_model import LanguageModel, load
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import dense
from tests.helpers.ran import Ran

GREEDY = ("--greedy", "-n", "24")
pytestmark = pytest.mark.usefixtures("one_compile_cache", "logging_as_it_was")

COMMAND = (sys.executable, "-m", "minfer_jax.generate")
RATE = r"\d+ tokens in \d+\.\d\ds \(\d+\.\d tok/s\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def path(folder) -> str:
    """Its bias keeps the model from ending, and makes it write mostly what is seen on a screen."""
    n = 3 + 256 + len(tiny_models.TEXT_MERGES)
    bias = np.full(n, -1.0, np.float32)
    bias[:3] = -1e9
    bias[3 : 3 + 94] = bias[-len(tiny_models.TEXT_MERGES) :] = 2.0
    data = tiny_models.tiny_text_model(
        n_layer=2, n_ctx=4096, biases=("output",), tensors={"output.bias": dense(bias)}
    )
    return str(tiny_models.save(folder, data).path)


@pytest.fixture(scope="module")
def model(path) -> LanguageModel:
    return load(path)


@pytest.fixture
def run(capsys):
    """Runs the command in this process."""

    def call(*argv: str) -> Ran:
        capsys.readouterr()
        status = generate.main(["generate", *argv])
        return Ran(status, *capsys.readouterr())

    return call


def refused(ran: Ran, status: int) -> str:
    """The one line with which a run was refused."""
    assert (ran.status, ran.out) == (status, "")
    *others, last = ran.err.splitlines()
    assert last.startswith("error: ")
    assert not [line for line in others if "error" in line.lower() or "Traceback" in line]
    assert last.isprintable()
    return last.removeprefix("error: ")


def type_in(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


# The answer


def test_standard_output_is_the_text_and_nothing_else(run, path, model):
    ran = run(path, "hello world", *GREEDY)
    assert ran.status == 0
    assert ran.out == model.generate("hello world", max_tokens=24, temperature=0.0)
    assert len(ran.out) >= 20
    n = len(model.encode_prompt("hello world"))
    size = Path(path).stat().st_size
    for pattern in (
        rf"Loading model: {re.escape(path)} \.\.\.",
        rf"File: {size} bytes \({size / 1e6:.1f} MB\) in 1 part\(s\)",
        r"GGUF: \d+ KV, 22 tensors",
        rf"Vocabulary: {model.cfg.n_vocab} tokens",
        rf"Prompt: {n} tokens",
        r"Loaded: 2 layers",
        rf"Prefill: (?={n} ){RATE}",
        rf"Generated: (?=24 ){RATE}",
        rf"Total:     (?={n + 24} ){RATE}",
        r"Compiled: 2 programs in \d+\.\d\ds \(prefill 32 \d+\.\d\ds, decode \d+\.\d\ds\)",
        r"Finished: length",
    ):
        assert len(re.findall(rf"^{pattern}$", ran.err, re.MULTILINE)) == 1, pattern
    assert ran.err.index("Prefill: ") < ran.err.index("\n---\n") < ran.err.index("Generated: ")


def test_the_flags_of_the_sampler_count(run, path, model):
    argv = "--temp 1.5 --top-k 0 --top-p 0.9 --min-p 0.01 --repeat-penalty 1.2 --seed 5 -n 24"
    ran = run(path, "hello", *argv.split())
    assert ran.out == model.generate(
        "hello",
        max_tokens=24,
        temperature=1.5,
        top_k=0,
        top_p=0.9,
        min_p=0.01,
        repeat_penalty=1.2,
        seed=5,
    )
    assert ran.out != run(path, "hello", *argv.replace("--seed 5", "--seed 6").split()).out


def test_stop_and_system(run, path, model):
    text = model.generate("hello", system="Be brief.", max_tokens=24, temperature=0.0)
    stop = text[7:9]
    ran = run(path, "hello", *GREEDY, "--system", "Be brief.", "--stop", stop, "--stop=\0")
    assert ran.out == text[: text.find(stop)]
    assert "Finished: stop" in ran.err


def test_no_template(run, path, model):
    ran = run(path, "hello", "--no-template", "--greedy", "-n", "3")
    assert ran.out == model.generate("hello", template=False, max_tokens=3, temperature=0.0)
    assert "Prompt: 1 tokens" in ran.err


def test_no_tokens_at_all(run, path):
    ran = run(path, "hello", "-n", "0")
    assert (ran.status, ran.out) == (0, "")
    assert "Generated: 0 tokens in 0.00s (0.0 tok/s)" in ran.err
    assert "Compiled: 0 programs" in ran.err


def test_meta(run, path, model):
    ran = run(path, "hello", "--meta", "-n", "0")
    for line in (
        "  general.architecture = 'llama'",
        "  llama.block_count = 2",
        f"  tokenizer.ggml.tokens = ({model.cfg.n_vocab}) ['<|endoftext|>', '<|im_start|>',",
        "  22 tensors of F32, ",
        f"KV state {model.engine.kv_bytes / 1e6:.1f} MB (4096 positions, float16)",
    ):
        assert line in ran.err
    assert "  2 layers of full attention: 4096 slots each, 1.0 MB" in ran.err
    assert "sliding" not in ran.err
    # Keys and values of 2 layers, 4096 positions, 2 heads of 16; and the positions, int32, those
    # of rings too, of which this model has none.
    assert model.engine.kv_bytes == 2 * 2 * 4096 * 2 * 16 * 2 + (4096 + 512) * 4


def test_a_context_that_shifts(run, path, model):
    """The answer is longer than the context; what was dropped is told."""
    short = ("--n-ctx", "32", "--greedy", "-n", "60")
    assert "Finished: length" in run(path, "hello", *short).err
    assert "Dropped" not in run(path, "hello", *short).err
    ran = run(path, "hello", *short, "--context-shift", "--keep", "4")
    assert re.search(rf"Generated: (?=60 ){RATE}", ran.err)
    assert re.search(r"^Dropped: \d+ tokens, as the context was full$", ran.err, re.MULTILINE)
    small = load(path, n_ctx=32)
    options = {"temperature": 0.0, "context_shift": True, "n_keep": 4}
    assert ran.out == small.generate("hello", max_tokens=60, **options)


# The prompt


def test_without_a_standard_input_there_is_no_prompt(monkeypatch, run, path):
    monkeypatch.setattr(sys, "stdin", None)
    assert "the prompt is empty" in refused(run(path), 2)


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n \n"])
def test_an_empty_prompt(monkeypatch, run, path, data):
    type_in(monkeypatch, data)
    assert "the prompt is empty" in refused(run(path), 2)
    assert "the prompt is empty" in refused(run(path, data.decode(), "--no-template"), 2)


@pytest.mark.parametrize("name", ["-f", "-"])
def test_the_prompt_from_a_file_or_a_pipe(monkeypatch, run, tmp_path, path, model, name):
    """As Windows may have written it: with a mark, and lines that end in CRLF."""
    data = b"\xef\xbb\xbfhello\r\nworld\r\n"
    (tmp_path / "ask.txt").write_bytes(data)
    type_in(monkeypatch, data)
    ran = run(path, "-f", str(tmp_path / "ask.txt") if name == "-f" else "-", *GREEDY)
    assert ran.out == model.generate("hello\nworld", max_tokens=24, temperature=0.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b"\r\n", "is empty"), (b"a\0b", "is no text")],
)
def test_no_model_is_looked_for_without_a_prompt(run, tmp_path, data, message):
    if data is not None:
        (tmp_path / "ask.txt").write_bytes(data)
    ran = run("no-such-model", "-f", str(tmp_path / "ask.txt"))
    assert message in refused(ran, 2)
    assert len(ran.err.splitlines()) == 1


# Edges: what the library does there is in test_edges


def test_a_seed_that_is_drawn_is_told(run, path):
    hot = ("--temp", "2", "--top-k", "0", "-n", "16")
    first, second = (run(path, "hello", *hot, "--seed", "-1") for _ in range(2))
    assert first.out != second.out
    seed = re.findall(r"^Seed: (\d+)$", first.err, re.MULTILINE)
    again = run(path, "hello", *hot, "--seed", *seed)
    assert again.out == first.out
    assert "Seed: " not in again.err


def test_a_preset(run, path, model, tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text("[load]\nn_ctx = 96\n[generate]\ntemperature = 0\nmax_tokens = 7\n")
    ran = run(path, "hello", "--config", str(preset), "--meta")
    assert ran.out == model.generate("hello", max_tokens=7, temperature=0.0)
    assert "(96 positions," in ran.err


def test_a_context_that_the_prompt_fills(run, folder):
    """As many tokens as the model was made for: one more is drawn. With one more: refused."""
    data = tiny_models.tiny_text_model(n_layer=1, n_ctx=24)
    small = str(tiny_models.save(folder, data, "small.gguf").path)
    for n, drawn in ((24, 1), (22, 3)):
        ran = run(small, "z" * n, "--no-template", "-n", "-1", "--temp", "9", "--seed", "1")
        assert f"Generated: {drawn} tokens" in ran.err
        assert "Finished: length" in ran.err
    message = refused(run(small, "z" * 25, "--no-template"), 1)
    assert message == "the prompt has 25 tokens, but the context holds 24: shorten it"


def test_a_model_of_numbers_that_are_none(run, folder):
    tensors = {"output_norm.weight": dense(np.full(64, np.nan, np.float32))}
    data = tiny_models.tiny_text_model(n_layer=1, tensors=tensors)
    broken = str(tiny_models.save(folder, data, "broken.gguf").path)
    assert "the model gave no finite logits at position 19" in refused(run(broken, "hello"), 1)


# Refusals


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--temp=hot"], ["-n", "-5"], ["--seed=-2"]])
def test_wrong_usage(run, argv):
    ran = run("model.gguf", "hello", *argv)
    refused(ran, 2)
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("flag", ["-h", "--help", "-help"])
def test_help(run, flag):
    assert run("model.gguf", flag, "--nonsense") == Ran(0, help_text(), "")
    assert run("--help-all", flag) == Ran(0, help_all(), "")


def test_files_that_are_none(run, folder, path):
    garbage, cut = folder / "garbage.gguf", folder / "cut.gguf"
    prompt = str(folder / "prompt.txt")
    Path(prompt).write_text("hello")
    garbage.write_bytes(b"\x89PNG\r\n" + bytes(1000))
    data = Path(path).read_bytes()
    assert "no such file" in refused(run(str(folder / "none.gguf"), "hello"), 1)
    assert "no model 'no-such-name'" in refused(run("no-such-name", "hello"), 1)
    assert refused(run("Hello!"), 1).endswith("give the model too: smollm2 'Hello!'")
    for argv in (("Hello", "you"), ("Hello", "-f", prompt), (path, "x", "--draft", "Hello")):
        assert "is the MODEL" not in refused(run(*argv), 1)
    assert "is a folder" in refused(run(str(folder), "hello"), 1)
    assert "garbage.gguf" in refused(run(str(garbage), "hello"), 1)
    for size in (0, 10, 1000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        assert "cut.gguf" in refused(run(str(cut), "hello"), 1)


def test_models_that_cannot_run(run, folder):
    def message(data: bytes, *argv: str) -> str:
        return refused(run(str(tiny_models.save(folder, data, "x.gguf").path), "hello", *argv), 1)

    text_model = tiny_models.tiny_text_model
    arch = message(text_model(metadata={"general.architecture": "bloom"}))
    assert "'bloom' is not supported; supported are arcee, cohere2, command-r, " in arch
    assert "output_norm.weight is missing" in message(
        text_model(tensors={"output_norm.weight": None})
    )
    assert "llama.block_count" in message(text_model(keys={"block_count": None}))
    assert "expected one of 'gpt2'" in message(
        text_model(metadata={"tokenizer.ggml.model": "test"})
    )
    assert "chat template, line 1" in message(
        text_model(metadata={"tokenizer.chat_template": "{% if %}"})
    )
    long = message(text_model(n_ctx=16))
    assert "20 tokens" in long
    assert "16" in long


def test_options_of_the_model_reach_it(run, path, monkeypatch):
    def refuse(file, **options):
        asked = ("precision", "n_ctx", "cache_type", "prefill_chunk")
        raise ValueError(", ".join(str(options[name]) for name in asked))

    monkeypatch.setattr(model_command, "from_file", refuse)
    assert refused(run(path, "hello"), 1) == "default, 4096, None, 512"
    flags = "--precision highest --cache-type bf16 --prefill-chunk 64 --n-ctx".split()
    assert refused(run(path, "hello", *flags, "100"), 1) == "highest, 100, bf16, 64"
    assert refused(run(path, "hello", *flags, "1"), 1) == "highest, 20, bf16, 64"


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x")]
)
def test_out_of_memory(run, path, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(model_command, "from_file", refuse)
    assert "out of memory; try a smaller model or --n-ctx" in refused(run(path, "hello"), 1)


def test_errors_of_ours_are_not_hidden(run, path, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: x")

    monkeypatch.setattr(model_command, "from_file", fail)
    with pytest.raises(jax.errors.JaxRuntimeError):
        run(path, "hello")


def test_threads_are_bounded_by_the_processors(run, monkeypatch):
    """XLA starts as many as it is told to, and takes minutes for a hundred thousand."""
    monkeypatch.setenv("NPROC", "")
    refused(run("/no/such/model.gguf", "hello", "-t", "100000"), 1)
    assert os.environ["NPROC"] == str(os.cpu_count())
    refused(run("/no/such/model.gguf", "hello", "-t", "1"), 1)
    assert os.environ["NPROC"] == "1"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_the_caller_closed(capsys, monkeypatch, stream):
    """Python has None then, and what was meant for one must not go to the other."""
    monkeypatch.setattr(sys, stream, None)
    argv = ["--help"] if stream == "stdout" else ["--no-such-flag"]
    assert generate.main(["generate", *argv]) == (0 if stream == "stdout" else 2)
    getattr(sys, stream).close()
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


# A process of its own


def test_a_whole_run_with_one_thread(path, model):
    """Text as bytes, prompt with CRLF from a pipe; the answer is that of all threads."""
    ran = subprocess.run(
        [*COMMAND, path, *GREEDY, "--threads", "1"],
        input=b"hello world\r\n",
        capture_output=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    text = model.generate("hello world", max_tokens=24, temperature=0.0)
    assert ran.stdout == text.encode()
    assert ran.stderr.count(b"\nPrefill: ") == ran.stderr.count(b"\nGenerated: ") == 1


def test_an_odd_environment(path, model, tmp_path):
    """A locale of ASCII alone, a home that is no folder, and nowhere to keep what is compiled."""
    (tmp_path / "ask.txt").write_bytes("\ufeffhéllo\r\n".encode())
    names = ("MINFER_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR")
    odd = {
        **{name: value for name, value in os.environ.items() if name not in names},
        **{"HOME": "/dev/null", "LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0"},
        **{"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii:strict"},
    }
    argv = [path, "-f", str(tmp_path / "ask.txt"), "--system", "Kürze.", *GREEDY]
    ran = subprocess.run([*COMMAND, *argv], capture_output=True, timeout=120, env=odd)
    assert ran.returncode == 0, ran.stderr
    options = {"system": "Kürze.", "max_tokens": 24, "temperature": 0.0}
    assert ran.stdout == model.generate("héllo", **options).encode()
    assert ran.stderr.count(b"note: no compile cache: cannot write to /dev/null/.cache") == 1
    assert b"Traceback" not in ran.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux only")
def test_threads_limit_the_pool():
    code = (
        "import sys; from pathlib import Path; from minfer_jax import generate\n"
        "assert generate.main(['generate', '/no/such/model', 'hello', '-t', '1']) == 1\n"
        "import jax; jax.jit(lambda x: x + 1)(1.0)\n"
        "names = [task.read_text() for task in Path('/proc/self/task').glob('*/comm')]\n"
        "print(sum(name.startswith('tf_XLAEigen') for name in names))"
    )
    environment = {**os.environ, "XLA_FLAGS": ""}  # several devices would have a thread each
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, env=environment
    )
    assert (ran.returncode, ran.stdout) == (0, b"1\n"), ran.stderr


def test_a_note_and_a_refusal(folder):
    data = tiny_models.tiny_text_model(n_ctx=1, metadata={"tokenizer.chat_template": None})
    bare = str(tiny_models.save(folder, data, "bare.gguf").path)
    ran = subprocess.run([*COMMAND, bare, "hello hello"], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (1, b"")
    *_, note, error = ran.stderr.decode().splitlines()
    assert note.startswith("note: the file has no chat template")
    assert error.startswith("error: the prompt has ")
    assert b"Traceback" not in ran.stderr


def test_a_reader_that_goes_away(path):
    argv = [*COMMAND, path, "hello", "--greedy", "-n", "2000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0
    assert b"Prefill: " in err
    for word in (b"Traceback", b"Exception", b"error"):
        assert word not in err


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("interrupt()", 130),  # while the first is reported
        ("os.kill(os.getpid(), signal.SIGINT); return 130", 130),
        ("atexit.register(interrupt); return 0", -signal.SIGINT),  # while the process ends
        ("return 2", 2),
    ],
)
def test_one_more_ctrl_c_is_quiet(body, status):
    code = (
        "import atexit, os, signal\n"
        "from minfer_jax.command import leave\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt():\n    os.kill(os.getpid(), signal.SIGINT)\n"
        f"def run():\n    {body}\n"
        "leave(run)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (status, b"")


def test_ctrl_c_ends_the_answer_and_reports(path):
    # Where the tests run in the background, SIGINT is ignored unless asked for.
    code = (
        "import runpy, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('minfer_jax.generate', run_name='__main__')"
    )
    argv = [sys.executable, "-c", code, path, "hello", "--greedy", "-n", "-1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    rates = rb"Generated: (\d+) tokens in .* tok/s\)\nTotal: (?:.*\n)*Finished: interrupted\n"
    found = re.search(rates, err)
    assert found
    assert 0 < int(found[1]) < 4000
    assert first + out
