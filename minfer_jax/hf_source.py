"""Models of a Hugging Face hub, in huggingface_hub's own cache, which other programs share.

    HF_HUB_CACHE/models--ORG--REPO/refs/main                   a commit
                                  /snapshots/COMMIT/FILE.gguf  --link--> blobs/SHA256
                                  /blobs/SHA256.minfer.incomplete, while it is fetched

huggingface_hub finds the server (HF_ENDPOINT), the token and the cache, and makes the links. The
bytes themselves are brought by `http_fetch`, which goes on where an earlier run broke off and
checks the digest; huggingface_hub, which does neither, finds the blob there and links it. Files
that a hub does not give by plain HTTP (above 50 GB) are left to it.

Whatever is in the cache is used as it is, without a look at the network.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.file_download import (
    get_hf_file_metadata,
    repo_folder_name,
)
from huggingface_hub.utils import build_hf_headers

from minfer_jax import http_client, http_fetch
from minfer_jax.file_record import read_record, write_record
from minfer_jax.hf_choice import MAIN, HubModel, choose, parse
from minfer_jax.transfer import SourceError, cannot_keep, quoted, say_fetching

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")  # of a blob: the name of its file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIBRARY = "minfer-jax"

T = TypeVar("T")


def resolve(ref: str, folder: Path, *, may_fetch: bool = True) -> Path:
    """Finds the local file of a hub's model, and fetches it where need be, with all its parts.

    Args:
        ref: `hf:ORG/REPO[@REVISION][:QUANT or file]`, see `hf_choice`.
        folder: The cache folder, for the records of what is fetched.
        may_fetch: Whether the network may be used.

    Returns:
        The path in huggingface_hub's cache; of a split model, that of the first part.

    Raises:
        SourceError: There is no such model or several, the hub refuses or cannot be reached, or
            the cache cannot be written.
    """
    model = parse(ref)
    snapshots = list(_snapshots(model))
    for snapshot in snapshots:
        names = _whole_files(snapshot, model.repo, folder)
        try:
            return snapshot / choose(model, names)[0]
        except SourceError:  # not in this one
            continue
    if not may_fetch:
        held = sorted({n for s in snapshots for n in _whole_files(s, model.repo, folder)})
        if held:  # says which there are
            choose(model, held)
        raise SourceError(f"{quoted(ref)} is not in the cache")
    return _fetch(model, ref, folder)


def record_place(folder: Path, repo: str, name: str) -> Path:
    """The path beside which the record of a repository's file is kept."""
    return folder.joinpath("hf", repo, name)


