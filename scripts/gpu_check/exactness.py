"""Every kernel against its plain form, over real shapes and all packed formats.

The error is the largest difference, over the root mean square of what is expected. Sums of float32
in another order differ by some 1e-6 of that, TF32 by 1e-3, factors of bfloat16 by 1e-2: so the
limits tell them apart.
"""

import functools
from collections.abc import Iterable, Iterator
from itertools import product

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minfer_jax.model.attention import attend
from minfer_jax.quant import xla
from scripts.gpu_check import calls, made, shapes
from scripts.gpu_check.made import BY_NAME, Heads
from scripts.gpu_check.rows import REFUSED, Case, Row, Setting, judged

LIMITS = {"float32": 2e-5, "bfloat16": 4e-2}
FEW, MANY = (1, 3, 8), (17, 512)  # rows of x
DECODED, PREFILLED = (1, 4, 8), (64, 512)  # queries

# What the models are made of; every other format follows at one shape.
USUAL: dict[str, dict[str, tuple[int, int]]] = {
    "Q4_K": shapes.MISTRAL_7B | shapes.ODD,
    "Q6_K": {name: shapes.MISTRAL_7B[name] for name in ("attn_output", "down", "output")},
    "Q4_1": shapes.SMOLLM2 | shapes.ODD,
    "Q8_0": {"up": shapes.SMOLLM2["up"], "output": shapes.GEMMA3["output"]} | shapes.ODD,
    "Q5_0": shapes.GEMMA3,
    "BF16": {"up": shapes.SMOLLM2["up"]},
}
# (heads, slots, filled, cache type, sequences, queries at the end that are padding)
ATTENTION = (
    ("Mistral 7B", 4096, 4096, "float16", 1, 0),
    ("SmolLM2", 2048, 1500, "float16", 1, 0),
    ("Gemma 3 270M", 2048, 2048, "float16", 1, 0),
    ("Gemma 3 270M, sliding", 1024, 3000, "float16", 1, 0),
    ("Mistral 7B", 4096, 2100, "q8_0", 1, 0),
    ("Mistral 7B", 4096, 600, "bfloat16", 2, 0),
    ("Mistral 7B", 4096, 600, "float32", 2, 1),
    ("gpt-oss, sliding", 640, 2000, "float16", 1, 1),
    ("Gemma 2 2B", 2048, 1000, "float16", 1, 0),
    ("Phi 3 mini", 2048, 1000, "float16", 1, 0),
)


def cases(setting: Setting) -> list[Case]:
    """The usual formats, attention, then all other formats."""
    if setting.rehearse:
        some = [("Q4_K", "tiny"), ("Q6_K", "tiny"), ("MXFP4", "tiny"), ("IQ2_XS", "tiny")]
        found = [_product_case(name, shapes.TINY[of], setting) for name, of in some]
        case = (shapes.TINY_HEADS, 128, 100, "float16", 1, 0)
        return [*found, _attention_case(*case, setting)]
    usual = [(name, shape) for name, of in USUAL.items() for shape in of.values()]
    others = [(n, shapes.MISTRAL_7B["attn_output"]) for n in BY_NAME if n not in USUAL]
    heads = [(shapes.HEADS[name], *rest) for name, *rest in ATTENTION]
    return [
        *(_product_case(*case, setting) for case in usual[:4]),
        *(_attention_case(*case, setting) for case in heads),
        *(_product_case(*case, setting) for case in [*usual[4:], *others]),
    ]


def _product_case(name: str, shape: tuple[int, int], setting: Setting) -> Case:
    label = f"{name} {shapes.label(shape)}"
    run = functools.partial(_product, label, name, shape, setting)
    return Case(name=label, run=run)


def _product(label: str, name: str, shape: tuple[int, int], setting: Setting) -> Iterable[Row]:
    stack = made.weight(0, name, shape, layers=2)
    w = stack.at(1)
    x = jax.random.normal(jax.random.key(1), ((FEW if setting.rehearse else MANY)[-1], shape[1]))
    plain = jax.jit(xla.dequantize, static_argnums=1)
    for dtype in ("float32", "bfloat16"):
        factor = plain(w, jnp.dtype(dtype))
        for rows in _rows(dtype, setting):
            found = f"{label} rows {rows} {dtype}"
            if (why := calls.product_refusal(rows, w, dtype)) is not None:
                yield Row(name=found, state=REFUSED, note=why)
                continue
            some = x[:rows]
            expected = jax.jit(xla.dot)(some.astype(dtype), factor)
            kernel = jax.jit(calls.product, static_argnames=("dtype", "config", "interpret"))
            got = kernel(some, w, dtype=dtype, config=None, interpret=setting.rehearse)
            yield judged(found, error(got, expected), LIMITS[dtype])


def _rows(dtype: str, setting: Setting) -> Iterator[int]:
    """Few rows are always of float32."""
    few, many = ((1, 3), (17,)) if setting.rehearse else (FEW, MANY)
    yield from few if dtype == "float32" else ()
    yield from many


def _attention_case(
    heads: Heads,
    slots: int,
    filled: int,
    cache: str,
    batch: int,
    padding: int,
    setting: Setting,
) -> Case:
    label = f"{heads.name}, {slots} slots, {filled} filled, {cache}, batch {batch}"
    run = functools.partial(_attention, label, heads, slots, filled, cache, batch, padding, setting)
    return Case(name=label, run=run)


def _attention(
    label: str,
    heads: Heads,
    slots: int,
    filled: int,
    cache: str,
    batch: int,
    padding: int,
    setting: Setting,
) -> Iterable[Row]:
    few, many = ((1, 4), (17,)) if setting.rehearse else (DECODED, PREFILLED)
    wanted = [*product(few, ("float32",)), *product(many, LIMITS)]
    for t, dtype in wanted:
        found = f"{label}, T {t}, {dtype}"
        given = made.attention(
            heads,
            t=t,
            slots=slots,
            filled=filled,
            cache=cache,
            batch=batch,
            padding=padding if t > 1 else 0,
        )
        scoring = calls.scoring(heads, dtype)
        if (why := calls.attention_refusal(given)) is not None:
            yield Row(name=found, state=REFUSED, note=why)
            continue
        plain = calls.scoring(heads, dtype, kernels="xla")
        expected = jax.jit(attend, static_argnums=7)(*given.args(), plain)
        kernel = jax.jit(calls.attention, static_argnames=("scoring", "config", "interpret"))
        got = kernel(*given.args(), scoring=scoring, config=None, interpret=setting.rehearse)
        yield judged(found, error(got, expected), LIMITS[dtype])


@jax.jit
def _difference(got: Array, expected: Array) -> Array:
    return jnp.abs(got - expected).max() / jnp.sqrt(jnp.square(expected).mean())


def error(got: Array, expected: Array) -> float:
    """The largest difference over the root mean square of what is expected."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(
            f"got {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"
        )
    return float(_difference(got, expected))
