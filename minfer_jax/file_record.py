"""What is known of a fetched file, in a small file of JSON beside it.

    FOLDER/NAME.gguf        the file
    FOLDER/NAME.gguf.json   {"size": 98362432, "sha256": "b179...", "source": "smollm2"}

A fetched file counts as present while it has the size of its record. The digest was checked, or
taken, when the file was fetched; `verify` reads all of it again, which takes longer than loading.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from minfer_jax.transfer import SourceError, progress_bar
from minfer_jax.whole_file import replacing

_CHUNK = 1 << 20
_MAX_BYTES = 1 << 16  # of a record


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


def write_record(path: Path, record: Record) -> None:
    """Writes the record of the file that is, or soon will be, at `path`."""
    with replacing(record_path(path)) as file:
        file.write(json.dumps(asdict(record), indent=1).encode())


def read_record(path: Path) -> Record | None:
    """The record of the file at `path`; None where there is none that can be read."""
    try:
        with open(record_path(path), "rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        record = Record(**found)
    except (OSError, ValueError, TypeError):  # absent, not JSON, or not the keys
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
    """Raises SourceError where a file is not of the size in its record."""
    record = read_record(path)
    if record is not None and path.stat().st_size != record.size:
        raise SourceError(
            f"{str(path)!r} is damaged: it has {path.stat().st_size} bytes, and {record.size} were"
            f" fetched; fetch it again: python -m minfer_jax.models download {record.source}"
        )
