"""A text in progress: what a run needs to go on, besides the weights.

A `Snapshot` is all of it as a value. As a file (`state_file`) it is a header

    {"n_drawn": .., "n_rows": .., "first": [.., ..], "context_shift": .., "n_keep": ..,
     "sampling": {..}, "mu": .., "constrained": .., "extras": [..]}

and arrays: tokens, recent and stop_ids as int32, those that `extras` names (see `_EXTRAS`), then
those of its `Rows`. The last three of the header may be missing, as in files of earlier versions. A
constraint itself is not in the file: such a run cannot be continued from there.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax.kv_store import LAYOUT, KVStore, Rows
from minfer_jax.model.config import MAX_POSITIONS, ModelConfig
from minfer_jax.run_options import RunOptions, TokenConstraint, Watch, checked_bias
from minfer_jax.sampling import WINDOW_EXTENDED, SamplingParams
from minfer_jax.sampling.args import n_words
from minfer_jax.state_file import StateError

# Further arrays that a file may hold, with their dtype there.
_EXTRAS = {"bias_ids": "int32", "bias_values": "float32", "breakers": "int32"}


@dataclass(kw_only=True)
class Session:
    """A text in progress. Kept up to date at every token, as its consumer may leave at any.

    Attributes:
        options: how it goes on.
        tokens: what the context holds: the prompt and what was yielded, less what shifts have
            dropped. The last one is still to be run, again if need be.
        recent: the latest WINDOW_EXTENDED tokens, for the penalties; dropped ones are among them.
        n_drawn: tokens yielded so far. What was drawn ahead and not yielded is drawn again.
        n_rows: positions, below len(tokens), that were run.
        mu: the sampler's bound of surprise (mirostat) after them; None before the first.
        constraint: what the text must meet, as far as it goes; None where there is none, or where
            the session comes from a file.
        watch: who is told how likely the tokens are.
    """

    options: RunOptions
    tokens: list[int]
    recent: deque[int]
    n_drawn: int = 0
    n_rows: int = 0
    mu: float | None = None
    constraint: TokenConstraint | None = None
    watch: Watch | None = None

    def take(self, token: int, mu: float | None = None) -> None:
        """Note a token that is about to be yielded.

        Raises:
            ValueError: as of the constraint, whose mask allowed it; then it is not noted.
        """
        if self.constraint is not None:
            self.constraint.accept(token)
        self.n_rows = len(self.tokens)
        self.tokens.append(token)
        self.recent.append(token)
        self.n_drawn += 1
        self.mu = mu

    def copy(self) -> "Session":
        """Another of the same values."""
        return dataclasses.replace(
            self,
            tokens=list(self.tokens),
            recent=self.recent.copy(),
            constraint=None if self.constraint is None else self.constraint.copy(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A session with its keys and values, on the host."""

    session: Session
    rows: Rows


def latest(tokens: Iterable[int]) -> deque[int]:
    """Those of a text that the sampler can look at."""
    return deque(tokens, WINDOW_EXTENDED)


def to_parts(snapshot: Snapshot) -> tuple[dict[str, Any], list[np.ndarray]]:
    """(header, arrays) of a file."""
    session, options = snapshot.session, snapshot.session.options
    extras = _extras(options)
    header = {
        "n_drawn": session.n_drawn,
        "n_rows": snapshot.rows.n,
        "first": list(snapshot.rows.first),
        "context_shift": options.context_shift,
        "n_keep": options.n_keep,
        "sampling": options.sampling.plain(),
        "mu": session.mu,
        "constrained": options.constrained,
        "extras": list(extras),
    }
    lists = (session.tokens, session.recent, sorted(options.stop_ids))
    arrays = [np.array(ids, np.int32) for ids in lists]
    return header, [*arrays, *extras.values(), *snapshot.rows.arrays]


def _extras(options: RunOptions) -> dict[str, np.ndarray]:
    """The arrays of a file that not every run has."""
    found = {}
    if options.bias:
        found["bias_ids"] = np.array(list(options.bias), np.int32)
        found["bias_values"] = np.array(list(options.bias.values()), np.float32)
    if options.breakers is not None:
        found["breakers"] = options.breakers.view(np.int32)
    return found


