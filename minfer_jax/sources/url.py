"""Models by their plain URL: https://HOST/PATH.gguf, kept as FOLDER/url/HOST/PATH.gguf.

http is taken too, as file servers in a house or a laboratory have no certificate, but said aloud
unless the host is this machine: nothing vouches then for what comes. GGUF is read as data that may
be hostile, so that a file which was tampered with can lie, and no more.
"""

import ipaddress
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import httpx2

from minfer_jax.sources.http_fetch import Remote, fetch
from minfer_jax.sources.record import is_present
from minfer_jax.sources.split import SUFFIX, all_parts
from minfer_jax.sources.transfer import SourceError, not_cached, quoted, say, shown

_SAFE = "%~+@,="  # in the name of a folder or a file, besides letters, digits and ._-


def resolve(ref: str, folder: Path, *, may_fetch: bool = True) -> Path:
    """Finds the local file of a URL, and fetches it where need be, with all parts of a split.

    Args:
        ref: The URL. Login and query are sent, but neither kept nor shown.
        folder: The cache folder.
        may_fetch: Whether the network may be used.

    Returns:
        The path; of a split model, that of the first part.

    Raises:
        SourceError: It is no URL of a .gguf file, or cannot be fetched, or may not be and is not
            there.
    """
    try:
        url = httpx2.URL(ref)
        path, _, query = url.raw_path.decode("ascii").partition("?")
        name = PurePosixPath(path).name
        if not url.host or not path.endswith(SUFFIX) or name == SUFFIX:
            raise httpx2.InvalidURL("it has no host, or does not end in .gguf")
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise SourceError(
            f"{quoted(ref)}: {error}; the URL of a model is expected, such as"
            " https://HOST/PATH.gguf"
        ) from error
    folder_of_url, asked = path.removesuffix(name), f"?{query}" if query else ""
    urls = [
        url.copy_with(raw_path=f"{folder_of_url}{part}{asked}".encode("ascii"))
        for part in all_parts(name)
    ]
    paths = [_place(part, folder) for part in urls]
    if not all(map(is_present, paths)):
        if not may_fetch:
            raise not_cached(ref)
        if url.scheme == "http" and not _is_here(url.host):
            say(f"note: {url.host} is asked by http, so that nothing vouches for what comes")
        for part, path in zip(urls, paths, strict=True):
            fetch(Remote(url=str(part), source=shown(str(urls[0]))), path, folder)
    return paths[0]


def _place(url: httpx2.URL, folder: Path) -> Path:
    """HOST/PATH as they are written, so that no two URLs share a file; http has its port named."""
    port = url.port or (80 if url.scheme == "http" else None)
    host = url.raw_host.decode("ascii")
    path = url.raw_path.decode("ascii").partition("?")[0]
    steps = (host if port is None else f"{host}_{port}", *path.split("/"))
    steps = [quote(step, safe=_SAFE) for step in steps if step]
    if any(step.startswith(".") for step in steps):
        raise SourceError(f"{quoted(str(url))} has a folder that begins with a dot in its path")
    return folder.joinpath("url", *steps)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
