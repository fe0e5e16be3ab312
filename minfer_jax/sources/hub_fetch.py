"""Fetches models from a Hugging Face hub into huggingface_hub's cache.

huggingface_hub finds the server (HF_ENDPOINT), the token and the cache, and makes the links. The
bytes themselves are brought by `http_fetch`, which goes on where an earlier run broke off and
checks the digest; huggingface_hub, which does neither, finds the blob there and links it. Files
that a hub does not give by plain HTTP (above 50 GB) are left to it.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.file_download import get_hf_file_metadata
from huggingface_hub.utils import build_hf_headers

from minfer_jax.sources import http_client, http_fetch
from minfer_jax.sources.hub_cache import PART, repo_folder, sha256_in
from minfer_jax.sources.hub_choice import MAIN, HubModel, choose
from minfer_jax.sources.lock import exclusive
from minfer_jax.sources.transfer import SourceError, cannot_keep, quoted, say_fetching, shown

_TAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")  # of a blob: the name of its file
_LIBRARY = "minfer-jax"

T = TypeVar("T")


def fetch(model: HubModel, ref: str) -> Path:
    """Fetches a model with all its parts; what is there already is kept.

    Args:
        model: The model.
        ref: The reference that it is fetched by, for its record.

    Returns:
        The path in huggingface_hub's cache; of a split model, that of the first part.

    Raises:
        SourceError: There is no such model or several, the hub refuses or cannot be reached, or
            the cache cannot be written.
    """
    http_client.client({}).close()  # says what is wrong with proxies and certificates
    revision = model.revision or MAIN
    info = _ask(
        model,
        lambda: HfApi(library_name=_LIBRARY).model_info(
            model.repo, revision=revision, timeout=http_client.TIMEOUT
        ),
    )
    names = choose(model, [one.rfilename for one in info.siblings or ()])
    paths = [_fetch_file(model, name, revision, ref) for name in names]
    return paths[0]


def _fetch_file(model: HubModel, name: str, revision: str, ref: str) -> Path:
    url = hf_hub_url(model.repo, name, revision=revision)
    found = _ask(model, lambda: get_hf_file_metadata(url, timeout=http_client.TIMEOUT))
    cache = Path(constants.HF_HUB_CACHE)
    try:
        if found.etag and found.size and found.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            if not _TAG.fullmatch(found.etag):  # it names a file
                raise SourceError(f"{shown(url)} has an odd ETag: {quoted(found.etag)}")
            remote = http_fetch.Remote(
                url=url,
                source=ref,
                headers=build_hf_headers(library_name=_LIBRARY),
                size=found.size,
                sha256=sha256_in(found.etag),
            )
            _fetch_blob(remote, repo_folder(model.repo) / "blobs" / found.etag, name)
        return Path(_ask(model, lambda: hf_hub_download(model.repo, name, revision=revision)))
    except OSError as error:
        raise cannot_keep(name, cache, error, "HF_HUB_CACHE") from error


def _fetch_blob(remote: http_fetch.Remote, blob: Path, name: str) -> None:
    """Puts a file, of known size, where huggingface_hub looks for it before it asks for it."""
    repo = blob.parent.parent
    blob.parent.mkdir(parents=True, exist_ok=True)
    # The lock that huggingface_hub takes, so that its other users wait too.
    with exclusive(repo.parent / ".locks" / repo.name / f"{blob.name}.lock", name):
        if blob.is_file() and blob.stat().st_size == remote.size:
            return
        say_fetching(name, remote.size, shown(constants.ENDPOINT), repo)
        http_fetch.download(remote, blob, blob.with_name(f"{blob.name}{PART}"), name)


def _ask(model: HubModel, call: Callable[[], T]) -> T:
    """Does what huggingface_hub asks a hub for, again where that may help."""
    where = shown(constants.ENDPOINT)
    for pause in http_client.pauses():
        try:
            return call()
        except OfflineModeIsEnabled as error:
            raise SourceError(
                f"{model.repo} is not in the cache, and HF_HUB_OFFLINE forbids to ask for it"
            ) from error
        except HfHubHTTPError as error:
            if error.response.status_code not in http_client.RETRIED or pause is None:
                raise SourceError(_refusal(model, error, where)) from error
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ConnectError) or pause is None:
                raise SourceError(
                    f"cannot reach {where} for {model.repo}: {error}; are you online, and is a"
                    " proxy needed (HTTPS_PROXY), or another server (HF_ENDPOINT)?"
                ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
            raise SourceError(f"{where} for {model.repo}: {error}") from error
        except (ValueError, TypeError, KeyError) as error:  # no JSON, or none of the kind
            raise SourceError(
                f"{where} says of {model.repo} what cannot be used"
                f" ({type(error).__name__}: {error}); is it a hub (HF_ENDPOINT)?"
            ) from error
        time.sleep(pause or 0)
    raise AssertionError("the last try raises")


def _refusal(model: HubModel, error: HfHubHTTPError, where: str) -> str:
    """One line on a hub's refusal, with what the user can do."""
    status = error.response.status_code
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
