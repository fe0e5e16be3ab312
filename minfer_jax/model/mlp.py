"""The second sub-layer of a block: an MLP, or a mixture of many."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.layers import added, linear, side_by_side
from minfer_jax.model.moe import route
from minfer_jax.model.params import ExpertLinear, Experts, Mlp
from minfer_jax.model.tap import Values
from minfer_jax.quant.experts import expert_product
from minfer_jax.quant.matmul import EXACT
from minfer_jax.quant.prologue import Activation, Gate, Norm, applied


def mlp(
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    norm: Norm | None,
    p: Mlp | Experts,
    cfg: ModelConfig,
    *,
    post: Norm | None,
    plus: Float[Array, "B T D"],
    tap: Values | None = None,
) -> Float[Array, "B T D"]:
    """post(the sub-layer of norm(x)) * cfg.residual_scale + plus.

    Args:
        x: residual stream, float32.
        positions: -1 for padding, which uses no expert.
        norm: of x, or None.
        p: weights.
        cfg: the model.
        post: norm of the result, or None.
        plus: the residual that it is added to.
        tap: see `Place`.
    """
    if isinstance(p, Mlp):
        return _dense(x, norm, p, cfg, post, plus, tap)
    y = _experts(applied(x, norm), positions, p, cfg, tap)
    if tap is not None:
        y = tap("down", y)
    y = applied(y, post)
    if tap is not None and post is not None:
        y = tap("ffn_post_norm", y)
    return y * jnp.float32(cfg.residual_scale) + plus


def _dense(
    x: Array,
    norm: Norm | None,
    p: Mlp,
    cfg: ModelConfig,
    post: Norm | None,
    plus: Array | None,
    tap: Values | None,
) -> Float[Array, "B T D"]:
    act = Gate(cfg.activation) if p.gated else Activation(cfg.activation)
    up = side_by_side(x, p.up, cfg.arithmetic, norm)
    if tap is not None:
        up, act = _activated(up, act, tap), None
    return added(
        up,
        p.down,
        cfg.arithmetic,
        act,
        post=post,
        times=1.0 if plus is None else cfg.residual_scale,
        plus=plus,
        tap=tap,
        names=("down", "ffn_post_norm"),
    )


def _activated(
    x: Float[Array, "... width"], act: Gate | Activation, tap: Values
) -> Float[Array, "... F"]:
    """What an activation or a gate makes of x, and the parts of x, each by its name."""
    if isinstance(act, Gate):
        gate, up = jnp.split(x, 2, axis=-1)
        x = jnp.concatenate([tap("gate", gate), tap("up", up)], axis=-1)
    else:
        x = tap("up", x)
    return tap("ffn_act", applied(x, act))


def _experts(
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    p: Experts,
    cfg: ModelConfig,
    tap: Values | None,
) -> Float[Array, "B T D"]:
    """The weighted sum of the experts that each row uses (Shazeer et al. 2017)."""
    router = cfg.router
    assert router is not None
    # It makes a choice, of which small errors make another.
    exact = dataclasses.replace(EXACT, kernels=cfg.arithmetic.kernels)
    logits = linear(x, p.router, exact)
    if tap is not None:
        logits = tap("router", logits)
    rows = x.reshape(-1, x.shape[-1])  # M D
    chosen, weights = route(
        logits.reshape(len(rows), -1),
        router.n_used,
        gating=router.gating,
        normalize=router.normalize,
        scale=router.scale,
        bias=p.choice_bias,
    )  # M U
    chosen = jnp.where(positions.reshape(-1, 1) < 0, -1, chosen)
    if tap is not None:
        b, t = positions.shape
        chosen = tap("experts", chosen.reshape(b, t, -1)).reshape(chosen.shape)
        chosen = jnp.clip(chosen, -1, router.n_expert - 1)  # whatever a patch says
        weights = tap("expert_weights", weights.reshape(b, t, -1)).reshape(weights.shape)
    pairs = chosen.reshape(-1)  # P = M U
    up = [_expert_map(rows, pairs, each, cfg) for each in p.up]
    both = up[0] if len(up) == 1 else jnp.concatenate(up, axis=-1)
    act = Gate(cfg.activation)
    if tap is not None:
        both = both.reshape(*positions.shape, router.n_used, -1)  # B T U 2F
        both, act = _activated(both, act, tap).reshape(len(pairs), -1), None
    y = _expert_map(both, pairs, p.down, cfg, act)
    y = y.reshape(*chosen.shape, -1)  # M U D
    # Where there is no expert, a bias is added all the same: the weight takes it out again.
    total = jnp.sum(y * jnp.where(chosen < 0, 0.0, weights)[:, :, None], axis=1).reshape(x.shape)
    if p.shared is None:
        return total
    shared = _dense(x, None, p.shared, cfg, None, None, None)
    if p.shared_gate is not None:
        gate = jnp.sum(x * p.shared_gate[None, None], axis=-1, keepdims=True)
        shared = shared * jax.nn.sigmoid(gate)
    if tap is not None:
        shared = tap("shared", shared)
    return total + shared


def _expert_map(
    x: Float[Array, "R K"],
    experts: Int[Array, " P"],
    p: ExpertLinear,
    cfg: ModelConfig,
    gate: Gate | None = None,
) -> Float[Array, "P N"]:
    """The map of each row's expert, its scale and bias."""
    y = expert_product(x, p.weight, experts, cfg.arithmetic, gate=gate)
    own = jnp.maximum(experts, 0)
    if p.scale is not None:
        y = y * p.scale[own][:, None]
    if p.bias is not None:
        y = y + p.bias[own]
    return y
