"""What may be put in place of a model's values, and how that and what is kept become a `Tap`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax.model.names import Value, matching
from minfer_jax.model.tap import Arrays, Edit, Functions, Key, Places, Rows, Tap


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replace:
    """An array in place of a value.

    Attributes:
        value: of the value's shape, or broadcastable against it.
        where: bool, likewise: where it is False, the value stays. None for everywhere.
    """

    value: Array | np.ndarray | float
    where: Array | np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Add:
    """An array that is added to a value; attributes as of `Replace`."""

    value: Array | np.ndarray | float
    where: Array | np.ndarray | None = None


# An array alone is as a Replace of it; a function is given the value and gives the new one.
Patch = Replace | Add | Array | np.ndarray | float | Callable[[Array], Array]


def resolved(patches: Mapping[str, Patch], known: Sequence[str]) -> dict[str, Patch]:
    """Patches by full names, each of which one pattern matches.

    Raises:
        ValueError: a pattern matches nothing, or two match one name.
    """
    found: dict[str, Patch] = {}
    for pattern, patch in patches.items():
        names = matching(pattern, known)
        if twice := [name for name in names if name in found]:
            raise ValueError(f"{twice[0]} has two patches, {pattern!r} is the second; give it one")
        found |= dict.fromkeys(names, patch)
    return found


def tap_of(
    known: Mapping[str, Value],
    n_layer: int,
    keep: Sequence[str],
    *edits: Mapping[str, Patch],
) -> tuple[Tap, Places]:
    """The tap that keeps these values and makes these changes.

    Args:
        known: all values.
        n_layer: L.
        keep: full names.
        *edits: by full names; done one after the other.

    Returns:
        (tap, where it keeps each: `Captured.places`).

    Raises:
        ValueError: a patch does not fit its value.
    """
    by_key: dict[Key, list[Value]] = {}
    for value in (known[name] for name in keep):
        by_key.setdefault((value.short, value.shape), []).append(value)
    tap = Tap(
        kept={key: _rows(values, n_layer) for key, values in by_key.items()},
        edits=_edits(known, n_layer, edits),
    )
    places = {
        value.name: (key, row) for key, values in by_key.items() for row, value in enumerate(values)
    }
    return tap, tuple((name, places[name]) for name in keep)


def _edits(
    known: Mapping[str, Value], n_layer: int, stages: Sequence[Mapping[str, Patch]]
) -> dict[Key, tuple[Edit, ...]]:
    found: dict[Key, tuple[Edit, ...]] = {}
    for patches in stages:
        # One stack for all that is alike: an edit of every layer is one edit.
        alike: dict[tuple, list[tuple[Value, Patch]]] = {}
        for name, patch in patches.items():
            value = known[name]
            kind = type(patch) if isinstance(patch, Replace | Add) else callable(patch)
            masked = isinstance(patch, Replace | Add) and patch.where is not None
            same = (value.short, value.shape), kind, masked
            alike.setdefault(same, []).append((value, patch))
        for (key, *_), pairs in alike.items():
            values, chosen = [value for value, _ in pairs], [patch for _, patch in pairs]
            make = _functions if callable(chosen[0]) else _arrays
            found[key] = (*found.get(key, ()), make(values, chosen, n_layer))
    return found


def _rows(values: Sequence[Value], n_layer: int, rows: Sequence[int] | None = None) -> Rows:
    """The table in which each of the values has its own row, or the one that it is given."""
    rows = range(len(values)) if rows is None else rows
    n = max(rows) + 1
    table = np.full(1 if values[0].layer is None else n_layer, n, np.int32)
    for value, row in zip(values, rows, strict=True):
        table[value.layer or 0] = row
    return Rows(row=jnp.asarray(table), n=n, dtype=values[0].dtype)


def _functions(values: Sequence[Value], patches: Sequence, n_layer: int) -> Functions:
    distinct = list(dict.fromkeys(patches))
    rows = [distinct.index(patch) for patch in patches]
    return Functions(rows=_rows(values, n_layer, rows), functions=tuple(distinct))


def _arrays(values: Sequence[Value], patches: Sequence, n_layer: int) -> Arrays:
    given = [p if isinstance(p, Replace | Add) else Replace(value=p) for p in patches]
    fitted = partial(_stacked, values)
    masks = None if given[0].where is None else fitted([p.where for p in given], "bool")
    return Arrays(
        rows=_rows(values, n_layer),
        value=fitted([p.value for p in given], values[0].dtype),
        where=masks,
        add=isinstance(given[0], Add),
    )


def _stacked(values: Sequence[Value], arrays: Sequence, dtype: str) -> Array:
    """Arrays with an axis for each of the value's, as far as that is needed of equal sizes."""
    shapes = [fitting(value, np.shape(array)) for value, array in zip(values, arrays, strict=True)]
    common = np.broadcast_shapes(*shapes)
    filled = [
        jnp.broadcast_to(_asarray(array, dtype).reshape(shape), common)
        for array, shape in zip(arrays, shapes, strict=True)
    ]
    return jnp.stack(filled)


def _asarray(array: object, dtype: str) -> Array:
    try:
        return jnp.asarray(array, dtype)
    except (TypeError, ValueError):
        kind = type(array).__name__
        raise ValueError(
            f"a patch is {kind}, expected an array, a function, Replace or Add"
        ) from None


def fitting(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with leading axes of 1, if it can be broadcast to the value's.

    Raises:
        ValueError: it cannot.
    """
    full = (1,) * (len(value.shape) - len(shape)) + shape
    if len(full) > len(value.shape) or any(
        n not in (1, size) for n, size in zip(full, value.shape, strict=True)
    ):
        raise ValueError(
            f"the patch of {value.name} has shape {list(shape)}, expected {list(value.shape)} "
            f"({' '.join(value.axes)}) or what can be broadcast to it"
        )
    return full


def check_size(values: Iterable[Value], limit: int) -> None:
    """Refuse to keep more than `limit` bytes.

    Raises:
        ValueError: names the size, and the largest of what was asked for.
    """
    values = list(values)
    total = sum(value.nbytes for value in values)
    if total > limit:
        sizes: dict[str, int] = {}
        for value in values:
            sizes[value.short] = sizes.get(value.short, 0) + value.nbytes
        largest = max(sizes, key=lambda short: sizes[short])
        shape = next(value.shape for value in values if value.short == largest)
        raise ValueError(
            f"{len(values)} values of {total / 1e6:.4g} MB are asked for, but at most "
            f"{limit / 1e6:.4g} MB are kept; the most is {largest}, {list(shape)} or "
            f"{math.prod(shape) * 4 / 1e6:.2g} MB each: ask for fewer, or give a shorter text"
        )
