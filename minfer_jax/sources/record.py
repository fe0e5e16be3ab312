"""What is known of a fetched file, in a small file of JSON beside it.

    FOLDER/NAME.gguf        the file
    FOLDER/NAME.gguf.json   {"size": 98362432, "sha256": "b179...", "source": "smollm2"}

    FOLDER/NAME.gguf.part        what has come of a file that is being fetched
    FOLDER/NAME.gguf.part.json   {"size": 98362432, "etag": "...", "source": "https://..."}

A fetched file counts as present while it has the size of its record. The digest was checked, or
taken, when the file was fetched; `verify` reads all of it again, which takes longer than loading.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minfer_jax.sources.transfer import SourceError, progress_bar
from minfer_jax.whole_file import replacing

PART = ".part"  # how the name of an unfinished file ends
_CHUNK = 1 << 20
_MAX_BYTES = 1 << 20  # of a file of JSON


@dataclass(frozen=True, kw_only=True)
class Record:
    """A file as it was when it was fetched.

    Attributes:
        size: In bytes.
        sha256: Of the whole file, in hex.
        source: The reference that fetches it again.
    """

    size: int
    sha256: str
    source: str


def record_path(path: Path) -> Path:
    """Where the record of a file is."""
    return path.with_name(f"{path.name}.json")


def read_json(path: Path) -> Any:
    """What a small file of JSON holds; None where it is absent, too long, or no JSON."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def source_of(path: Path) -> str | None:
    """The reference that fetches, or goes on fetching, the file at a path; None if not known."""
    found = read_json(record_path(path))
    source = found.get("source") if type(found) is dict else None
    return source if type(source) is str else None


def write_record(path: Path, record: Record) -> None:
    """Writes the record of the file that is, or soon will be, at `path`."""
    with replacing(record_path(path)) as file:
        file.write(json.dumps(asdict(record), indent=1).encode())


def read_record(path: Path) -> Record | None:
    """The record of the file at `path`; None where there is none that can be read."""
    try:
        record = Record(**read_json(record_path(path)))
    except TypeError:  # no object, or not with these keys
        return None
    right = type(record.size) is int and type(record.sha256) is str and type(record.source) is str
    return record if right else None


def is_present(path: Path) -> bool:
    """Whether a file with a record is there, at the size it had when it was fetched."""
    record = read_record(path)
    return record is not None and path.is_file() and path.stat().st_size == record.size


def sha256_of(path: Path) -> str:
    """The digest of a file, in hex, with a bar on a terminal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, progress_bar(path.name, path.stat().st_size) as bar:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def check_size(path: Path) -> None:
    """Raises SourceError where a file is not of the size in its record, if it has one."""
    record = read_record(path)
    if record is None or is_present(path):
        return
    found = f"it has {path.stat().st_size} bytes" if path.exists() else "it is missing"
    raise SourceError(
        f"{str(path)!r} is damaged: {found}, and {record.size} were fetched; fetch it again:"
        f" python -m minfer_jax.models download {record.source}"
    )
