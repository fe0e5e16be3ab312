"""A web server in a thread, that can be made to fail; and what a hub and a registry say on it."""

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a path holds."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request.

    Attributes:
        status: an answer in the place of the page.
        headers: of that answer, or besides those of the page.
        after: bytes of the body after which the connection is closed.
        pause: seconds before each piece of the body.
        length: the Content-Length that is said instead of the right one; "" for none.
        ranges: whether Range is heeded.
        until: what the body waits for.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None
    pause: float = 0.0
    length: str | None = None
    ranges: bool = True
    until: threading.Event | None = None


@dataclass(frozen=True)
class Request:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request, client_address):
        """A client that has gone, which some tests bring about, is no news."""


class Server:
    """Serves `pages`, with the `faults` of a path in turn; keeps the requests."""

    def __init__(self):
        self.pages: dict[str, Page] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.requests: list[Request] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args):
                pass

        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def asked(self, method: str = "GET") -> list[str]:
        """The paths that were asked for."""
        return [one.path for one in self.requests if one.method == method]

    def ranges(self) -> list[str | None]:
        """The Range of each GET."""
        return [one.headers.get("range") for one in self.requests if one.method == "GET"]

    def file(self, path: str, body: bytes, **headers: str) -> str:
        """Puts a file at a path; its URL."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        self.pages[path] = Page(body=body, headers=named)
        return self.url + path

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        headers = {key.lower(): value for key, value in handler.headers.items()}
        self.requests.append(Request(handler.command, handler.path, headers))
        page = self.pages.get(path, Page(status=404))
        fault = self.faults[path].pop(0) if self.faults[path] else Fault()
        if fault.status is not None:
            page = Page(status=fault.status)
        body, status = page.body, page.status
        sent = {**page.headers, **fault.headers}
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        same = headers.get("if-range") in (None, page.headers.get("ETag"))
        if asked and status == 200 and fault.ranges and same:
            start = int(asked[1])
            if start >= len(page.body):
                status, body = 416, b""
                sent["Content-Range"] = f"bytes */{len(page.body)}"
            else:
                status, body = 206, page.body[start:]
                sent["Content-Range"] = f"bytes {start}-{len(page.body) - 1}/{len(page.body)}"
        handler.send_response(status)
        for key, value in sent.items():
            handler.send_header(key, value)
        if fault.length != "":
            handler.send_header("Content-Length", fault.length or str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            self._send(handler, body, fault)
        if fault.after is not None or fault.length is not None:
            handler.close_connection = True

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes, fault: Fault) -> None:
        body = body if fault.after is None else body[: fault.after]
        step = max(len(body) // 4, 1)
        if fault.until is not None:
            fault.until.wait(60)
        try:
            for start in range(0, len(body), step):
                time.sleep(fault.pause)
                handler.wfile.write(body[start : start + step])
                handler.wfile.flush()
        except OSError:  # the other side has gone
            handler.close_connection = True


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def put_repo(
    hub: Server, store: Server, repo: str, files: Mapping[str, bytes], commit: str = COMMIT
) -> None:
    """Puts a repository on a hub, which redirects to a store for files as the real one does."""
    names = [{"rfilename": name} for name in files]
    info = {"id": repo, "modelId": repo, "sha": commit, "siblings": names}
    page = Page(body=json.dumps(info).encode(), headers={"Content-Type": "application/json"})
    for revision in ("main", commit):
        hub.pages[f"/api/models/{repo}/revision/{revision}"] = page
        for name, body in files.items():
            place = f"/blobs/{sha256(body)}"
            # The ETag of the store is a hash too, but not of these bytes
            location = store.file(place, body, ETag=f'"{sha256(place.encode())}"')
            headers = {
                "Location": location,
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{sha256(body)}"',
                "X-Linked-Size": str(len(body)),
                "ETag": f'"{sha256(body)}"',
            }
            hub.pages[f"/{repo}/resolve/{revision}/{name}"] = Page(status=302, headers=headers)


def put_ollama(registry: Server, name: str, tag: str, body: bytes, size: int | None = None) -> dict:
    """Puts a model into a registry; its manifest."""
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{sha256(body)}",
        "size": len(body) if size is None else size,
    }
    other = {
        "mediaType": "application/vnd.ollama.image.template",
        "digest": f"sha256:{sha256(b'')}",
        "size": 0,
    }
    manifest = {"schemaVersion": 2, "layers": [other, layer]}
    registry.file(f"/v2/{name}/manifests/{tag}", json.dumps(manifest).encode())
    registry.file(f"/v2/{name}/blobs/sha256:{sha256(body)}", body)
    return manifest


def put_in_store(store: Path, name: str, tag: str, body: bytes, manifest: dict) -> Path:
    """Puts a model into a store of Ollama; its file."""
    path = store / "manifests/registry.ollama.ai" / name / tag
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))
    blob = store / f"blobs/sha256-{sha256(body)}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(body)
    return blob
