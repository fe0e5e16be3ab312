"""What a traced run keeps of a model's values, and what it changes of them: a `Tap`.

Layers stand in a loop whose body serves many of them, so which layer is meant is data. What is kept
of a name are the rows of a stack that the loop carries along, and a table says which row is whose:

    attn_out of layers 1 and 3 of 4      layer   0  1  2  3
                                         row     2  0  2  1        2 of 2 rows: nowhere

The same holds for what is put in place of a value. So one program serves any choice of layers, and
only what is asked for takes memory. Without a tap none of this is in a program.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minfer_jax.quant.prologue import Norm, applied

# A name without its layer, and the shape of its value, which may differ from layer to layer.
Key = tuple[str, tuple[int, ...]]
Kept = dict[Key, Array]  # stacks, [rows, *shape]
Places = tuple[tuple[str, tuple[Key, int]], ...]  # full names, with stack and row


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which layer has which row of a stack.

    Attributes:
        row: int32 [L] (or [1], of a value that belongs to no layer); n for no row.
        n: static; rows of the stack.
        dtype: static; of the values.
    """

    row: Int[Array, " L"]
    n: int = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})

    def of(self, layer: Array) -> Int[Array, ""]:
        """The row of a layer."""
        return lax.dynamic_index_in_dim(self.row, layer, keepdims=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Arrays that replace values, or are added to them.

    Attributes:
        rows: whose they are.
        value: [n, ...], broadcastable against the values.
        where: bool, likewise; where it is False, the value stays. None for everywhere.
        add: static; they are added.
    """

    rows: Rows
    value: Array
    where: Bool[Array, "n ..."] | None
    add: bool = field(metadata={"static": True})

    def applied(self, value: Array, layer: Array) -> Array:
        """The value of a layer as it is from here on."""
        row = self.rows.of(layer)
        inside = jnp.minimum(row, self.rows.n - 1)
        own = lax.dynamic_index_in_dim(self.value, inside, keepdims=False)
        hit = row < self.rows.n
        if self.where is not None:
            hit = hit & lax.dynamic_index_in_dim(self.where, inside, keepdims=False)
        return jnp.where(hit, value + own if self.add else own, value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Functions:
    """Functions that values go through.

    Attributes:
        rows: which of them is whose.
        functions: static.
    """

    rows: Rows
    functions: tuple[Callable[[Array], Array], ...] = field(metadata={"static": True})

    def applied(self, value: Array, layer: Array) -> Array:
        """The value of a layer as it is from here on."""
        row = self.rows.of(layer)

        def through(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
            def checked(value: Array) -> Array:
                new = jnp.asarray(function(value))
                if (new.shape, new.dtype) != (value.shape, value.dtype):
                    raise ValueError(
                        f"a patch turns {value.dtype}{list(value.shape)} into "
                        f"{new.dtype}{list(new.shape)}; expected it to keep shape and dtype"
                    )
                return new

            return checked

        return lax.switch(row, [*map(through, self.functions), lambda value: value], value)


class Edit(Protocol):
    """What changes values: `Arrays`, `Functions`."""

    def applied(self, value: Array, layer: Array) -> Array:
        """The value of a layer as it is from here on."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tap:
    """What is kept, and what is changed, by name and shape; edits in order.

    Attributes:
        kept, edits: see there.
        summary: given a name and a value, what is kept in its place; None for the value itself.
    """

    kept: Mapping[Key, Rows]
    edits: Mapping[Key, tuple[Edit, ...]]
    summary: Callable[[str, Array], Array] | None = None

    def stacks(self, of_layers: frozenset[str]) -> Kept:
        """Zeros for what the loop over the layers will write."""
        return {
            key: jnp.zeros((rows.n, *like.shape), like.dtype)
            for key, rows in self.kept.items()
            if key[0] in of_layers
            for like in (jax.eval_shape(partial(self.stored, key[0]), _like(key, rows)),)
        }

    def stored(self, name: str, value: Array) -> Array:
        """What is kept of a value."""
        return value if self.summary is None else self.summary(name, value)

    def plus(self, deltas: Kept) -> "Tap":
        """The same, with something added to all that is kept, last: stacks as they are kept."""
        edits = dict(self.edits)
        for key, delta in deltas.items():
            last = Arrays(rows=self.kept[key], value=delta, where=None, add=True)
            edits[key] = (*edits.get(key, ()), last)
        return replace(self, edits=edits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Captured(Mapping[str, Array]):
    """Values by full name, in the order in which they are computed; a pytree.

    The leaves are the stacks that were kept; a value is sliced out when it is asked for. vmap puts
    its axis in front of each, as it does with any array.

    Attributes:
        stacks: what was kept.
        places: static; where each is.
    """

    stacks: Kept
    places: Places = field(metadata={"static": True})

    def __getitem__(self, name: str) -> Array:
        key, row = dict(self.places)[name]
        stack = self.stacks[key]
        axis = stack.ndim - 1 - len(key[1])
        # As data: outside of jit each other row would be compiled.
        return lax.dynamic_index_in_dim(stack, jnp.int32(row), axis, keepdims=False)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.places)

    def __len__(self) -> int:
        return len(self.places)


class Values:
    """The values of one layer, or of none, while they are computed.

    Attributes:
        kept: the stacks, with those that were named so far.
    """

    def __init__(self, tap: Tap, layer: Array | None, kept: Kept) -> None:
        """Of a layer, the stacks come from `Tap.stacks`; else there are none yet."""
        self.kept = dict(kept)
        self._tap, self._layer = tap, layer

    def __call__(self, name: str, value: Array) -> Array:
        """Name a value: it is changed if that was asked for, then kept, and goes on as returned."""
        key = name, value.shape
        layer = jnp.uint32(0) if self._layer is None else self._layer
        for edit in self._tap.edits.get(key, ()):
            value = edit.applied(value, layer)
        if (rows := self._tap.kept.get(key)) is not None:
            new = self._tap.stored(name, value)
            if self._layer is None:
                self.kept[key] = new[None]
            else:
                self.kept[key] = self.kept[key].at[rows.of(layer)].set(new, mode="drop")
        return value

    def wants(self, *names: str) -> bool:
        """Whether one of these is kept or changed, in any layer: others need not be computed."""
        return any(key[0] in names for key in (*self._tap.kept, *self._tap.edits))


def _like(key: Key, rows: Rows) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(key[1], rows.dtype)


def normed(
    tap: Values | None, name: str, x: Float[Array, "... D"], norm: Norm | None
) -> tuple[Float[Array, "... D"], Norm | None]:
    """x, and its norm, which is left to the product that follows; with a tap it is done here."""
    if tap is None or norm is None:
        return x, norm
    return tap(name, applied(x, norm)), None
