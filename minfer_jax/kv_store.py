"""The KV state of an engine: given to each call and taken back, and what it holds afterwards.

The text of a run is known to its `Session`; here is only which positions have their keys and
values. A row is one position's, of all layers of a kind. Rows beyond what a run has yielded may be
there too, as decode runs ahead: `keep` hides them by their position.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from minfer_jax.context import EngineError
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.programs import Programs

LAYOUT = 1  # version of what `Rows` holds
_KINDS = (kv.FULL, kv.SLIDING)
_SLOTS = 3  # axis of the slots in every array of keys and values


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The keys and values of a text's first positions, on the host.

    Attributes:
        n: positions; later ones are left out.
        first: of full and of sliding layers, the first position whose rows are here.
        arrays: the leaves of full layers' keys and values, then those of sliding layers; axis 3
            runs over positions first to n - 1.
    """

    n: int
    first: tuple[int, int]
    arrays: tuple[np.ndarray, ...]


class KVStore:
    """Owns a KVState of one sequence; allocates it when it is first needed.

    Attributes:
        shape: shapes and dtypes of the state.
        state: the state, or None where it is not allocated, or was lost to a failure.
    """

    def __init__(self, cfg: ModelConfig, n_ctx: int, chunk: int) -> None:
        """Allocates nothing yet.

        Args:
            cfg: the model.
            n_ctx: positions that the state holds.
            chunk: tokens of the longest call.
        """
        self._cfg = cfg
        self._n_ctx = n_ctx
        self._new: Callable[[], KVState] = jax.jit(partial(kv.init, cfg, n_ctx, chunk=chunk))
        self.shape = jax.eval_shape(self._new)
        self.state: KVState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state, whether or not it is allocated yet."""
        return sum(_nbytes(a) for a in jax.tree.leaves(self.shape))

    def layers(self, kind: int) -> tuple[int, int, int]:
        """(layers, slots, bytes of keys and values) of kv_state.FULL or kv_state.SLIDING."""
        leaves = _leaves(self.shape, kind)
        n_slots = self.shape.positions[kind].shape[1]
        return leaves[0].shape[0], n_slots, sum(_nbytes(a) for a in leaves)

    def call(
        self,
        programs: Programs,
        function: Callable,
        params: Params,
        tokens: np.ndarray | Array,
        positions: np.ndarray,
        *rest: object,
    ) -> list[Any]:
        """Run a program on the state, which it replaces; its other results.

        Where it is interrupted the state is lost: it may be given away already.
        """
        state, self.state = self.state, None
        assert state is not None, "keep comes first"
        self.state, *others = programs.call(function, params, tokens, positions, state, *rest)
        return others

    def empty(self) -> KVState:
        """A new state that holds nothing.

        Raises:
            EngineError: there is no memory for it.
        """
        try:
            return jax.block_until_ready(self._new())
        except jax.errors.JaxRuntimeError as e:
            raise self._no_memory() from e

    def usable(self, n: int) -> int:
        """n if the state has all rows that queries at position n and later see; else 0."""
        held = self._positions()
        return n if held is not None and self._holds(held, n) else 0

    def keep(self, n: int) -> None:
        """Make the state ready for a text whose first n positions it has; see `usable`.

        The positions from there on are hidden: no query sees them.

        Raises:
            EngineError: there is no memory for the state.
        """
        held = self._positions()
        if self.state is None or held is None:
            self.state = self.empty()
            return
        # Old keys and values may stay: only positions make them visible.
        shown = tuple(jax.device_put([np.where(p < n, p, np.int32(-1)) for p in held]))
        self.state = jax.block_until_ready(dataclasses.replace(self.state, positions=shown))

    def rows(self, n: int) -> Rows:
        """The rows of the first n positions; of none, where not all that are needed are held."""
        n = self.usable(n)
        held = self._positions() or [np.zeros((1, 0), np.int32)] * 2
        first, arrays = [], []
        for kind in _KINDS:
            n_layers, n_slots, _ = self.layers(kind)
            first.append(_first_held(held[kind], n) if n_layers else n)
            slots = np.arange(first[kind], n) % n_slots
            # Copies: a view would keep the next call from writing in place.
            leaves = _leaves(self.shape if self.state is None else self.state, kind)
            arrays += [
                np.asarray(a)[:, :, :, slots]
                if len(slots)
                else np.zeros(_with_slots(a, 0), a.dtype)
                for a in leaves
            ]
        return Rows(n=n, first=(first[0], first[1]), arrays=tuple(arrays))

    def expected(self, n: int, first: tuple[int, int]) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the arrays of such `Rows`."""
        return [
            (_with_slots(a, n - first[kind]), np.dtype(a.dtype))
            for kind in _KINDS
            for a in _leaves(self.shape, kind)
        ]

    def put(self, rows: Rows) -> None:
        """Hold these rows and nothing else; another n_ctx and chunk may have made them.

        Args:
            rows: as `expected` says; n at most n_ctx.

        Raises:
            EngineError: there is no memory for the state.
        """
        self.state = None
        leaves, positions, arrays = [], [], iter(rows.arrays)
        try:
            for kind in _KINDS:
                _, n_slots, _ = self.layers(kind)
                at = np.arange(max(rows.first[kind], rows.n - n_slots), rows.n)
                held = np.full((1, n_slots), -1, np.int32)
                held[0, at % n_slots] = at
                positions.append(jax.device_put(held))
                for template in _leaves(self.shape, kind):
                    array = np.zeros(template.shape, template.dtype)
                    array[:, :, :, at % n_slots] = next(arrays)[:, :, :, at - rows.first[kind]]
                    leaves.append(jax.block_until_ready(jax.device_put(array)))
        except (MemoryError, jax.errors.JaxRuntimeError) as e:
            raise self._no_memory() from e
        shape = self.shape
        structure = jax.tree.structure([(shape.k[kind], shape.v[kind]) for kind in _KINDS])
        (k0, v0), (k1, v1) = jax.tree.unflatten(structure, leaves)
        self.state = KVState(k=(k0, k1), v=(v0, v1), positions=(positions[0], positions[1]))

    def drop(self) -> None:
        """Hold nothing: not even old keys and values, which may be NaN (0 times NaN is NaN)."""
        self.state = None

    @contextlib.contextmanager
    def dropped_on_failure(self) -> Iterator[None]:
        """While in it, a failure of a program that was sent off leaves no state behind."""
        try:
            yield
        except Exception:
            self.drop()
            raise

    def _positions(self) -> list[np.ndarray] | None:
        """What the slots hold; None without a state, or where the call that made it failed."""
        try:
            return None if self.state is None else [np.asarray(p) for p in self.state.positions]
        except jax.errors.JaxRuntimeError:
            self.drop()
            return None

    def _no_memory(self) -> EngineError:
        return EngineError(
            f"no memory for the KV state of {self._n_ctx} positions "
            f"({self.nbytes / 1e6:.0f} MB): lower n_ctx"
        )

    def _holds(self, held: list[np.ndarray], n: int) -> bool:
        """Whether all rows below n are there that a query at n or later sees."""
        needed = {kv.FULL: 0, kv.SLIDING: max(0, n - self._cfg.window + 1)}
        kinds = [kind for kind in _KINDS if self.layers(kind)[0]]
        return n == 0 or all(_first_held(held[kind], n) <= needed[kind] for kind in kinds)


def _first_held(held: Int[np.ndarray, "1 S"], n: int) -> int:
    """The first position from which on all below n are held; n if not even n - 1 is."""
    there = np.zeros(n, bool)
    there[held[(held >= 0) & (held < n)]] = True
    missing = np.flatnonzero(~there)
    return int(missing[-1]) + 1 if missing.size else 0


def _leaves(state: KVState, kind: int) -> list[Any]:
    """The arrays of keys, then of values: of a quantised cache there are several of each."""
    return jax.tree.leaves((state.k[kind], state.v[kind]))


def _with_slots(a: Any, n: int) -> tuple[int, ...]:
    return *a.shape[:_SLOTS], n, *a.shape[_SLOTS + 1 :]


def _nbytes(a: Any) -> int:
    return a.size * a.dtype.itemsize
