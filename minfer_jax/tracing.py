"""A text run with its values laid open, for an engine: see `model.traced` for the pure form.

Which layers are meant, and the arrays of patches, are data: one program serves them all, for a
number of rows. Rows of padding are cut off again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from minfer_jax.context import EngineError, smallest_of
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward_tapped
from minfer_jax.model.names import Value, matching, values
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Add, Patch, Replace, check_size, fitting, resolved, tap_of
from minfer_jax.model.tap import Kept, Tap
from minfer_jax.model.traced import MAX_BYTES
from minfer_jax.programs import Compile, compile_other
from minfer_jax.runner import padded

MOST_PROGRAMS = 32  # that are kept: each new function in a patch makes one


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Mapping[str, np.ndarray]):
    """The values of a text by name, without the batch axis; each as it is after its patch.

    Attributes:
        tokens: the text.
        logits: float32 [T, V], what the model says after each.
        arrays: the values that were asked for, in the order in which they are computed. Slots of
            attention are the positions: `scores` and `weights` are [N, T, T].
    """

    tokens: list[int]
    logits: Float[np.ndarray, "T V"]
    arrays: Mapping[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        size = sum(a.nbytes for a in self.values()) / 1e6
        return f"Trace({len(self.tokens)} tokens, {len(self)} values, {size:.1f} MB)"


class Tracer:
    """Compiles and runs such programs."""

    def __init__(
        self, cfg: ModelConfig, n_ctx: int, buckets: Sequence[int], compiles: list[Compile]
    ) -> None:
        """Compiles nothing yet.

        Args:
            cfg: the model.
            n_ctx: positions of the engine's context.
            buckets: numbers of rows that programs are compiled for, ascending; beyond the last they
                double up to n_ctx.
            compiles: where each is noted.
        """
        self._cfg, self._n_ctx = of_context(cfg, n_ctx), n_ctx
        self._buckets, self._compiles = buckets, compiles
        self._compiled: OrderedDict[object, Callable[..., tuple[Array, Kept]]] = OrderedDict()

    def patched(
        self,
        params: Callable[[], Params],
        patches: Mapping[str, Patch],
        checked: Callable[[Sequence[int]], np.ndarray],
    ) -> "Patched":
        """The model with these patches.

        Args:
            params: gives the weights as they are when a text is run, of one structure.
            patches: by patterns.
            checked: gives the ids of a text, at most n_ctx, or refuses them.

        Raises:
            EngineError: a pattern matches nothing, or two match one name.
        """
        try:
            resolved(patches, list(self._known(params(), 1)))
        except ValueError as e:
            raise EngineError(str(e)) from None

        def run(ids: Sequence[int], names: str | Iterable[str]) -> Trace:
            return self.run(params(), checked(ids), names, patches)

        return Patched(run=run)

    def run(
        self,
        params: Params,
        ids: Int[np.ndarray, " T"],
        names: str | Iterable[str],
        patches: Mapping[str, Patch],
    ) -> Trace:
        """Run all of a text, from an empty KV state.

        Args:
            params: weights.
            ids: at least one, at most n_ctx.
            names: patterns of the values to keep.
            patches: by patterns, see `Patched`.

        Raises:
            EngineError: a pattern matches nothing; a patch does not fit, or has a second one; what
                is asked for is too large.
        """
        t = len(ids)
        bucket = self._bucket(t)
        known, exact = self._known(params, bucket), self._known(params, t)
        try:
            keep = matching(names, list(known))
            every = dict.fromkeys([*keep, "logits"])
            check_size((known[name] for name in every), MAX_BYTES)
            chosen = {
                name: _filled(patch, exact[name], known[name])
                for name, patch in resolved(patches, list(known)).items()
            }
            apart = [name for name in keep if name != "logits"]
            tap, places = tap_of(known, self._cfg.n_layer, apart, chosen)
            arguments = params, *padded(ids, 0, bucket), tap
            logits, kept = self._program(bucket, arguments)(*arguments)
        except EngineError:
            raise
        except ValueError as e:
            raise EngineError(str(e)) from None
        rows = np.asarray(logits)[0, :t]
        stacks = {key: np.asarray(stack) for key, stack in kept.items()}
        arrays = {name: _cut(stacks[key][row, 0], known[name], t) for name, (key, row) in places}
        if "logits" in keep:
            arrays["logits"] = rows
        return Trace(tokens=ids.tolist(), logits=rows, arrays=arrays)

    def _known(self, params: Params, t: int) -> dict[str, Value]:
        return values(params, self._cfg, batch=1, t=t, slots=(t, t))

    def _bucket(self, t: int) -> int:
        bucket = smallest_of(self._buckets, t)
        while bucket < t:
            bucket *= 2
        return min(bucket, self._n_ctx)

    def _program(self, bucket: int, arguments: tuple) -> Callable[..., tuple[Array, Kept]]:
        leaves, structure = jax.tree.flatten(arguments)
        key = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if key not in self._compiled:
            function = partial(run_alone, cfg=self._cfg, n_slots=bucket)
            program, cost = compile_other(f"trace {bucket}", function, arguments)
            self._compiled[key] = program
            self._compiles.append(cost)
            if len(self._compiled) > MOST_PROGRAMS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class Patched:
    """A model some of whose values are others; what is computed later follows from them.

    A patch is an array in place of a value, of its shape as a `Trace` has it or broadcastable to
    that; a `Replace` or `Add` of `model.patches`, which may leave some of the value alone; or a
    function of the value, which is given [1, T and padding, ...] and keeps that shape. Other arrays
    of the same shapes compile nothing, nor do other layers, as many as before; another function
    does.

    Attributes:
        run: runs ids, and keeps what has these names.
        encode: turns a text into ids.
    """

    run: Callable[[Sequence[int], str | Iterable[str]], Trace]
    encode: Callable[[str], Sequence[int]] | None = None

    def logits(self, text: Sequence[int] | str) -> Float[np.ndarray, "T V"]:
        """What the model says after each token; see `trace`."""
        return self.trace(text, ()).logits

    def trace(self, text: Sequence[int] | str, names: str | Iterable[str]) -> Trace:
        """The values of a text, which follow from the patches.

        Args:
            text: token ids; or words, where the model has a tokenizer.
            names: patterns of the values.

        Raises:
            EngineError: see `Engine.trace`; or words were given to an engine.
        """
        if isinstance(text, str):
            if self.encode is None:
                raise EngineError("an engine takes token ids: give them, or use a LanguageModel")
            text = self.encode(text)
        return self.run(text, names)


def of_context(cfg: ModelConfig, n_ctx: int) -> ModelConfig:
    """The model as it is in a context of n_ctx, for a KV state that holds less."""
    if cfg.long_rope is None:
        return cfg
    longer = n_ctx > cfg.long_rope[0]
    return replace(cfg, long_rope=(0, cfg.long_rope[1]) if longer else None)


def run_alone(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    tap: Tap,
    *,
    cfg: ModelConfig,
    n_slots: int,
) -> tuple[Float[Array, "1 T V"], Kept]:
    """A text on a KV state of its own: (logits, what the tap keeps).

    Args:
        params, token_ids, positions, tap, cfg: as for `forward_tapped`.
        n_slots: positions of the state; T at least.
    """
    state = kv.init(cfg, n_slots, chunk=n_slots)
    logits, _, kept = forward_tapped(params, token_ids, positions, state, tap, cfg=cfg)
    return logits, kept


def _filled(patch: Patch, exact: Value, filled: Value) -> Patch:
    """A patch of a text's rows as one of a bucket's; functions stay as they are.

    Args:
        patch: what was given.
        exact: the value, of the text's length.
        filled: the same, of the bucket's.
    """
    if callable(patch):
        return patch

    def fill(array: object) -> np.ndarray:
        array = np.asarray(array)
        array = array.reshape(fitting(exact, array.shape))
        more = [
            (0, size - n if n == own and n > 1 else 0)
            for n, own, size in zip(array.shape, exact.shape, filled.shape, strict=True)
        ]
        return np.pad(array, more)

    if isinstance(patch, Replace | Add):
        where = None if patch.where is None else fill(patch.where)
        return replace(patch, value=fill(patch.value), where=where)
    return fill(patch)


def _cut(array: np.ndarray, value: Value, t: int) -> np.ndarray:
    """A value's own rows and slots, of one sequence."""
    return array[tuple(slice(t if axis in ("T", "S") else None) for axis in value.axes[1:])]
