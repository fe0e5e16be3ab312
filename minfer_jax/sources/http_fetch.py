"""Files by HTTP: resumed where they broke off, counted, digested, and put in place in one step.

    FOLDER/NAME.part        what has come; a later run asks for the rest (Range)
    FOLDER/NAME.part.json   {"etag": "...", "size": 98362432, "source": "..."}: of which answer
    --rename-->             FOLDER/NAME, once size and digest are right, with FOLDER/NAME.json

huggingface_hub's own download starts over when the program is run again; this one goes on.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2
from tqdm import tqdm

from minfer_jax.gguf_header import MAGIC
from minfer_jax.sources.http_client import (
    FAILURES,
    Retry,
    check_answer,
    client,
    content_range,
    length,
    pauses,
    rest,
)
from minfer_jax.sources.lock import exclusive, lock_of
from minfer_jax.sources.record import PART, Record, is_present, read_json, record_path, write_record
from minfer_jax.sources.transfer import (
    SourceError,
    cannot_keep,
    check_free,
    progress_bar,
    say,
    say_fetching,
    shown,
)
from minfer_jax.whole_file import replacing

_STEP = 1 << 20  # bytes after which the tries are counted anew


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on a server.

    Attributes:
        url: Where it is.
        source: The reference that it is fetched by, for its record.
        headers: To send, such as a login.
        size: In bytes, where known beforehand.
        sha256: In hex, where known beforehand.
    """

    url: str
    source: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    size: int | None = None
    sha256: str | None = None


def fetch(remote: Remote, path: Path, folder: Path) -> Path:
    """Makes sure that a file is in the cache folder.

    If it is there, nothing is asked or written. Of several processes that fetch it at once, one
    does, and the others wait.

    Args:
        remote: The file.
        path: Where it is to be, below `folder`.
        folder: The cache folder; made if need be.

    Returns:
        `path`.

    Raises:
        SourceError: If the server has no such file, breaks off again and again, or sends another
            one; or if it cannot be written. What has come stays as `path`.part.
    """
    if is_present(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock_of(path, folder), path.name):
            if not is_present(path):  # another process may have fetched it meanwhile
                host = httpx2.URL(remote.url).host
                say_fetching(path.name, remote.size, host, folder)
                download(remote, path, path.with_name(f"{path.name}{PART}"), path.name)
    except OSError as error:
        raise cannot_keep(path.name, folder, error) from error
    return path


