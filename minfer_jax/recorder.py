"""A text run again, call by call, with all of its values summed up: what dumps are made of.

The prompt is one step, then each token is one. Two programs are compiled, whatever the text; the KV
state is the recorder's own, so what an engine holds is left alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.context import BUCKETS, EngineError, power_of_two, smallest_of
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward_tapped
from minfer_jax.model.graph import Graph, graph_of
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.names import Value, values
from minfer_jax.model.params import Params
from minfer_jax.model.patches import tap_of
from minfer_jax.model.summary import Summarised, Summary, joined, places, sizes
from minfer_jax.model.tap import Kept, Key, Places, Tap
from minfer_jax.programs import Compile, compile_other
from minfer_jax.quant.cache import floats
from minfer_jax.runner import padded
from minfer_jax.tracing import of_context

CHUNK = 128  # tokens of a prompt that one call runs at most
MAX_BYTES = 2**28  # of one layer's scores in a call; larger ones are left out


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step has shown.

    Attributes:
        token: that it has run; None for the prompt.
        logits: of its last row.
        values: of all its rows, in the order in which they are computed.
    """

    token: int | None
    logits: Float[np.ndarray, " V"]
    values: Sequence[Summarised]


class Recorder:
    """Runs one text.

    Attributes:
        n_slots: tokens that it takes.
        n_rows: that it has run.
        compiles: the programs that were compiled.
    """

    def __init__(
        self, params: Params, cfg: ModelConfig, *, n_tokens: int, n_ctx: int, summed: bool = True
    ) -> None:
        """Compiles nothing yet.

        Args:
            params: weights.
            cfg: their configuration.
            n_tokens: that it has to take; programs are compiled for the next power of two.
            n_ctx: positions of the context, which bounds them, and which RoPE may depend on.
            summed: whether the values of a step are wanted, besides its logits.

        Raises:
            EngineError: there are more tokens than positions.
        """
        if n_tokens > n_ctx:
            raise EngineError(f"{n_tokens} tokens are to be run, but the context holds {n_ctx}")
        self.n_slots = power_of_two(n_tokens, CHUNK, n_ctx)
        self.n_rows = 0
        self._params, self._cfg, self._summed = params, of_context(cfg, n_ctx), summed
        self._new = partial(kv.init, self._cfg, self.n_slots, chunk=self.n_slots)
        self._state = self._new()
        self.compiles: list[Compile] = []
        self._calls: dict[int, _Call] = {}

    def known(self, t: int) -> dict[str, Value]:
        """The values of a call for t rows; scores that are too large are left out."""
        found = values(self._params, self._cfg, batch=1, t=t, slots=(self.n_slots, self.n_slots))
        return {name: value for name, value in found.items() if _is_small(value)}

    def graph(self, kind: str, t: int) -> Graph:
        """The graph of the values of a step of t rows, which is called `kind`."""
        n_slots = t if t > 1 else self.n_slots
        found = values(self._params, self._cfg, batch=1, t=t, slots=(n_slots, n_slots))
        shown = self.known(self._rows_of(t))
        known = {name: value for name, value in found.items() if name in shown}
        return graph_of(self._params, self._cfg, known, kind=kind, t=t, n_slots=n_slots)

    def reset(self) -> None:
        """Begin another text, with the programs that are there."""
        self._state, self.n_rows = self._new(), 0

    def prompt(self, ids: Int[np.ndarray, " T"]) -> Step:
        """Run the tokens that a text begins with."""
        return self._step(ids, None)

    def token(self, token: int) -> Step:
        """Run one more token."""
        return self._step(np.array([token], np.int32), token)

    def rows(self, layer: int) -> tuple[Float[np.ndarray, "T K H"], Float[np.ndarray, "T K Hv"]]:
        """The keys and values of a layer, by position, as the cache's type has rounded them."""
        kind, index = kv.kind(self._cfg.layers[layer]), kv.in_kind(self._cfg)[layer]

        def of(cache: object) -> np.ndarray:
            own = jax.tree.map(lambda plane: plane[index, :, :, : self.n_rows], cache)
            return np.asarray(floats(own, "float32"))[0].transpose(1, 0, 2)

        return of(self._state.k[kind]), of(self._state.v[kind])

    def _step(self, ids: np.ndarray, token: int | None) -> Step:
        begin, total = self.n_rows, len(ids)
        if begin + total > self.n_slots:
            raise EngineError(f"{begin + total} tokens, but the recorder takes {self.n_slots}")
        t = self._rows_of(total)
        call = self._call(t)
        at = {key: places(key, total, begin + total) for key in call.tap.kept}
        parts, logits = [], None
        for first in range(0, total, t):
            chunk = ids[first : first + t]
            summary = Summary(
                first=np.array(first, np.int32),
                n=np.array(len(chunk), np.int32),
                slots=np.array(begin + total, np.int32),
                at=at,
            )
            tap = replace(call.tap, summary=summary) if self._summed else call.tap
            tokens, positions = padded(chunk, begin + first, t)
            arguments = self._params, tokens, positions, self._state, np.int32(len(chunk) - 1), tap
            if call.program is None:
                call.program, cost = compile_other(
                    f"record {t}", partial(_run, cfg=self._cfg), arguments, donated=(3,)
                )
                self.compiles.append(cost)
            logits, self._state, kept = call.program(*arguments)
            parts.append(jax.device_get(kept))
        self.n_rows += total
        return Step(
            token=token,
            logits=np.asarray(logits),
            values=_joined(call, parts, total, begin + total),
        )

    def _rows_of(self, n: int) -> int:
        """Rows of the calls that a step of n rows goes through in."""
        return 1 if n == 1 else min(CHUNK, self.n_slots, smallest_of(BUCKETS, n))

    def _call(self, t: int) -> "_Call":
        if t not in self._calls:
            known = self.known(t)
            names = list(known) if self._summed else []
            tap, found = tap_of(known, self._cfg.n_layer, names)
            self._calls[t] = _Call(known=known, tap=tap, places=found)
        return self._calls[t]


@dataclass(kw_only=True)
class _Call:
    """A call for a number of rows; its program is None until it is compiled."""

    known: Mapping[str, Value]
    tap: Tap
    places: Places
    program: Callable | None = None


def _run(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    kv_state: KVState,
    last: Int[Array, ""],
    tap: Tap,
    *,
    cfg: ModelConfig,
) -> tuple[Float[Array, " V"], KVState, Kept]:
    logits, kv_state, kept = forward_tapped(params, token_ids, positions, kv_state, tap, cfg=cfg)
    return lax.dynamic_index_in_dim(logits[0], last, keepdims=False), kv_state, kept


def _joined(call: _Call, parts: list[dict[Key, np.ndarray]], rows: int, slots: int) -> list:
    return [
        joined(
            name,
            call.known[name].dtype,
            sizes(key, rows, slots),
            np.stack([part[key][row] for part in parts]),
        )
        for name, (key, row) in call.places
    ]


def _is_small(value: Value) -> bool:
    return "S" not in value.axes or value.nbytes <= MAX_BYTES
