"""Speed of the kernels at the shapes of a 7B, against what the device can do.

A program holds many calls, each on another layer of a stack, so that no weight is still in a cache
of the device when it is read. Bytes are those of the packed weight, or of the keys and values.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minfer_jax.model.attention import attend
from minfer_jax.quant.cache import Cache
from minfer_jax.quant.matmul import Arithmetic, qmatmul
from minfer_jax.quant.qtensor import QTensor
from scripts.gpu_check import calls, clock, device, made, shapes
from scripts.gpu_check.made import Attention
from scripts.gpu_check.rows import MEASURED, REFUSED, Case, Row, Setting

STACK = 1 << 29  # bytes of a stack at least: ten times a large L2
CALLS = 64  # in a program, at most
DECODE = (
    ("Q4_K", "up", 1),
    ("Q4_K", "down", 1),
    ("Q4_K", "attn_output", 1),
    ("Q4_K", "qkv", 1),
    ("Q6_K", "output", 1),
    ("Q6_K", "down", 1),
    ("Q8_0", "down", 1),
    ("Q4_1", "down", 1),
    ("Q5_0", "down", 1),
    ("IQ4_XS", "down", 1),
    ("F16", "attn_output", 1),
    ("Q4_K", "down", 4),
    ("Q4_K", "down", 8),
)
PREFILL = (
    ("Q4_K", "up", 512),
    ("Q4_K", "down", 512),
    ("Q6_K", "down", 512),
    ("Q4_K", "attn_output", 512),
    ("Q8_0", "down", 512),
    ("Q4_K", "down", 2048),
    ("Q4_K", "down", 64),
)
# (heads, queries, slots, all of them filled)
ATTENTION = (
    ("Mistral 7B", 1, 4096),
    ("Mistral 7B", 1, 32768),
    ("Mistral 7B", 1, 512),
    ("Mistral 7B", 512, 512),
    ("Mistral 7B", 512, 4096),
    ("Gemma 3 270M", 1, 2048),
    ("SmolLM2", 1, 2048),
)
FLOAT, CACHE = "bfloat16", "float16"


def cases(setting: Setting) -> list[Case]:
    """Products of one row, then of many, then attention."""
    if setting.rehearse:
        return [
            _product_case("Q4_K", (48, 512), 1, setting),
            _product_case("Q4_K", (48, 512), 17, setting),
            _attention_case(shapes.TINY_HEADS, 1, 128, setting),
        ]
    products = [(name, shapes.MISTRAL_7B[of], rows) for name, of, rows in (*DECODE, *PREFILL)]
    return [
        *(_product_case(*case, setting) for case in products),
        *(_attention_case(shapes.HEADS[of], t, slots, setting) for of, t, slots in ATTENTION),
    ]


def _product_case(name: str, shape: tuple[int, int], rows: int, setting: Setting) -> Case:
    label = f"{name} {shapes.label(shape)} rows {rows}"
    return Case(name=label, run=functools.partial(_product, label, name, shape, rows, setting))


def _product(
    label: str, name: str, shape: tuple[int, int], rows: int, setting: Setting
) -> Iterable[Row]:
    stack = weights(name, shape, setting)
    x = jax.random.normal(made.key(1), (rows, shape[1]))
    dtype = FLOAT
    refusal = calls.product_refusal(rows, stack, dtype)
    kernel = functools.partial(calls.product, dtype=dtype, config=None, interpret=setting.rehearse)
    plain = functools.partial(qmatmul, arithmetic=Arithmetic(many=dtype, kernels="xla"))
    n_bytes, n_flop = made.nbytes(stack), 2 * rows * math.prod(shape)
    own = None if refusal else _seconds(of_layers(kernel, stack), x, stack)
    xla = _seconds(looped(plain, stack), x, stack) / n_layers(stack)
    yield _row(label, (own, xla), n_bytes, n_flop, refusal, setting)


def weights(name: str, shape: tuple[int, int], setting: Setting) -> QTensor:
    """A stack that no cache of the device holds."""
    one = made.nbytes(jax.eval_shape(lambda: made.weight(0, name, shape)))
    layers = 2 if setting.rehearse else max(4, min(CALLS, math.ceil(STACK / one)))
    return made.weight(0, name, shape, layers)


def of_layers(
    product: Callable[[Array, QTensor], Array], stack: QTensor
) -> Callable[[Array, QTensor], list[Array]]:
    """The products with all layers of such a stack, as one function."""

    @jax.jit  # traced and lowered once
    def of_layer(x: Array, stack: QTensor, layer: Array) -> Array:
        return product(x, stack.at(layer))

    def all_layers(x: Array, stack: QTensor) -> list[Array]:
        return [of_layer(x, stack, jnp.uint32(i)) for i in range(n_layers(stack))]

    return all_layers


def looped(
    product: Callable[[Array, QTensor], Array], stack: QTensor
) -> Callable[[Array, QTensor], list[Array]]:
    """As `of_layers`, in a loop: what is plain XLA takes long to compile."""

    def all_layers(x: Array, stack: QTensor) -> list[Array]:
        layers = jnp.arange(n_layers(stack), dtype=jnp.uint32)
        return [jax.lax.map(lambda i: product(x, stack.at(i)), layers)]

    return all_layers


def n_layers(stack: QTensor) -> int:
    """Of a stack."""
    return (stack.bits[0] if stack.dense is None else stack.dense).shape[0]


def _seconds(all_layers: Callable[..., list[Array]], *args: Any) -> float:
    """Of one result, when all of them are made in one program."""
    program = jax.jit(all_layers)
    return clock.seconds(program, *args) / len(program(*args))


def _attention_case(heads: made.Heads, t: int, slots: int, setting: Setting) -> Case:
    label = f"{heads.name}, {t} queries, {slots} slots, {CACHE}"
    run = functools.partial(_attention, label, heads, t, slots, setting)
    return Case(name=label, run=run)


def _attention(
    label: str, heads: made.Heads, t: int, slots: int, setting: Setting
) -> Iterable[Row]:
    given = caches(heads, t, slots, setting)
    dtype = factors(t)
    refusal = calls.attention_refusal(given)
    kernel = functools.partial(
        calls.attention,
        scoring=calls.scoring(heads, dtype),
        config=None,
        interpret=setting.rehearse,
    )
    plain = functools.partial(attend, scoring=calls.scoring(heads, dtype, kernels="xla"))
    n_bytes = sum(a.nbytes for a in jax.tree.leaves((given.k, given.v))) // _layers(given)
    seen = slots - (t - 1) / 2  # of each query, on average
    n_flop = round(4 * heads.n * heads.h * t * seen)
    own = None if refusal else _seconds(of_caches(kernel, given), *given.args())
    xla = _seconds(of_caches(plain, given), *given.args())
    yield _row(label, (own, xla), n_bytes, n_flop, refusal, setting)


def factors(t: int) -> str:
    """The type that t queries are rounded to, as the model has it."""
    return "float32" if t == 1 else FLOAT


def caches(heads: made.Heads, t: int, slots: int, setting: Setting) -> Attention:
    """Arguments with a stack of caches, all full, that no cache of the device holds."""
    layer = 2 * heads.k * heads.h * slots * 2
    layers = 2 if setting.rehearse else max(4, min(CALLS, math.ceil(STACK / layer)))
    return made.attention(heads, t=t, slots=slots, filled=slots, cache=CACHE, layers=layers)


def of_caches(attention: Callable[..., Array], given: Attention) -> Callable[..., list[Array]]:
    """Attention over the caches of all layers, as one function of the arguments of `attend`."""

    of_layer = jax.jit(attention)  # traced and lowered once

    def all_layers(q: Array, k: Cache, v: Cache, layer: Array, *rest: Array) -> list[Array]:
        return [of_layer(q, k, v, jnp.uint32(i), *rest) for i in range(_layers(given))]

    return all_layers


def _layers(given: Attention) -> int:
    return jax.tree.leaves(given.k)[0].shape[0]


def _row(
    label: str,
    measured: tuple[float | None, float],
    n_bytes: int,
    n_flop: int,
    refusal: str | None,
    setting: Setting,
) -> Row:
    """What was measured, with the larger of the two shares that it has of what the device can."""
    copy, dot = device.ceilings(setting)
    figures: dict[str, float | str] = {}
    for name, seconds in zip(("", "XLA "), measured, strict=True):
        if seconds is None:
            continue
        figures |= {
            f"{name}us": seconds * 1e6,
            f"{name}GB/s": n_bytes / seconds / 1e9,
            f"{name}TFLOP/s": n_flop / seconds / 1e12,
        }
        if not name:
            figures["of a copy"] = n_bytes / seconds / copy
            figures["of a product"] = n_flop / seconds / dot
    state = REFUSED if refusal else MEASURED
    return Row(name=label, state=state, figures=figures, note=refusal or "")
