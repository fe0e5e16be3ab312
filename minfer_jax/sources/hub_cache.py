"""What huggingface_hub has in its cache, which other programs share.

    HF_HUB_CACHE/models--ORG--REPO/refs/main                   a commit
                                  /snapshots/COMMIT/FILE.gguf  --link--> blobs/SHA256
                                  /blobs/SHA256
                                  /blobs/SHA256.json           its record, where we fetched it
                                  /blobs/SHA256.minfer.incomplete, while we do

The library's look into its cache is slow to import and answers for one file name; here the names
are to be found. Of it only the settings are imported.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from minfer_jax.sources.hub_choice import MAIN, HubModel
from minfer_jax.sources.record import read_record
from minfer_jax.sources.split import SUFFIX

PART = ".minfer.incomplete"  # huggingface_hub knows *.incomplete
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def repo_folder(repo: str) -> Path:
    """The folder of a repository in huggingface_hub's cache."""
    name = constants.REPO_ID_SEPARATOR.join(("models", *repo.split("/")))
    return Path(constants.HF_HUB_CACHE, name)


def repositories() -> list[str]:
    """The repositories of models in huggingface_hub's cache, ORG/REPO each."""
    prefix = f"models{constants.REPO_ID_SEPARATOR}"
    folders = Path(constants.HF_HUB_CACHE).glob(f"{prefix}*")
    names = (folder.name.removeprefix(prefix) for folder in folders)
    return sorted(name.replace(constants.REPO_ID_SEPARATOR, "/") for name in names)


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


def files_of(snapshot: Path) -> list[str]:
    """The .gguf files of a snapshot, but for those whose blob is gone."""
    found = (path for path in snapshot.rglob(f"*{SUFFIX}") if path.is_file())
    return sorted(path.relative_to(snapshot).as_posix() for path in found)


def whole_files(snapshot: Path) -> list[str]:
    """The same, but for those that are not as long as they were."""
    return [name for name in files_of(snapshot) if _is_whole(snapshot / name)]


def _is_whole(path: Path) -> bool:
    record = read_record(blob_of(path))
    return record is None or record.size == path.stat().st_size


def blob_of(path: Path) -> Path:
    """The blob of a file of a snapshot; that itself where the system has no links."""
    # One link is followed: a blob may be a link too, to a store that several caches share.
    return path.parent / os.readlink(path) if path.is_symlink() else path


def digest_of(path: Path) -> str | None:
    """The sha256 that a file of a snapshot should have: its blob is named by it."""
    return sha256_in(blob_of(path).name)


def partial_files() -> list[Path]:
    """What interrupted fetches have left in huggingface_hub's cache."""
    return sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*/blobs/*{PART}"))


def sha256_in(tag: str) -> str | None:
    """The sha256 that an ETag is, if it is one: of a small file it is git's hash instead."""
    return tag if _SHA256.fullmatch(tag) else None
