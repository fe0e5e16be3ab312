"""What huggingface_hub has in its cache, which other programs share.

    HF_HUB_CACHE/models--ORG--REPO/refs/main                   a commit
                                  /snapshots/COMMIT/FILE.gguf  --link--> blobs/SHA256
                                  /blobs/SHA256
                                  /blobs/SHA256.minfer.incomplete, while it is fetched
    FOLDER/hf/ORG/REPO/FILE.gguf.json                          its record, in our own cache

The library's look into its cache is slow to import and answers for one file name; here the names
are to be found. Of it only the settings are imported.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from minfer_jax.file_record import read_record
from minfer_jax.hf_choice import MAIN, HubModel

PART = ".minfer.incomplete"  # huggingface_hub knows *.incomplete
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def record_place(folder: Path, repo: str, name: str) -> Path:
    """The path beside which the record of a repository's file is kept."""
    return folder.joinpath("hf", repo, name)


def repo_folder(repo: str) -> Path:
    """The folder of a repository in huggingface_hub's cache."""
    name = constants.REPO_ID_SEPARATOR.join(("models", *repo.split("/")))
    return Path(constants.HF_HUB_CACHE, name)


def snapshots(model: HubModel) -> Iterator[Path]:
    """The folders to look into: the revision's; without one, main's and then the other, newest."""
    folder = repo_folder(model.repo)
    revision = model.revision or MAIN
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    chosen = folder / "snapshots" / commit
    if _COMMIT.fullmatch(commit) and chosen.is_dir():
        yield chosen
    if model.revision is None and (folder / "snapshots").is_dir():
        others = [p for p in (folder / "snapshots").iterdir() if p != chosen and p.is_dir()]
        yield from sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)


def whole_files(snapshot: Path, repo: str, folder: Path) -> list[str]:
    """The .gguf files of a snapshot, but for those that are not as long as they were."""
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    return [name for name in names if _is_whole(snapshot / name, record_place(folder, repo, name))]


def _is_whole(path: Path, place: Path) -> bool:
    if not path.is_file():  # the blob is gone
        return False
    record = read_record(place)
    if record is None or record.sha256 != digest_of(path):  # an older file's record
        return True
    return record.size == path.stat().st_size


def digest_of(path: Path) -> str | None:
    """The sha256 that a file of the cache should have: its blob is named by it."""
    name = Path(os.path.realpath(path)).name
    return sha256_in(name)


def partial_files() -> list[Path]:
    """What interrupted fetches have left in huggingface_hub's cache."""
    return sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*/blobs/*{PART}"))


def sha256_in(tag: str) -> str | None:
    """The sha256 that an ETag is, if it is one: of a small file it is git's hash instead."""
    return tag if _SHA256.fullmatch(tag) else None
