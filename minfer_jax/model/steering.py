"""Control vectors (Vogel 2024, "repeng"): directions that are added to the residual after a layer.

Pure functions on `Params`. The scales are data, and so is the range of layers: what lies outside it
is zero.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from minfer_jax.model.params import Params, Steering, rescaled


def with_control_vectors(
    params: Params,
    vectors: Sequence[Float[Array, "L D"]],
    scales: Sequence[float | Array] | None = None,
    layers: tuple[int, int] | None = None,
) -> Params:
    """The weights with these vectors in place of those that they had; they add up.

    It can be traced, and differentiated with respect to vectors and scales.

    Args:
        params: weights, shared with what is returned.
        vectors: each a direction for every layer, counted from 0, zeros where it has none.
        scales: of each; None for 1.
        layers: the first and the last layer that they count in; None for all.

    Raises:
        ValueError: a vector has another shape, the range is none of this model's layers, or there
            are more or fewer scales than vectors.
    """
    n_layer, width = len(params.order), params.token_embd.shape[1]
    first, last = (0, n_layer - 1) if layers is None else layers
    if not 0 <= first <= last < n_layer:
        raise ValueError(
            f"layers {first} to {last} are asked for, expected some of 0-{n_layer - 1}"
        )
    for vector in vectors:
        if vector.shape != (n_layer, width):
            raise ValueError(
                f"a control vector has shape {list(vector.shape)}, expected {[n_layer, width]}"
            )
    if not vectors:
        groups = [dataclasses.replace(stack, steering=None) for stack in params.groups]
        return dataclasses.replace(params, groups=tuple(groups))
    inside = (jnp.arange(n_layer) >= first) & (jnp.arange(n_layer) <= last)
    stacked = jnp.stack([jnp.asarray(vector, jnp.float32) for vector in vectors], axis=1)
    directions = jnp.where(inside[:, None, None], stacked, jnp.float32(0))  # L vectors D
    groups = []
    for number, stack in enumerate(params.groups):
        own = directions[jnp.asarray(params.layers_of(number))]
        steering = Steering(directions=own, scale=jnp.ones(own.shape[:2], jnp.float32))
        groups.append(dataclasses.replace(stack, steering=steering))
    params = dataclasses.replace(params, groups=tuple(groups))
    return with_control_scales(params, [1.0] * len(vectors) if scales is None else scales)


def with_control_scales(params: Params, scales: Sequence[float | Array]) -> Params:
    """The weights with other scales of their control vectors: data, nothing is compiled anew.

    Args:
        params: of `with_control_vectors`.
        scales: one for each of its vectors, in their order.

    Raises:
        ValueError: there are more or fewer scales than vectors.
    """
    return rescaled(params, Steering, scales, "control vectors")
