"""The model as one pure function."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.model import kv_state as kv
from minfer_jax.model.block import Place, can_step, mix, step, store
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.layers import adapted_rows, linear
from minfer_jax.model.names import OF_LAYERS
from minfer_jax.model.params import LayerParams, Params, pick
from minfer_jax.model.tap import Kept, Tap, Values, normed
from minfer_jax.quant import xla
from minfer_jax.quant.cache import Cache, Q8Cache
from minfer_jax.quant.prologue import rms_norm

# x, keys, values, and what a tap keeps
_Carry = tuple[Array, tuple[Cache, Cache], tuple[Cache, Cache], Kept]
Index = int | Array


def forward(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
    n_out: int = 1,
    stepwise: bool = False,
    differentiable: bool = False,
) -> tuple[Float[Array, "B n_out V"], KVState]:
    """Run T tokens of B sequences through the model.

    Positions are data: they choose the KV slots that are written, the causal mask and the RoPE
    angle. A row at position -1 is padding: it is written nowhere and seen by nothing.

    Args:
        params: weights.
        token_ids: int32, each in [0, V).
        positions: int32, each in [0, n_ctx) or -1; consecutive within a sequence,
            padding last.
        kv_state: what earlier calls wrote. Donate it under jit.
        cfg: static.
        n_out: static; logits are wanted for this many rows, counted back from each sequence's last
            real one (where there are fewer, the first is repeated). 0 only fills the cache; T means
            all rows as they stand, padding included.
        stepwise: static; give the numbers that the tokens one by one would, as far as that can be
            had for a few rows: attention goes position by position, nothing is rounded as in a
            prefill. With the kernels they are the same to the bit, up to 16 rows. n_out must be T.
        differentiable: static; loop over the layers in a form that reverse-mode differentiation
            can follow. The numbers are the same, but XLA copies the cache in every layer.

    Returns:
        (float32 logits, the new KV state).

    Raises:
        ValueError: T or n_out does not fit, see the message.
    """
    logits, kv_state, _ = _forward(
        *(params, token_ids, positions, kv_state, None),
        cfg=cfg,
        n_out=n_out,
        stepwise=stepwise,
        differentiable=differentiable,
    )
    return logits, kv_state


def forward_tapped(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    tap: Tap,
    *,
    cfg: ModelConfig,
    differentiable: bool = False,
) -> tuple[Float[Array, "B T V"], KVState, Kept]:
    """`forward` with n_out = T, each value by its name: what the tap changes, and what it keeps.

    No two steps are done as one here, and attention goes through all of its scores where the tap
    wants them: the numbers are those of `forward` but for rounding.

    Args:
        params, token_ids, positions, kv_state, cfg, differentiable: as for `forward`.
        tap: made for these shapes.

    Returns:
        (logits, the new KV state, stacks of what was kept).
    """
    return _forward(
        *(params, token_ids, positions, kv_state, tap),
        cfg=cfg,
        n_out=token_ids.shape[1],
        stepwise=False,
        differentiable=differentiable,
    )


def _forward(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    tap: Tap | None,
    *,
    cfg: ModelConfig,
    n_out: int,
    stepwise: bool,
    differentiable: bool,
) -> tuple[Float[Array, "B n_out V"], KVState, Kept]:
    """Both of the above."""
    if stepwise:
        exact = dataclasses.replace(cfg.arithmetic, many="float32")
        cfg = dataclasses.replace(cfg, arithmetic=exact)
    n_batch, n_ctx = kv_state.positions[kv.FULL].shape
    if token_ids.ndim != 2 or token_ids.shape != positions.shape:
        raise ValueError(f"{token_ids.shape=} and {positions.shape=} must be equal, [B, T]")
    if token_ids.shape[0] != n_batch:
        raise ValueError(f"B={token_ids.shape[0]} sequences, but the KV state has {n_batch}")
    t = token_ids.shape[1]
    ring = kv_state.positions[kv.SLIDING].shape[1]
    if not 0 <= n_out <= t:
        raise ValueError(f"n_out is {n_out}, expected 0 to T={t}")
    if t > n_ctx:
        raise ValueError(
            f"T={t} tokens do not fit the KV state of {n_ctx} slots; split them or raise n_ctx"
        )
    if cfg.window and ring < n_ctx and t > ring - cfg.window:
        raise ValueError(
            f"T={t} tokens would overwrite keys that sliding layers still need; give at most "
            f"{ring - cfg.window} at a time, or make the KV state with chunk={t}"
        )
    if differentiable and isinstance(kv_state.k[kv.FULL], Q8Cache):
        raise ValueError("a q8_0 cache has no derivative; choose another cache_dtype")
    slots = [kv.slots_of(positions, held.shape[1]) for held in kv_state.positions]
    held = [
        kv.write_positions(h, positions, s) for h, s in zip(kv_state.positions, slots, strict=True)
    ]

    def place(spec: LayerSpec, layer: Index, values: Values | None = None) -> Place:
        kind, rope = kv.kind(spec), cfg.rope_of(spec, n_ctx)
        return Place(
            spec=spec,
            layer=jnp.asarray(layer, jnp.uint32),
            positions=positions,
            slots=slots[kind],
            held=held[kind],
            rope=rope,
            freq=None if rope is None else params.rope[rope],
            tap=values,
        )

    def half(
        carry: _Carry, spec: LayerSpec, p: LayerParams, layer: Index, values: Values | None = None
    ) -> tuple[tuple, _Carry]:
        """The queries (and gate) of a block, and the carry with its keys and values stored."""
        x, k, v, kept = carry
        kind = kv.kind(spec)
        q, k_cache, v_cache = store(x, p, k[kind], v[kind], place(spec, layer, values), cfg)
        return q, (x, _replace(k, kind, k_cache), _replace(v, kind, v_cache), kept)

    def run(
        carry: _Carry,
        spec: LayerSpec,
        p: LayerParams,
        layer: Index,
        number: Index = 0,
        rows: Int[Array, "B R"] | None = None,
    ) -> _Carry:
        """The carry after block `number` of all, whose cache is number `layer` of its kind."""
        kind = kv.kind(spec)
        fused = not differentiable and tap is None
        if (t == 1 or stepwise) and rows is None and can_step(p, cfg) and fused:
            x, k, v, kept = carry
            x, *new = step(x, p, k[kind], v[kind], place(spec, layer), cfg)
            return x, _replace(k, kind, new[0]), _replace(v, kind, new[1]), kept
        values = None if tap is None else Values(tap, jnp.asarray(number, jnp.uint32), carry[3])
        q, (x, k, v, kept) = half(carry, spec, p, layer, values)
        x = mix(x, q, p, k[kind], v[kind], place(spec, layer, values), cfg, rows)
        return x, k, v, kept if values is None else values.kept

    x = xla.rows(params.token_embd, token_ids.reshape(-1)).reshape(*token_ids.shape, cfg.n_embd)
    if params.embd_lora is not None:
        x = x + adapted_rows(token_ids, params.embd_lora)
    x = x * jnp.float32(cfg.embedding_scale)
    if cfg.embedding_norm:
        x = rms_norm(x, jnp.ones(cfg.n_embd, jnp.float32), cfg.norm_eps)
    outside = None if tap is None else Values(tap, None, {})
    if outside is not None:
        x = outside("embd", x)
    carry = (x, kv_state.k, kv_state.v, {} if tap is None else tap.stacks(OF_LAYERS))
    loop = partial(_layers, numbered=tap is not None, differentiable=differentiable)
    if n_out == t:
        carry = loop(carry, params, cfg, cfg.n_layer, run)
    else:
        carry = loop(carry, params, cfg, cfg.n_layer - 1, run)
        group, index = params.order[-1]
        last = (cfg.layers[-1], pick(params.groups[group], index), kv.in_kind(cfg)[-1])
        if n_out == 0:
            _, (_, k, v, kept) = half(carry, *last)
            logits = jnp.zeros((token_ids.shape[0], 0, cfg.n_vocab), jnp.float32)
            return logits, KVState(k=k, v=v, positions=(held[0], held[1])), kept
        carry = run(carry, *last, rows=_last_rows(positions, n_out))

    x, k, v, kept = carry
    logits = head(x, params, cfg, outside)
    if outside is not None:
        kept = {**kept, **outside.kept}
    return logits, KVState(k=k, v=v, positions=(held[0], held[1])), kept


def head(
    x: Float[Array, "B T D"], params: Params, cfg: ModelConfig, outside: Values | None = None
) -> Float[Array, "B T V"]:
    """The logits of rows of the residual stream.

    Args:
        x: what the last layer gives.
        params: weights.
        cfg: static.
        outside: where the values that belong to no layer are named; None for nowhere.
    """
    x, norm = normed(outside, "output_norm", x, params.output_norm)
    logits = linear(x, params.output, cfg.arithmetic, norm)
    if cfg.logit_scale != 1.0:
        logits = logits * jnp.float32(cfg.logit_scale)
    if cfg.final_softcap:
        logits = cfg.final_softcap * jnp.tanh(logits / cfg.final_softcap)
    return logits if outside is None else outside("logits", logits)


def _layers(
    carry: _Carry,
    params: Params,
    cfg: ModelConfig,
    count: int,
    run: Callable[..., _Carry],
    *,
    numbered: bool,
    differentiable: bool,
) -> _Carry:
    """The first `count` layers, one by one or in a loop whose body holds each group once.

    In the body each group sits in an inner loop of one turn or none. A conditional says the same,
    and can be differentiated; but XLA copies the whole cache around a conditional, and updates it
    in place through a loop. The barrier ties the weights to x: XLA would hoist their unpacking out
    of the inner loop otherwise. (Where it stands, reverse mode keeps all weights once a layer.) If
    `numbered`, `run` is told each layer's number too.
    """
    specs = {group: spec for (group, _), spec in zip(params.order, cfg.layers, strict=True)}
    order = params.order[:count]
    if not order:
        return carry
    places = list(enumerate(zip(order, kv.in_kind(cfg), strict=False)))
    if cfg.unrolled:
        for number, ((group, index), in_kind) in places:
            p = pick(params.groups[group], index)
            carry = run(carry, specs[group], p, in_kind, number)
        return carry
    present = sorted({group for group, _ in order})
    # A row a layer: its index in its group, its index in its kind, its group, perhaps its number.
    # Unsigned, or every use would check for a negative index first.
    columns = 4 if numbered else 3
    table = [(i, in_kind, present.index(g), n)[:columns] for n, ((g, i), in_kind) in places]
    table = jnp.asarray(table, jnp.uint32)

    def one(number: int, carry: _Carry, row: Array) -> _Carry:
        group = present[number]
        x, stack = carry[0], params.groups[group]
        if not differentiable:
            x, stack, row = lax.optimization_barrier((x, stack, row))
        index, in_kind = (lax.index_in_dim(row, i, keepdims=False) for i in (0, 1))
        where = (in_kind, row[3]) if numbered else (in_kind,)
        return run((x, *carry[1:]), specs[group], pick(stack, index), *where)

    def turn(number: int, carry: _Carry, row: Array) -> _Carry:
        """`one`, if it is the group's turn."""

        def is_due(looped: tuple[Array, _Carry]) -> Array:
            return (looped[0] == 0) & (row[2] == number)

        def once(looped: tuple[Array, _Carry]) -> tuple[Array, _Carry]:
            return looped[0] + 1, one(number, looped[1], row)

        return lax.while_loop(is_due, once, (jnp.uint32(0), carry))[1]

    def body(carry: _Carry, row: Array) -> tuple[_Carry, None]:
        if len(present) == 1:
            return one(0, carry, row), None
        if differentiable:
            branches = [partial(one, n) for n in range(len(present))]
            return lax.switch(row[2].astype(jnp.int32), branches, carry, row), None
        for number in range(len(present)):
            carry = turn(number, carry, row)
        return carry, None

    return lax.scan(body, carry, table)[0]


def _replace(pair: tuple[Cache, Cache], at: int, new: Cache) -> tuple[Cache, Cache]:
    return (new, pair[1]) if at == 0 else (pair[0], new)


def _last_rows(positions: Int[Array, "B T"], n_out: int) -> Int[Array, "B n_out"]:
    """Indices of the last n_out real rows: data, so that padding never changes a shape."""
    last = jnp.argmax(positions, axis=1).astype(jnp.int32)
    return jnp.maximum(last[:, None] + jnp.arange(1 - n_out, 1, dtype=jnp.int32)[None], 0)
