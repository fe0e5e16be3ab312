"""The models command."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from minfer_jax import models
from minfer_jax.model_report import decimal
from minfer_jax.models_flags import Options, help_text, parse
from minfer_jax.sources import ALIASES
from minfer_jax.sources.record import Record, write_record
from minfer_jax.usage import UsageError
from tests.helpers.gguf_builder import build_split, dense
from tests.helpers.servers import put_ollama, put_repo, sha256
from tests.helpers.tiny_models import tiny_text_model

MODEL = tiny_text_model()


@pytest.fixture
def run(model_folder, capfd):
    """Runs the command: exit status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        status = models.main(["models", *words])
        sys.stdout.flush()
        return status, *capfd.readouterr()

    return run


def put(folder: Path, name: str, body: bytes = MODEL, source: str | None = None) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    if source is not None:
        write_record(path, Record(size=len(body), sha256=sha256(body), source=source))
    return path


# --- flags ----------------------------------------------------------------------------------------


def test_flags():
    assert parse(["models", "list"]) == Options(
        command="list", models=(), json=False, verify=False, force=False
    )
    found = parse(["models", "--force", "rm", "a", "b"])
    assert (found.command, found.models, found.force) == ("rm", ("a", "b"), True)
    found = parse(["models", "info", "a", "--json", "--verify"])
    assert (found.command, found.models, found.json, found.verify) == ("info", ("a",), True, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"no command is given: expected one of list, info, download, rm"),
        (["show"], r"there is no command 'show': expected one of list"),
        (["lst"], r"there is no command 'lst' \(did you mean 'list'\?\)"),
        (["list", "x"], r"list got 1 models, expected no model"),
        (["info"], r"info got 0 models, expected one MODEL"),
        (["info", "a", "b"], r"info got 2 models, expected one MODEL"),
        (["download"], r"download got 0 models, expected MODEL\.\.\."),
        (["rm"], r"rm got 0 models"),
        (["list", "--force"], r"--force is no flag of list"),
        (["rm", "a", "--json"], r"--json is no flag of rm"),
        (["list", "--frobnicate"], r"there is no flag '--frobnicate'"),
    ],
)
def test_wrong_usage(words, message):
    with pytest.raises(UsageError, match=message):
        parse(["models", *words])


def test_help(run):
    status, out, err = run("--help")
    assert (status, out, err) == (0, help_text(), "")
    lines = out.splitlines()
    assert len(lines) < 38 and max(map(len, lines)) <= 80
    assert "  --verify" in out and "hf:ORG/REPO:Q8_0" in out


def test_wrong_usage_is_told_in_a_line(run):
    assert run("show")[0::2] == (2, "error: there is no command 'show': expected one of list, info,"
                                 " download, rm (--help shows examples)\n")  # fmt: skip


# --- list -----------------------------------------------------------------------------------------


def test_an_empty_list(run):
    assert run("list") == (0, "", "no models yet; python -m minfer_jax.models download smollm2\n")
    assert run("list", "--json") == (0, "[]\n", "")


def test_list(run, model_folder):
    put(model_folder, "plain.gguf", bytes(1_234_567))
    other = put(model_folder, "url/h/longer-name.gguf", bytes(10), "https://h/longer-name.gguf")
    assert run("list") == (
        0,
        "https://h/longer-name.gguf       10 B\nplain                          1.2 MB\n",
        "",
    )
    status, out, _ = run("list", "--json")
    assert status == 0 and json.loads(out)[0] == {
        "reference": "https://h/longer-name.gguf",
        "size": 10,
        "files": [str(other)],
        "owner": "cache",
    }


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (10**10, "10.0 GB")],
)
def test_decimal_units(size, text):
    assert decimal(size) == text


# --- info -----------------------------------------------------------------------------------------


def test_info(run, model_folder):
    path = put(model_folder, "tiny.gguf")
    status, out, err = run("info", "tiny")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:4] == [
        "reference       tiny",
        f"files           {path}",
        f"size            {decimal(len(MODEL))} ({len(MODEL)} bytes)",
        "architecture    llama",
    ]
    assert "template        yes" in lines
    assert "  general.architecture = 'llama'" in lines
    assert any(line.split()[:2] == ["token_embd.weight", "F32"] for line in lines)
    assert run("info", str(path))[1].splitlines()[1:] == lines[1:]


def test_info_as_json(run, model_folder):
    put(model_folder, "tiny.gguf")
    found = json.loads(run("info", "tiny", "--json")[1])
    assert found["architecture"] == "llama" and found["template"] is True
    assert found["quantization"] == "F32" and found["bits_per_weight"] == 32
    assert found["size"] == len(MODEL) and found["layers"] > 0 and found["context"] > 0
    assert "sha256" not in found and "experts" not in found


