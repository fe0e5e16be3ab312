"""Runs a part in processes of their own, each on a share of the cases, within a time.

A process that dies or hangs costs the case that it was at: another goes on with the next.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

from scripts.gpu_check.parts import Part
from scripts.gpu_check.rows import FAILED, SKIPPED, Row, Setting

_START = 90.0  # seconds until a process has said what there is to do
_GRACE = 5.0  # that a case may be late, once the part's time is over
_PATIENCE = 5  # times as long may a case take with kernels that are interpreted
_QUICK = "--xla_gpu_autotune_level=0"
_QUOTE = 200  # characters of what a dead process said last


@dataclass(kw_only=True)
class _Progress:
    """How far the cases of one share are."""

    total: int | None = None
    begun: int = 0
    current: str | None = None
    done: bool = False


def run_part(name: str, part: Part, setting: Setting, found: Callable[[Row], None]) -> None:
    """Run all cases of a part, or those that there is time for.

    Args:
        name: a key of PARTS.
        part: that row.
        setting: for the cases; `until` ends the part.
        found: called with every row, from several threads, one at a time.
    """

    n_workers = max(1, min(part.workers, (os.cpu_count() or 1) * 3 // 4))
    if setting.rehearse:
        n_workers = 1
    stopping, one_at_a_time = threading.Event(), threading.Lock()

    def share(i: int) -> None:
        for row in _rows(name, (i, n_workers), part, setting, stopping):
            with one_at_a_time:
                found(row)

    with ThreadPoolExecutor(n_workers) as pool:
        try:
            list(pool.map(share, range(n_workers)))
        except BaseException:  # Ctrl-C, which the processes have got too
            stopping.set()
            raise


def _rows(
    name: str,
    shard: tuple[int, int],
    part: Part,
    setting: Setting,
    stopping: threading.Event,
) -> Generator[Row]:
    """The rows of one share, over as many processes as it takes."""
    progress = _Progress()
    while not progress.done and not stopping.is_set():
        left = None if progress.total is None else progress.total - progress.begun
        if left == 0:
            return
        if time.time() >= setting.until:
            which = "cases" if left is None else f"{left} cases"
            note = f"no time left for {which} of share {shard[0] + 1} of {shard[1]}"
            yield Row(name=name, state=SKIPPED, note=note)
            return
        begun = progress.begun
        reason = yield from _one_process(name, shard, part, setting, progress)
        if progress.current is not None:
            state = SKIPPED if time.time() >= setting.until else FAILED
            yield Row(name=progress.current, state=state, note=reason)
            progress.current = None
        elif not progress.done and progress.begun == begun:  # it did not get as far as a case
            yield Row(name=name, state=FAILED, note=reason)
            return


def _one_process(
    name: str, shard: tuple[int, int], part: Part, setting: Setting, progress: _Progress
) -> Generator[Row, None, str]:
    """Rows of one process, and why it ended."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(read, "rb", buffering=0) as pipe:
        try:
            child = subprocess.Popen(
                _command(name, shard, progress.begun, write, setting),
                pass_fds=(write,),
                env=_environment(part),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(write)
        longest = part.longest * (_PATIENCE if setting.rehearse else 1)
        try:
            reason = yield from _read(pipe, longest, setting.until + _GRACE, progress)
        finally:
            if _must_be_killed(child, progress):
                child.kill()
            child.wait()
        return reason or f"the process ended with {child.returncode}: {_last_words(log)}"


def _must_be_killed(child: subprocess.Popen, progress: _Progress) -> bool:
    """Whether it still runs, and is not about to end by itself."""
    if not progress.done:
        return child.poll() is None
    try:
        child.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        return True
    return False


def _environment(part: Part) -> dict[str, str]:
    """This process's, with what makes XLA compile faster where no speed is measured."""
    if part.timed:
        return dict(os.environ)
    return {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}"}


def _command(name: str, shard: tuple[int, int], skip: int, fd: int, setting: Setting) -> list[str]:
    asked = {
        "part": name,
        "shard": shard[0],
        "shards": shard[1],
        "skip": skip,
        "fd": fd,
        "setting": setting.as_json(),
    }
    return [sys.executable, "-m", "scripts.gpu_check.worker", json.dumps(asked)]


def _read(
    pipe: IO[bytes], longest: float, until: float, progress: _Progress
) -> Generator[Row, None, str]:
    """Rows as they come; "" once the pipe is closed, or why nobody waits any longer."""
    limit, rest = min(until, time.time() + _START), b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, limit - time.time())):
                return "it took too long" if limit < until else "the time was over"
            data = pipe.read(1 << 16)
            if not data:
                return ""
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "row" in message:
                    yield Row(**message["row"])
                elif "begin" in message:
                    progress.begun, progress.current = progress.begun + 1, message["begin"]
                    limit = min(until, time.time() + longest)
                elif "end" in message:
                    progress.current = None
                elif "cases" in message:
                    progress.total = message["cases"]
                elif "done" in message:
                    progress.done = True


def _last_words(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4096))
    words = log.read().decode("utf-8", "replace").split()
    return " ".join(words)[-_QUOTE:] or "it said nothing"
