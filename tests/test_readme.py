"""Every command and every Python block of the README runs: on tiny models, and on short texts.

What cannot run here is listed with its reason. A line that is neither fails, so that nothing gets
into the README untried. `python -m` of each module is what other tests do; here `main` is called.
"""

import importlib
import io
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from minfer_jax import sources
from minfer_jax.gguf import open_gguf
from minfer_jax.model.lora_file import map_shapes, write_lora
from minfer_jax.sources import cached
from tests.helpers import tiny_models
from tests.helpers.tiny_adapters import random_adapter

pytestmark = pytest.mark.usefixtures("cache_of_commands")

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
PYTHON = "python -m minfer_jax."

# Commands of another kind, by their beginning, and why they do not run here.
NOT_RUN = {
    "python3 -m venv ": "installs the package",
    ".venv/bin/": "checks and tests of the project itself",
    "pip install ": "installs",
    "python -m minfer_jax.generate [flags]": "the form of a command",
    "python -m minfer_jax.generate --cnv": "is `chat`, which runs",
    "python -m minfer_jax.generate --device gpu": "needs a GPU",
    "python -m minfer_jax.viz": "serves until Ctrl-C",
    "python -m minfer_jax.chat smollm2 --control-vector": "the tiny model's one layer takes none",
    "| ": "what bench prints",
}

# Model references that commands name; all of them are the tiny model. Files are there by this name.
MODELS = ("smollm2", "gemma3")
FILES = {
    "model.gguf": None,  # the tiny model
    "model-F16.gguf": None,
    "prompt.txt": "Why is the sky blue?\r\n",
    "questions.txt": "Who are you?\nWhy?\n",
    "text.txt": "hello world, hello again. " * 8,
}
ADAPTERS = ("style.gguf", "facts.gguf")
SHORTER = {  # said last, so that these count
    "generate": ["-n", "4"],
    "chat": ["-n", "4"],
    "compare": ["--n-ctx", "32"],
    "bench": ["-p", "4", "-n", "2", "-d", "0", "-r", "1"],
}
SILENT = ("quantize", "models")  # on standard output; `models rm` for one


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line: variables before it, a module's name and arguments, files redirected to."""

    variables: dict[str, str]
    module: str
    argv: list[str]
    stdin: str | None
    stdout: str | None


def lines() -> list[str]:
    """The lines of code that are no Python: in indented blocks, and in spans within the text."""
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    found = [line.strip() for block in blocks for line in block.splitlines()]
    return found + [span for span in spans if span.startswith((PYTHON, "pip install"))]


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def parsed(line: str) -> Command:
    words = list(shlex.shlex(line, posix=True, punctuation_chars="<>|"))
    lexer = shlex.shlex(line, posix=True, punctuation_chars="<>|;&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words = list(lexer)
    places: dict[str, str | None] = {"<": None, ">": None}
    plain: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in places:
            places[word] = next(rest)
        else:
            assert not set(word) <= set("<>|;&"), f"{word} is not understood in: {line}"
            plain.append(word)
    variables = {}
    while re.match("[A-Z_]+=", plain[0]):
        name, _, value = plain.pop(0).partition("=")
        variables[name] = value
    assert plain[:2] == ["python", "-m"], line
    return Command(
        variables=variables,
        module=plain[2].removeprefix("minfer_jax."),
        argv=plain[3:],
        stdin=places["<"],
        stdout=places[">"],
    )


RUN = [line for line in lines() if not line.startswith(tuple(NOT_RUN))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("tiny"), tiny_models.command_model()).path


@pytest.fixture
def place(tmp_path, monkeypatch, tiny) -> Path:
    """A folder with the files that the README names, and a cache in which all models are tiny."""
    for name, text in FILES.items():
        if text is None:
            shutil.copy(tiny, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(text.encode())
    shapes = map_shapes(open_gguf(tiny), "blk.*.attn_[qv].weight")
    for name in ADAPTERS:
        write_lora(tmp_path / name, random_adapter(shapes), "llama")
    monkeypatch.chdir(tmp_path)
    for variable in ("MINFER_MODEL_DIR", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(variable, str(tmp_path / "cache" / variable))
    resolve = sources.resolve

    def tiny_model(ref: str | Path, **options: bool) -> Path:
        if str(ref) not in MODELS:
            return resolve(ref, **options)
        path = sources.model_dir() / f"{re.sub('[^a-z0-9]+', '-', str(ref).lower())}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny, path)
        return path

    for module in (sources, cached):
        monkeypatch.setattr(module, "resolve", tiny_model)
    return tmp_path


def test_the_lists_are_of_what_there_is():
    assert len(RUN) > 8
    assert len(python_blocks()) >= 3
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines()), start
    for name in (*MODELS, *FILES, *ADAPTERS):
        assert name in README, name


@pytest.mark.parametrize("line", RUN)
def test_a_command_runs(place, monkeypatch, capfd, line):
    command = parsed(line)
    typed = (place / command.stdin).read_bytes() if command.stdin else b"Hello.\n"
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    main = importlib.import_module(f"minfer_jax.{command.module}").main
    status = main([command.module, *command.argv, *SHORTER.get(command.module, [])])
    out, err = capfd.readouterr()
    assert status == 0, err
    assert "error" not in err
    assert out or "exported to" in err or command.module in SILENT, "it prints something"


def test_the_python_runs(place, capsys):
    """One block after the other, as a reader would: each uses what those before have made."""
    namespace: dict[str, object] = {}
    for block in python_blocks():
        exec(compile(block, "README.md", "exec"), namespace)
    assert capsys.readouterr().out, "it streams an answer"


def test_a_line_that_is_not_understood_fails():
    for line in ("rm -rf x", "python -m minfer_jax.generate | less", "python generate.py"):
        with pytest.raises(AssertionError):
            parsed(line)
    command = parsed("python -m minfer_jax.bench 'a b' -n 1 < in.txt > out.txt  # why")
    assert command == Command(
        variables={}, module="bench", argv=["a b", "-n", "1"], stdin="in.txt", stdout="out.txt"
    )