def download(remote: Remote, path: Path, part: Path, name: str) -> None:
    """Brings a file, and then its record, to a path, going on from what is there.

    Args:
        remote: The file.
        path: Where it is to be.
        part: Where it is until it is whole; what has come stays whatever ends the download.
        name: What to call it.

    Raises:
        SourceError: As `fetch`.
        OSError: If it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(part, "a+b"))  # what is written goes to the end
        transfer = _Transfer(remote, part, file, name)
        stack.callback(transfer.tidy)
        bar = stack.enter_context(progress_bar(name, transfer.size, transfer.have))
        http = stack.enter_context(client(remote.headers))
        tries = pauses()
        while True:
            start = transfer.have
            try:
                transfer.attempt(http, bar)
                break
            except FAILURES as error:
                if transfer.have - start >= _STEP:
                    tries = pauses()
                rest(error, next(tries), remote.url, f"; {transfer.state()}")
            except KeyboardInterrupt:
                if transfer.have:
                    say(f"{name}: {transfer.state()}")
                raise
        file.flush()
        os.fsync(file.fileno())
    sha256 = transfer.digest.hexdigest()
    write_record(path, Record(size=transfer.have, sha256=sha256, source=remote.source))
    os.replace(part, path)
    record_path(part).unlink(missing_ok=True)


class _Transfer:
    """A download in progress: the bytes that have come, and their digest."""

    def __init__(self, remote: Remote, part: Path, file: IO[bytes], name: str):
        self.remote, self.part, self.file, self.name = remote, part, file, name
        self.etag, self.size = _read_note(part)
        if remote.size is not None:
            self.size = remote.size
        self.sha256 = remote.sha256
        self.digest, self.have = hashlib.sha256(), 0
        file.seek(0)
        while chunk := file.read(_STEP):
            self.digest.update(chunk)
            self.have += len(chunk)
        self.resumed = self.have > 0
        if self.size is None:  # nothing tells whether the rest would be of the same file
            self.start_over()

    def state(self) -> str:
        if not self.have:
            return "nothing has come"
        return f"{self.have} of {self.size} bytes have come, and the next try goes on from there"

    def tidy(self) -> None:
        """Removes what is of no use to a later run."""
        if not self.have:
            self.part.unlink(missing_ok=True)
            record_path(self.part).unlink(missing_ok=True)

    def start_over(self) -> None:
        self.file.truncate(0)
        self.digest, self.have, self.etag = hashlib.sha256(), 0, None
        self.size = self.remote.size

    def attempt(self, http: httpx2.Client, bar: tqdm) -> None:
        """Asks for what is missing, and returns when the file is whole.

        Raises:
            Retry, httpx2.HTTPError: another attempt may do better.
            SourceError: none will.
            OSError: the disk.
        """
        if self.size is None or self.have != self.size or not self.have:
            with http.stream("GET", self.remote.url, headers=self._range()) as response:
                if self._begin(response):
                    bar.total = self.size
                    bar.refresh()
                    for chunk in response.iter_raw():
                        self.file.write(chunk)
                        self.digest.update(chunk)
                        self.have += len(chunk)
                        bar.update(self.have - bar.n)
        if self.have != self.size:
            raise Retry(f"{self.have} bytes came where {self.size} were announced")
        self._check_content()

    def _range(self) -> dict[str, str]:
        if not self.have:
            return {}
        found = {"Range": f"bytes={self.have}-"}
        # A weak tag does not promise the same bytes, so servers may not take it.
        if self.etag and not self.etag.startswith("W/"):
            found["If-Range"] = self.etag
        return found

    def _begin(self, response: httpx2.Response) -> bool:
        """Takes what the head of an answer says; whether a body is to be read."""
        if response.status_code == 416:  # there is nothing behind what we have
            if self.have and content_range(response)[1] == self.have == (self.size or self.have):
                self.size = self.have
                return False
            self.start_over()
            raise Retry("the file has changed")
        check_answer(response, self.remote.url)
        if response.status_code == 206:
            start, size = content_range(response)
            if start != self.have or size is None or size != (self.size or size):
                self.start_over()
                raise Retry("the file has changed")
        else:
            size = length(response)
            if self.have:  # the server knows no ranges, or has another file now
                self.start_over()
            if self.remote.size not in (None, size):
                raise Retry(f"the server has {size} bytes of it; {self.remote.size} are expected")
        self.size, self.etag = size, response.headers.get("ETag")
        linked = _linked_sha256(response)
        if self.remote.sha256 is None and linked is not None:
            self.sha256 = linked
        note = {"etag": self.etag, "size": size, "source": self.remote.source}
        with replacing(record_path(self.part), durable=False) as file:
            file.write(json.dumps(note).encode())
        check_free(self.part.parent, size - self.have)
        return True

    def _check_content(self) -> None:
        """Raises where what came is not what was asked for; nothing is kept of it then."""
        self.file.seek(0)
        magic = self.file.read(len(MAGIC))
        if magic != MAGIC:
            self.start_over()
            raise SourceError(f"{shown(self.remote.url)} is no GGUF file: it begins with {magic!r}")
        found = self.digest.hexdigest()
        if self.sha256 in (None, found):
            return
        self.start_over()
        if self.resumed:  # the older bytes may be of another file
            self.resumed = False
            raise Retry(f"what came has the sha256 {found}")
        raise SourceError(
            f"{self.name} came with the sha256 {found}; {self.sha256} is"
            " expected. It is not kept; try again, or ask whoever serves it"
        )


def _linked_sha256(response: httpx2.Response) -> str | None:
    """The digest that a Hugging Face hub gives with a file, on any of the hops to it.

    Its own ETag is one where the hub sends the file itself; the ETag of a store that it redirects
    to may have the same form and be another kind of hash.
    """
    for hop in (*response.history, response):
        tag = hop.headers.get("X-Linked-Etag")
        if tag is None and "X-Repo-Commit" in hop.headers:
            tag = hop.headers.get("ETag")
        tag = (tag or "").removeprefix("W/").strip('"')
        if len(tag) == 64 and not set(tag) - set("0123456789abcdef"):
            return tag
    return None


def _read_note(part: Path) -> tuple[str | None, int | None]:
    """ETag and size of the answer that a partial file came by, as far as they are known."""
    found = read_json(record_path(part))
    etag, size = (found.get("etag"), found.get("size")) if type(found) is dict else (None, None)
    return etag if type(etag) is str else None, size if type(size) is int else None
