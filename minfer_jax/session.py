"""A text in progress: what a run needs to go on, besides the weights.

A `Snapshot` is all of it as a value. As a file (`state_file`) it is a header

    {"n_drawn": .., "n_rows": .., "first": [.., ..], "context_shift": ..,
     "n_keep": .., "sampling": {..}}

and arrays: tokens, recent and stop_ids as int32, then those of its `Rows`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax.kv_store import KVStore, Rows
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.state import WINDOW
from minfer_jax.state_file import StateError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run was asked to go on.

    Attributes:
        sampling: how to draw.
        stop_ids: tokens that end the run.
        context_shift: whether to make room when the context is full, or to end.
        n_keep: tokens at the beginning that stay then.
    """

    sampling: SamplingParams
    stop_ids: frozenset[int]
    context_shift: bool
    n_keep: int


@dataclass(kw_only=True)
class Session:
    """A text in progress. Kept up to date at every token, as its consumer may leave at any.

    Attributes:
        options: how it goes on.
        tokens: what the context holds: the prompt and what was yielded, less what shifts have
            dropped. The last one is still to be run, again if need be.
        recent: the latest tokens, for the penalties; dropped ones are among them.
        n_drawn: tokens yielded so far. What was drawn ahead and not yielded is drawn again.
        n_rows: positions, below len(tokens), that were run.
    """

    options: RunOptions
    tokens: list[int]
    recent: list[int]
    n_drawn: int = 0
    n_rows: int = 0

    def take(self, token: int) -> None:
        """Note a token that is about to be yielded."""
        self.n_rows = len(self.tokens)
        self.tokens.append(token)
        self.recent = [*self.recent[1 - WINDOW :], token]
        self.n_drawn += 1

    def copy(self) -> "Session":
        """Another of the same values."""
        return dataclasses.replace(self, tokens=list(self.tokens), recent=list(self.recent))


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A session with its keys and values, on the host."""

    session: Session
    rows: Rows


def to_parts(snapshot: Snapshot) -> tuple[dict[str, Any], list[np.ndarray]]:
    """(header, arrays) of a file."""
    session, options = snapshot.session, snapshot.session.options
    header = {
        "n_drawn": session.n_drawn,
        "n_rows": snapshot.rows.n,
        "first": list(snapshot.rows.first),
        "context_shift": options.context_shift,
        "n_keep": options.n_keep,
        "sampling": options.sampling.plain(),
    }
    lists = (session.tokens, session.recent, sorted(options.stop_ids))
    return header, [*(np.array(ids, np.int32) for ids in lists), *snapshot.rows.arrays]


class Expected:
    """Judges what a file says it holds, before its arrays are read, and builds the snapshot."""

    def __init__(self, store: KVStore, n_ctx: int, n_vocab: int) -> None:
        """The state must fit this store, context and vocabulary."""
        self._store, self._n_ctx, self._n_vocab = store, n_ctx, n_vocab

    def check(self, header: dict[str, Any], arrays: list[tuple[tuple[int, ...], np.dtype]]) -> None:
        """Refuse a header with impossible values, and arrays other than those that follow from it.

        Args:
            header: as `to_parts` gives it.
            arrays: shapes and dtypes.

        Raises:
            StateError: what does not fit. One line, without the path.
        """
        whole = np.dtype(np.int32)
        shapes = [shape for shape, _ in arrays[:3]]
        if len(shapes) < 3 or any(len(s) != 1 or t != whole for s, t in arrays[:3]):
            raise StateError("it lists no tokens")
        (n_tokens,), (n_recent,), (n_stops,) = shapes
        if n_tokens > self._n_ctx + 1:
            raise StateError(
                f"it holds {n_tokens} tokens, but the context holds {self._n_ctx}: raise n_ctx"
            )
        n_rows: Any = header.get("n_rows")
        first: Any = header.get("first")
        bounds = {"n_drawn": MAX_POSITIONS, "n_keep": MAX_POSITIONS, "n_rows": n_tokens - 1}
        for name, most in bounds.items():
            if not _is_count(header.get(name), most):
                raise StateError(f"{name} is {header.get(name)!r}, expected 0 to {most}")
        if not (
            isinstance(first, list) and len(first) == 2 and all(_is_count(f, n_rows) for f in first)
        ):
            raise StateError(f"first is {first!r}, expected two positions up to {n_rows}")
        if not 1 <= n_recent <= WINDOW or n_stops > self._n_vocab:
            raise StateError(f"it has {n_recent} recent tokens and {n_stops} that stop")
        expected = self._store.expected(n_rows, (first[0], first[1]))
        if arrays[3:] != expected:
            raise StateError(f"its keys and values are {arrays[3:]}, expected {expected}")

    def build(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> Snapshot:
        """The snapshot, of a header and arrays that `check` has passed.

        Raises:
            StateError: a token or a sampling value is impossible. One line, without the path.
        """
        tokens, recent, stop_ids = arrays[:3]
        for ids in (tokens, recent):
            if ids.min() < 0 or ids.max() >= self._n_vocab:
                raise StateError(f"it has tokens outside the vocabulary of {self._n_vocab}")
        if not isinstance(header.get("context_shift"), bool):
            raise StateError("context_shift is neither true nor false")
        try:
            sampling = SamplingParams.from_plain(header["sampling"])
        except (KeyError, TypeError, ValueError) as e:
            raise StateError(f"its sampling values: {e}") from None
        options = RunOptions(
            sampling=sampling,
            stop_ids=frozenset(stop_ids.tolist()),
            context_shift=header["context_shift"],
            n_keep=header["n_keep"],
        )
        n, (full, sliding) = header["n_rows"], header["first"]
        return Snapshot(
            session=Session(
                options=options,
                tokens=tokens.tolist(),
                recent=recent.tolist(),
                n_drawn=header["n_drawn"],
                n_rows=n,
            ),
            rows=Rows(n=n, first=(full, sliding), arrays=tuple(arrays[3:])),
        )


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
