"""The server: which address gives what.

    GET  /  /index.html  /style.css  /app.js  /favicon.ico  ..    the page
    GET  /viz/info              {"model": name or null, "trace": whether there is one, ..}
    GET  /viz/graph             the model's graphs, see `Live.graph`
    GET  /viz/events            server-sent events, see `live`
    GET  /viz/trace             the trace file that the command was given
    GET  /viz/attention?layer=3&head=0    bytes [T, T] of the latest run: 255 for all attention
    GET  /viz/lens              its logit lens, see `Live.lens`
    POST /viz/run               {"prompt": .., "max_tokens": 32, "temperature": 0.8, "seed": 1}
    POST /viz/stop              ends the run after its next token

It listens on this machine alone. As any page in a browser may send requests here, those that do not
name this server as their host, or come from a page that is not its own, are refused.
"""

import json
import shutil
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from minfer_jax import memory
from minfer_jax.compact_json import compact
from minfer_jax.viz.hub import Hub
from minfer_jax.viz.request import Busy, request_of

if TYPE_CHECKING:
    from minfer_jax.viz.live import Live

HOST = "127.0.0.1"
MAX_BODY = 2**20
_MOST_SKIPPED = 2**24
_QUIET = 15.0  # seconds after which a listener without events is asked whether it is still there
_TEXT, _SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
_SCRIPTS = ("app", "trace", "pane", "graph", "maps")
_PAGE = {
    "/": ("index.html", _TEXT),
    "/index.html": ("index.html", _TEXT),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", _SCRIPT) for name in _SCRIPTS},
    "/favicon.ico": ("favicon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'self'",
}


class Refused(Exception):
    """A request that is not answered as it wishes.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class VizServer(ThreadingHTTPServer):
    """Serves one page, perhaps with a model, perhaps with a trace.

    Attributes:
        port: that it listens on.
    """

    daemon_threads = True
    block_on_close = False  # listeners stay as long as their page does

    def __init__(self, port: int, hub: Hub, *, live: "Live | None", trace: Path | None) -> None:
        """Listen on a port of this machine, 0 for any.

        Raises:
            ValueError: the port cannot be had.
        """
        self.hub, self.live, self.trace = hub, live, trace
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as e:
            why = getattr(e, "strerror", None) or e
            raise ValueError(f"port {port} cannot be had ({why}): give another --port") from None
        self.port: int = self.server_address[1]
        self.hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: VizServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer a request for something."""
        self._answer(_GET, "GET")

    def do_POST(self) -> None:
        """Answer a request to do something."""
        self._answer(_POST, "POST")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said of requests."""

    def version_string(self) -> str:
        """Which server this is."""
        return "minfer_jax"

    def _answer(self, table: dict[str, Callable[["Handler"], None]], method: str) -> None:
        try:
            self._check_sender()
            path = urlsplit(self.path).path
            if path not in table:
                other = _POST if method == "GET" else _GET
                if path in other:
                    raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes no {method}")
                raise Refused(HTTPStatus.NOT_FOUND, f"there is no {path[:80]}")
            table[path](self)
        except Refused as e:
            self.close_connection = True  # what is left of a body is not read
            self.send_json({"ok": False, "error": str(e)}, e.status)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _check_sender(self) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in self.server.hosts:
            known = " or ".join(sorted(self.server.hosts))
            raise Refused(HTTPStatus.FORBIDDEN, f"the host is {host[:80]!r}, expected {known}")
        if origin is not None and origin not in {f"http://{own}" for own in self.server.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, f"a page of {origin[:80]} has no business here")

    def body(self) -> dict[str, Any]:
        """The JSON object that a request brings.

        Raises:
            Refused: it brings none, or too much.
        """
        kind = self.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"the content type is {kind[:40]!r}, expected 'application/json'",
            )
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the body is not given")
        if len(length) > 12 or int(length) > MAX_BODY:
            self._skip(length)
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {length[:12]} bytes, expected at most {MAX_BODY}",
            )
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
        if not isinstance(found, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON object")
        return found

    def _skip(self, length: str) -> None:
        """Take a body in all the same, if that is soon done: else its sender reads no answer."""
        left = int(length) if len(length) < 12 else 0
        while 0 < left <= _MOST_SKIPPED and (part := self.rfile.read(min(left, 2**16))):
            left -= len(part)

    def live(self) -> "Live":
        """The model.

        Raises:
            Refused: there is none.
        """
        if self.server.live is None:
            raise Refused(
                HTTPStatus.NOT_FOUND,
                "no model is loaded: start the command with one, or without --trace",
            )
        return self.server.live

    def send_bytes(self, data: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        """A whole answer."""
        self.send_head(kind, status, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def send_json(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        """The same, in JSON."""
        self.send_bytes(compact(value).encode("utf-8", "replace"), "application/json", status)

    def send_head(self, kind: str, status: HTTPStatus, more: dict[str, str]) -> None:
        """What comes before an answer's body."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **more}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _page(handler: Handler) -> None:
    name, kind = _PAGE[urlsplit(handler.path).path]
    static = resources.files("minfer_jax.viz") / "static" / name
    handler.send_bytes(static.read_bytes(), kind)


def _info(handler: Handler) -> None:
    live, trace = handler.server.live, handler.server.trace
    handler.send_json(
        {
            "model": None if live is None else live.name,
            "trace": None if trace is None else trace.name,
            "running": live is not None and live.running,
        }
    )


def _graph(handler: Handler) -> None:
    handler.send_json(handler.live().graph())


def _events(handler: Handler) -> None:
    handler.close_connection = True
    with handler.server.hub.listener() as listener:
        if listener is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
        handler.send_head("text/event-stream", HTTPStatus.OK, {})
        handler.wfile.write(b": here\n\n")
        while True:
            events = listener.take(_QUIET)
            text = "".join(f"data: {event}\n\n" for event in events) or ": here\n\n"
            handler.wfile.write(text.encode("utf-8", "replace"))


def _trace(handler: Handler) -> None:
    if handler.server.trace is None:
        raise Refused(HTTPStatus.NOT_FOUND, "the command was given no trace")
    try:
        with handler.server.trace.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            handler.send_head("application/json", HTTPStatus.OK, {"Content-Length": str(size)})
            shutil.copyfileobj(file, handler.wfile)
    except FileNotFoundError:
        raise Refused(HTTPStatus.NOT_FOUND, "the trace is no longer there") from None


def _attention(handler: Handler) -> None:
    query = parse_qs(urlsplit(handler.path).query)
    words = [query.get(name, ["?"])[0] for name in ("layer", "head")]
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise Refused(HTTPStatus.BAD_REQUEST, "expected ?layer=N&head=N")
    layer, head = map(int, words)
    live = handler.live()
    data = _made(lambda: live.attention(layer, head))
    handler.send_bytes(data, "application/octet-stream")


def _lens(handler: Handler) -> None:
    handler.send_json(_made(handler.live().lens))


def _run(handler: Handler) -> None:
    body, live = handler.body(), handler.live()
    handler.send_json(_made(lambda: live.run(request_of(body))))


def _stop(handler: Handler) -> None:
    handler.body()
    handler.live().stop()
    handler.send_json({"ok": True})


def _made(make: Callable[[], Any]) -> Any:
    """What a model gives, or why it does not."""
    try:
        return make()
    except Busy:
        raise Refused(HTTPStatus.CONFLICT, "a run is going: wait, or stop it") from None
    except ValueError as e:
        raise Refused(HTTPStatus.BAD_REQUEST, str(e)) from None
    except (MemoryError, RuntimeError) as e:
        if memory.ran_out(e):
            problem = "out of memory; try a shorter text, or a smaller --n-ctx"
            raise Refused(HTTPStatus.INSUFFICIENT_STORAGE, problem) from None
        raise


_GET: dict[str, Callable[[Handler], None]] = {
    **dict.fromkeys(_PAGE, _page),
    "/viz/info": _info,
    "/viz/graph": _graph,
    "/viz/events": _events,
    "/viz/trace": _trace,
    "/viz/attention": _attention,
    "/viz/lens": _lens,
}
_POST: dict[str, Callable[[Handler], None]] = {"/viz/run": _run, "/viz/stop": _stop}
