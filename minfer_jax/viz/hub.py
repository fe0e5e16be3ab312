"""Events for whoever listens: one queue a listener, so that a slow one holds up no other."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minfer_jax.compact_json import compact

BUFFER = 8192  # events that wait for one listener at most
PATIENCE = 2.0  # seconds that a full queue is waited for before events are dropped
MOST_LISTENERS = 16


class Listener:
    """One of those who listen."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[str] = queue.Queue(BUFFER)
        self._lags = threading.Event()

    def put(self, event: str) -> None:
        """Give it an event; one that does not keep up misses some, and is told so."""
        try:
            # Whoever has missed some already is not waited for again until it has caught up.
            self._waiting.put(event, block=not self._lags.is_set(), timeout=PATIENCE)
        except queue.Full:
            self._lags.set()

    def take(self, seconds: float) -> list[str]:
        """All events that wait; none after so many seconds without any."""
        try:
            found = [self._waiting.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._waiting.empty() and len(found) < BUFFER:
            found.append(self._waiting.get_nowait())
        if self._lags.is_set():
            self._lags.clear()
            found.append(compact({"type": "lag"}))
        return found


class Hub:
    """Passes events on."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    @contextmanager
    def listener(self) -> Iterator[Listener | None]:
        """One more who listens, for as long as the block runs; None where there are too many."""
        one = Listener()
        with self._lock:
            full = len(self._listeners) >= MOST_LISTENERS
            if not full:
                self._listeners.append(one)
        try:
            yield None if full else one
        finally:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not one]

    def publish(self, event: dict[str, Any]) -> None:
        """Pass an event on to all who listen now."""
        with self._lock:
            listeners = list(self._listeners)
        text = compact(event) if listeners else ""
        for listener in listeners:
            listener.put(text)
