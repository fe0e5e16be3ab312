"""Linear maps out of a file: `NAME.weight`, and `NAME.scale` and `NAME.bias` beside it."""

import jax.numpy as jnp
import numpy as np

from minfer_jax.model.params import ExpertLinear, Linear
from minfer_jax.model.tensors import Tensors

EXTRAS = ("scale", "bias")


def check(t: Tensors, name: str, n: int, k: int) -> None:
    """Note what is wrong with a map of k to n values."""
    t.check(f"{name}.weight", (n, k))
    check_extras(t, name, bias=(n,))


def check_extras(
    t: Tensors, name: str, *, bias: tuple[int, ...], scale: tuple[int, ...] = (1,)
) -> None:
    """The same for what is beside its weight, of these shapes."""
    for extra, shape in (("bias", bias), ("scale", scale)):
        if t.has(f"{name}.{extra}"):
            t.check(f"{name}.{extra}", shape)


def check_experts(t: Tensors, name: str, n_expert: int, n: int, k: int) -> None:
    """The same for a map of each expert."""
    t.check(f"{name}.weight", (n_expert, n, k))
    check_extras(t, name, bias=(n_expert, n), scale=(n_expert,))


def load(t: Tensors, names: list[list[str]], *, scale_bias: bool = False) -> tuple[Linear, ...]:
    """Linear maps of one input, for every layer of a group.

    Args:
        t: where they come from.
        names: for each layer the maps whose outputs lie side by side.
        scale_bias: the scale multiplies the bias too: llama.cpp's build_ffn scales after it adds
            the bias, where its attention scales before.

    Returns:
        One stacked Linear for all maps if they are of one kind, else one for each.
    """
    if len({t.kind(name) for name in names[0]}) > 1:
        columns = zip(*names, strict=True)
        return tuple(load(t, [[n] for n in column], scale_bias=scale_bias)[0] for column in columns)
    _, has_scale, has_bias = t.kind(names[0][0])
    weight = t.weights([[f"{name}.weight" for name in parts] for parts in names])
    scale = _rows(t, names, "scale") if has_scale else None
    bias = _rows(t, names, "bias") if has_bias else None
    if scale is not None and bias is not None and scale_bias:
        bias = bias * scale
    return (
        Linear(
            weight=weight,
            scale=None if scale is None else jnp.asarray(scale),
            bias=None if bias is None else jnp.asarray(bias),
        ),
    )


def _rows(t: Tensors, names: list[list[str]], extra: str) -> np.ndarray:
    """[layers, N]; a single value is repeated for the rows of its map."""
    rows = [
        [
            np.broadcast_to(t.vector(f"{name}.{extra}"), t.file.tensors[f"{name}.weight"].shape[:1])
            for name in parts
        ]
        for parts in names
    ]
    return np.stack([np.concatenate(row) for row in rows])


def load_experts(t: Tensors, names: list[list[str]], n_expert: int) -> tuple[ExpertLinear, ...]:
    """As `load`, for maps of experts, except that maps which have a scale stay apart."""
    kinds = {t.kind(name) for name in names[0]}
    if len(names[0]) > 1 and (len(kinds) > 1 or next(iter(kinds))[1]):
        columns = zip(*names, strict=True)
        return tuple(load_experts(t, [[n] for n in column], n_expert)[0] for column in columns)
    _, has_scale, has_bias = t.kind(names[0][0])
    weight = t.weights([[f"{name}.weight" for name in parts] for parts in names], n_expert=n_expert)
    scale = bias = None
    if has_scale:  # of one map: [layers, E]
        scale = jnp.asarray(np.stack([t.vector(f"{parts[0]}.scale") for parts in names]))
    if has_bias:  # [layers, E, N]
        rows = [np.concatenate([t.vector(f"{n}.bias") for n in parts], -1) for parts in names]
        bias = jnp.asarray(np.stack(rows))
    return (ExpertLinear(weight=weight, n_expert=n_expert, scale=scale, bias=bias),)