def _repo_folder(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"))


def _snapshots(model: HubModel) -> Iterator[Path]:
    """The folders to look into: the revision's; without one, main's and then the other, newest."""
    folder = _repo_folder(model.repo)
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


def _whole_files(snapshot: Path, repo: str, folder: Path) -> list[str]:
    """The .gguf files of a snapshot, but for those that are not as long as they were."""
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    return [name for name in names if _is_whole(snapshot / name, record_place(folder, repo, name))]


def _is_whole(path: Path, place: Path) -> bool:
    if not path.is_file():  # the blob is gone
        return False
    record = read_record(place)
    other = record is None or record.sha256 != digest_of(path)  # an older file's record
    return other or record.size == path.stat().st_size


def digest_of(path: Path) -> str | None:
    """The sha256 that a file of the cache should have: its blob is named by it."""
    name = Path(os.path.realpath(path)).name
    return name if _SHA256.fullmatch(name) else None


def _fetch(model: HubModel, ref: str, folder: Path) -> Path:
    revision = model.revision or MAIN
    info = _ask(
        model,
        lambda: HfApi(library_name=_LIBRARY).model_info(
            model.repo, revision=revision, timeout=http_client.TIMEOUT
        ),
    )
    names = choose(model, [one.rfilename for one in info.siblings or ()])
    paths = [_fetch_file(model, name, revision, ref, folder) for name in names]
    return paths[0]


def _fetch_file(model: HubModel, name: str, revision: str, ref: str, folder: Path) -> Path:
    url = hf_hub_url(model.repo, name, revision=revision)
    found = _ask(model, lambda: get_hf_file_metadata(url, timeout=http_client.TIMEOUT))
    cache = Path(constants.HF_HUB_CACHE)
    try:
        if found.etag and found.size and found.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            if not _TAG.fullmatch(found.etag):  # it names a file
                raise SourceError(f"{url} has an odd ETag: {quoted(found.etag)}")
            remote = http_fetch.Remote(
                url=url,
                source=ref,
                headers=build_hf_headers(library_name=_LIBRARY),
                size=found.size,
                sha256=found.etag if _SHA256.fullmatch(found.etag) else None,
            )
            place = record_place(folder, model.repo, name)
            _fetch_blob(remote, _repo_folder(model.repo) / "blobs" / found.etag, place)
        return Path(_ask(model, lambda: hf_hub_download(model.repo, name, revision=revision)))
    except OSError as error:
        raise cannot_keep(name, cache, error, "HF_HUB_CACHE") from error


def _fetch_blob(remote: http_fetch.Remote, blob: Path, place: Path) -> None:
    """Puts a file where huggingface_hub looks for it before it asks for it.

    Args:
        remote: The file, of known size.
        blob: Where huggingface_hub keeps it.
        place: The path beside which its record is kept.
    """
    repo = blob.parent.parent
    blob.parent.mkdir(parents=True, exist_ok=True)
    # The lock that huggingface_hub takes, so that its other users wait too.
    with http_fetch.exclusive(repo.parent / ".locks" / repo.name / f"{blob.name}.lock", place.name):
        if blob.is_file() and blob.stat().st_size == remote.size:
            return
        say_fetching(place.name, remote.size, constants.ENDPOINT, repo)
        part = blob.with_name(f"{blob.name}.minfer.incomplete")
        record = http_fetch.download(remote, part, place.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_record(place, record)
        os.replace(part, blob)


def _ask(model: HubModel, call: Callable[[], T]) -> T:
    """Does what huggingface_hub asks a hub for, again where that may help."""
    for pause in http_client.pauses():
        try:
            return call()
        except OfflineModeIsEnabled as error:
            raise SourceError(
                f"{model.repo} is not in the cache, and HF_HUB_OFFLINE forbids to ask for it"
            ) from error
        except HfHubHTTPError as error:
            if error.response.status_code not in http_client.RETRIED or pause is None:
                raise SourceError(_refusal(model, error)) from error
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ConnectError) or pause is None:
                raise SourceError(
                    f"cannot reach {constants.ENDPOINT} for {model.repo}: {error}; are you online,"
                    " and is a proxy needed (HTTPS_PROXY), or another server (HF_ENDPOINT)?"
                ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
            raise SourceError(f"{constants.ENDPOINT} for {model.repo}: {error}") from error
        time.sleep(pause or 0)
    raise AssertionError("the last try raises")


def _refusal(model: HubModel, error: HfHubHTTPError) -> str:
    """One line on a hub's refusal, with what the user can do."""
    status, where = error.response.status_code, constants.ENDPOINT
    code = error.response.headers.get("X-Error-Code")
    login = "set HF_TOKEN to a token that may read it (hf auth login)"
    if code == "GatedRepo":
        return f"{model.repo} is gated: accept its terms at {where}/{model.repo}, and {login}"
    if code == "RevisionNotFound":
        return f"{model.repo} has no revision {quoted(model.revision or MAIN)}"
    if status in (401, 403):
        return (
            f"{model.repo} is not at {where} ({status}), or is private; check the name, or {login}"
        )
    if status == 404:
        return f"no repository or file {model.repo} at {where}; check the name"
    return f"{where} answers {status} for {model.repo}; try again later"