def test_info_of_a_split_and_of_a_file_that_says_little(run, model_folder):
    import numpy as np

    tensor = dense(np.zeros((2, 32), np.float32))
    for name, body in build_split("s", {}, [{"a": tensor}, {"b": tensor}]).items():
        put(model_folder, name, body)
    found = json.loads(run("info", "s", "--json")[1])
    assert len(found["files"]) == 2 and found["parameters"] == 128
    assert "architecture" not in found and "name" not in found
    assert run("info", "s")[1].splitlines()[1].endswith("s-00001-of-00002.gguf and 1 more")


def test_verify(run, model_folder):
    path = put(model_folder, "tiny.gguf", source="https://h/tiny.gguf")
    digest = sha256(MODEL)
    assert f"\nsha256          {digest} (as expected)\n" in run("info", "tiny", "--verify")[1]
    damaged = bytearray(MODEL)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    status, out, err = run("info", "tiny", "--verify")
    assert (status, out) == (1, "")
    assert f"is damaged: its sha256 is {sha256(bytes(damaged))}; {digest} is expected" in err
    put(model_folder, "other.gguf")
    assert f"{digest} (not known before)" in run("info", "other", "--verify")[1]
    plain = put(model_folder.parent, "elsewhere.gguf")
    assert f"{digest} (not known before)" in run("info", str(plain), "--verify")[1]


def test_an_alias_s_digest_is_known(run, model_folder):
    put(model_folder, ALIASES["smollm2"].file_name)
    status, _, err = run("info", str(model_folder / ALIASES["smollm2"].file_name), "--verify")
    assert status == 1 and f"{ALIASES['smollm2'].sha256} is expected" in err


def test_info_fetches_nothing(run, hub):
    for ref in ("smollm2", "hf:a/b", "https://h/m.gguf", "ollama:m", "pypi:a==1.0/m.gguf"):
        status, out, err = run("info", ref)
        assert (status, out) == (1, "") and err.count("\n") == 1
        assert f"this fetches it: python -m minfer_jax.models download {ref}\n" in err
    assert hub.requests == []


def test_info_of_what_is_no_model(run, model_folder):
    put(model_folder, "bad.gguf", b"GGUF")
    status, out, err = run("info", "bad")
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1


# --- download and rm ------------------------------------------------------------------------------


def test_download(run, hub, store, model_folder, monkeypatch):
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", hub.url)
    put_repo(hub, store, "a/b", {"m.gguf": MODEL})
    put_ollama(hub, "library/tiny", "latest", MODEL)
    url = hub.file("/m.gguf", MODEL)
    status, out, err = run("download", "hf:a/b", url, "ollama:tiny")
    assert status == 0 and err.count("fetching ") == 3
    paths = [Path(line) for line in out.splitlines()]
    assert [path.read_bytes() for path in paths] == [MODEL] * 3
    assert run("download", "hf:a/b", url, "ollama:tiny") == (0, out, "")
    status, out, err = run("info", f"{url.replace('//', '//user:secret@')}?token=secret")
    assert status == 0 and "secret" not in out + err and url in out
    status, out, err = run("download", url, "hf:a/none", "ollama:tiny")
    assert (status, out) == (1, f"{paths[1]}\n")
    assert err.startswith("error: no repository or file a/none at http://")


def test_rm(run, model_folder):
    put(model_folder, "a.gguf")
    put(model_folder, "b.gguf")
    status, out, err = run("rm", "a")
    assert (status, out) == (1, "") and "is only removed when asked on a terminal, or with" in err
    assert run("rm", "a", "b", "--force") == (0, "", f"{decimal(2 * len(MODEL))} freed\n")
    assert list(model_folder.iterdir()) == []
    assert run("rm", "a", "--force")[0] == 1
    elsewhere = put(model_folder.parent, "mine.gguf")
    status, _, err = run("rm", str(elsewhere), "--force")
    assert status == 1 and "was not fetched, and is left alone" in err
    assert elsewhere.exists()


@pytest.mark.parametrize(("answer", "removed"), [("y", True), ("n", False), ("", False)])
def test_rm_asks_on_a_terminal(model_folder, answer, removed):
    path = put(model_folder, "a.gguf")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "minfer_jax.models", "rm", "a"]
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE) as process:
        os.write(ours, f"{answer}\n".encode())
        assert process.wait(60) == 0
        os.close(theirs)
        said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert f"remove a ({decimal(len(MODEL))})? [y/N]" in said
    assert path.exists() != removed


def test_the_command_loads_nothing_slow():
    code = (
        "import sys, minfer_jax.models; print(*{'jax', 'tokenizers', 'httpx2'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")


def test_as_a_program(model_folder):
    command = [sys.executable, "-m", "minfer_jax.models", "info", "nothing"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: no model 'nothing': a reference is a path to")
    assert run.stderr.count("\n") == 1
