"""Requests by HTTP: their limits, what an answer's head says, and which failures pass.

RFC 9110 has Content-Length (8.6), Content-Range (14.4), Retry-After (10.2.3).

httpx2 does the requests: it comes with huggingface_hub, reads with a timeout, takes proxies from
the environment and certificates from the system, tells a body that broke off from one that ended,
and does not pass a login on to another host.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise

import httpx2

from minfer_jax.sources.transfer import SourceError, say, shown

TIMEOUT = 30.0  # seconds to connect, and between one piece and the next
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before the next tries; after the last there is no other
_MAX_REDIRECTS = 10
_MAX_JSON = 1 << 22  # bytes
RETRIED = (408, 425, 429, 500, 502, 503, 504)  # statuses that pass
_LONGEST_WAIT = 60.0  # seconds that a server may ask for
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)")


class HttpError(SourceError):
    """A server's refusal.

    Attributes:
        status: The status code.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Retry(Exception):
    """A try that failed and may do better again.

    Attributes:
        wait: Seconds to wait before, if the server says so.
    """

    def __init__(self, message: str, wait: float | None = None):
        super().__init__(message)
        self.wait = wait


# What a request may end in; the last two are of a host or a port that no system takes.
FAILURES = (Retry, httpx2.HTTPError, httpx2.InvalidURL, UnicodeError, OverflowError)


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds that a server asks to wait, a minute at most; None where it gives none."""
    text = response.headers.get("Retry-After", "").strip()
    return min(float(text), _LONGEST_WAIT) if text.isdecimal() else None


def content_range(response: httpx2.Response) -> tuple[int | None, int | None]:
    """The first byte of what is sent, and the bytes of the whole file, where they are given."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if match is None:
        return None, None
    start, size = match.groups()
    return None if start is None else int(start), None if size == "*" else int(size)


def length(response: httpx2.Response) -> int:
    """The bytes of a whole file.

    Raises:
        SourceError: The server does not say. A file that breaks off would then look whole.
    """
    text = response.headers.get("Content-Length", "")
    if not text.isdecimal() or response.headers.get("Content-Encoding", "identity") != "identity":
        raise SourceError(
            f"{response.url.host} does not say how long the file is; fetch it by other means, and"
            " give its path"
        )
    return int(text)


def pauses() -> Iterator[float | None]:
    """The seconds to wait after each try that fails; None after the last."""
    return iter((*PAUSES, None))


def client(headers: Mapping[str, str]) -> httpx2.Client:
    """A client with our limits, to be used as a context.

    Raises:
        SourceError: The environment names a proxy or certificates that cannot be used.
    """
    sent = httpx2.Headers({"User-Agent": "minfer-jax"})
    sent.update(headers)
    sent["Accept-Encoding"] = "identity"  # else lengths and ranges would be of something else
    try:
        return httpx2.Client(
            headers=sent,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            timeout=TIMEOUT,
        )
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        raise SourceError(
            f"no connections can be made ({_words(error)}); see HTTPS_PROXY, ALL_PROXY,"
            " SSL_CERT_FILE and SSL_CERT_DIR"
        ) from error


def get_json(url: str, headers: Mapping[str, str]) -> dict:
    """Asks a server for an object of JSON.

    Raises:
        HttpError: It answers with another status than 200.
        SourceError: It cannot be reached, or what comes is no such object.
    """
    with client(headers) as http:
        for pause in pauses():
            try:
                found = json.loads(_body(http, url))
                if isinstance(found, dict):
                    return found
                raise SourceError(f"{shown(url)} holds a {type(found).__name__}, not an object")
            except (RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
                raise SourceError(f"{shown(url)} holds no JSON: {error}") from error
            except FAILURES as error:
                rest(error, pause, url)
    raise AssertionError("the last try raises")


def _body(http: httpx2.Client, url: str) -> bytes:
    body = b""
    with http.stream("GET", url) as response:
        check_answer(response, url)
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > _MAX_JSON:
                raise SourceError(f"{shown(url)} is longer than {_MAX_JSON} bytes")
    return body


def check_answer(response: httpx2.Response, url: str) -> None:
    """Raises for an answer that brings no file, or came by a way that is not safe."""
    hops = [httpx2.URL(url), *(hop.url for hop in response.history), response.url]
    for before, after in pairwise(hops):
        if before.scheme == "https" and after.scheme != "https":
            raise SourceError(f"{before.host} redirects from https to {after.scheme}; not followed")
    status = response.status_code
    if status in RETRIED:
        raise Retry(f"the server answers {status} {response.reason_phrase}", retry_after(response))
    if status not in (200, 206):
        raise HttpError(
            f"{response.url.host} answers {status} {response.reason_phrase} for {shown(url)}",
            status,
        )


def rest(error: Exception, pause: float | None, url: str, state: str = "") -> None:
    """Waits before the next try, if one may help and is left.

    Args:
        error: What went wrong.
        pause: Seconds to wait unless the server says how long; None if no try is left.
        url: What was asked for.
        state: What has come of it, for the error.

    Raises:
        SourceError: No try is left, or none would help. Where there is no server, the second is
            the last.
    """
    unreachable = isinstance(error, httpx2.ConnectError | httpx2.ProxyError)
    passes = isinstance(error, Retry | httpx2.TransportError) and not isinstance(
        error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError
    )
    if pause is None or not passes or (unreachable and pause > PAUSES[0]):
        advice = "; are you online, and is a proxy needed (HTTPS_PROXY)?" if unreachable else ""
        raise SourceError(f"cannot fetch {shown(url)}: {_words(error)}{state}{advice}") from error
    say(f"{httpx2.URL(url).host}: {_words(error)}; trying again")
    wait = error.wait if isinstance(error, Retry) else None
    time.sleep(pause if wait is None else wait)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