def identity_of(cfg: ModelConfig, n_ctx: int, model: str) -> dict[str, str]:
    """What a saved state is bound to; cached keys are rotated already.

    Args:
        cfg: of the model.
        n_ctx: of the engine.
        model: what tells the weights from others, such as their file's digest.
    """
    rotated = {}
    if cfg.long_rope is not None:
        most = cfg.long_rope[0]
        kind = "at most" if n_ctx <= most else "more than"
        rotated["RoPE"] = f"for {kind} {most} positions"
    return rotated | {
        "model": model,
        "architecture": cfg.arch,
        "cache type": cfg.cache_dtype,
        "precision": cfg.precision,
        "layout": str(LAYOUT),
    }


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
        if not 1 <= n_recent <= WINDOW_EXTENDED or n_stops > self._n_vocab:
            raise StateError(f"it has {n_recent} recent tokens and {n_stops} that stop")
        n = 3 + len(self._check_extras(header, arrays[3:]))
        expected = self._store.expected(n_rows, (first[0], first[1]))
        if arrays[n:] != expected:
            raise StateError(f"its keys and values are {arrays[n:]}, expected {expected}")

    def _check_extras(
        self, header: dict[str, Any], arrays: list[tuple[tuple[int, ...], np.dtype]]
    ) -> list[str]:
        """The names of the extras, which the first of these arrays are."""
        names: Any = header.get("extras", [])
        known = list(_EXTRAS)
        if names not in ([], known[:2], known[2:], known) or len(arrays) < len(names):
            raise StateError(f"extras is {names!r}, expected names of {known}")
        shapes = {}
        for name, (shape, dtype) in zip(names, arrays, strict=False):
            shapes[name] = shape
            if len(shape) != 1 or dtype != np.dtype(_EXTRAS[name]):
                raise StateError(f"{name} is {dtype} {list(shape)}")
        n_bias, words = shapes.get("bias_ids", (0,)), n_words(self._n_vocab)
        if shapes.get("bias_values", (0,)) != n_bias or n_bias[0] > self._n_vocab:
            raise StateError(f"it has {n_bias[0]} tokens with a bias")
        if shapes.get("breakers", (words,)) != (words,):
            raise StateError(f"breakers has {shapes['breakers'][0]} words, expected {words}")
        return names

    def build(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> Snapshot:
        """The snapshot, of a header and arrays that `check` has passed.

        Raises:
            StateError: a token or a sampling value is impossible. One line, without the path.
        """
        tokens, recent, stop_ids = arrays[:3]
        for ids in (tokens, recent):
            if ids.min() < 0 or ids.max() >= self._n_vocab:
                raise StateError(f"it has tokens outside the vocabulary of {self._n_vocab}")
        flags = {"constrained": False, **header}
        for name in ("context_shift", "constrained"):
            if not isinstance(flags.get(name), bool):
                raise StateError(f"{name} is neither true nor false")
        mu = header.get("mu")
        if mu is not None and not (isinstance(mu, float) and math.isfinite(mu)):
            raise StateError(f"mu is {mu!r}, expected a number")
        names = header.get("extras", [])
        extras = dict(zip(names, arrays[3:], strict=False))
        try:
            sampling = SamplingParams.from_plain(header["sampling"])
            ids, values = (extras.get(f"bias_{x}", np.zeros(0)).tolist() for x in ("ids", "values"))
            bias = checked_bias(self._n_vocab, dict(zip(ids, values, strict=True)))
        except (KeyError, TypeError, ValueError) as e:
            raise StateError(f"its sampling values: {e}") from None
        breakers = extras.get("breakers")
        options = RunOptions(
            sampling=sampling,
            stop_ids=frozenset(stop_ids.tolist()),
            context_shift=flags["context_shift"],
            n_keep=header["n_keep"],
            bias=bias,
            breakers=None if breakers is None else breakers.view(np.uint32),
            constrained=flags["constrained"],
        )
        n, (full, sliding) = header["n_rows"], header["first"]
        return Snapshot(
            session=Session(
                options=options,
                tokens=tokens.tolist(),
                recent=latest(recent.tolist()),
                n_drawn=header["n_drawn"],
                n_rows=n,
                mu=mu,
            ),
            rows=Rows(n=n, first=(full, sliding), arrays=tuple(arrays[3 + len(names) :])),
        )


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
