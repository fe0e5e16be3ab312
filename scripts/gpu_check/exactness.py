"""Every kernel against its plain form, over real shapes and all packed formats.

The error is the largest difference, over the root mean square of what is expected. Sums of float32
in another order differ by some 1e-5 of that, and would by 1e-3 if a factor were TF32. Factors of
bfloat16 are the same on both sides, but for attention's weights, which the running softmax scales.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minfer_jax.model.attention import Scoring, attend
from minfer_jax.quant import xla
from minfer_jax.quant.qtensor import QTensor
from scripts.gpu_check import calls, made, shapes
from scripts.gpu_check.failures import attempted
from scripts.gpu_check.made import BY_NAME, Attention, Heads
from scripts.gpu_check.rows import REFUSED, Case, Row, Setting, judged

PRODUCT_LIMITS = {"float32": 1e-4, "bfloat16": 2e-3}
ATTENTION_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}  # its weights are rounded
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


@dataclass(frozen=True, kw_only=True)
class Given:
    """Of `made.attention`; padding only where there are several queries."""

    heads: Heads
    slots: int
    filled: int
    cache: str
    batch: int = 1
    padding: int = 0


_7B, _OSS = shapes.HEADS["Mistral 7B"], shapes.HEADS["gpt-oss, sliding"]
_GEMMA, _SLIDING = shapes.HEADS["Gemma 3 270M"], shapes.HEADS["Gemma 3 270M, sliding"]
ATTENTION = (
    Given(heads=_7B, slots=4096, filled=4096, cache="float16"),
    Given(heads=shapes.HEADS["SmolLM2"], slots=2048, filled=1500, cache="float16"),
    Given(heads=_GEMMA, slots=2048, filled=2048, cache="float16"),
    Given(heads=_SLIDING, slots=1024, filled=3000, cache="float16"),
    Given(heads=_7B, slots=4096, filled=2100, cache="q8_0"),
    Given(heads=_7B, slots=4096, filled=600, cache="bfloat16", batch=2),
    Given(heads=_7B, slots=4096, filled=600, cache="float32", batch=2, padding=1),
    Given(heads=_OSS, slots=640, filled=2000, cache="float16", padding=1),
    Given(heads=shapes.HEADS["Gemma 2 2B"], slots=2048, filled=1000, cache="float16"),
    Given(heads=shapes.HEADS["Phi 3 mini"], slots=2048, filled=1000, cache="float16"),
)


def cases(setting: Setting) -> list[Case]:
    """The usual formats, attention, then all other formats."""
    if setting.rehearse:
        some = [("Q4_K", "tiny"), ("Q6_K", "tiny"), ("MXFP4", "tiny"), ("IQ2_XS", "tiny")]
        found = [_product_case(name, shapes.TINY[of], setting) for name, of in some]
        given = Given(heads=shapes.TINY_HEADS, slots=128, filled=100, cache="float16")
        return [*found, _attention_case(given, setting)]
    usual = [(name, shape) for name, of in USUAL.items() for shape in of.values()]
    others = [(n, shapes.MISTRAL_7B["attn_output"]) for n in BY_NAME if n not in USUAL]
    return [
        *(_product_case(*case, setting) for case in usual[:4]),
        *(_attention_case(given, setting) for given in ATTENTION),
        *(_product_case(*case, setting) for case in [*usual[4:], *others]),
    ]


def _product_case(name: str, shape: tuple[int, int], setting: Setting) -> Case:
    label = f"{name} {shapes.label(shape)}"
    run = functools.partial(_product, label, name, shape, setting)
    return Case(name=label, run=run)


def _product(label: str, name: str, shape: tuple[int, int], setting: Setting) -> Iterable[Row]:
    stack = made.weight(0, name, shape, layers=2)
    w = stack.at(1)
    few, many = ((1, 3), (17,)) if setting.rehearse else (FEW, MANY)
    x = jax.random.normal(made.key(1), (max(many), shape[1]))
    plain = jax.jit(xla.dequantize, static_argnums=1)
    for dtype in ("float32", "bfloat16"):
        factor = plain(w, jnp.dtype(dtype))
        for rows in (*few, *many) if dtype == "float32" else many:
            found = f"{label} rows {rows} {dtype}"
            if (why := calls.product_refusal(rows, w, dtype)) is not None:
                yield Row(name=found, state=REFUSED, note=why)
                continue
            run = functools.partial(_product_row, found, x[:rows], w, factor, dtype, setting)
            yield attempted(found, run)


def _product_row(
    name: str, x: Array, w: QTensor, factor: Array, dtype: str, setting: Setting
) -> Row:
    expected = jax.jit(xla.dot)(x.astype(dtype), factor)
    kernel = jax.jit(calls.product, static_argnames=("dtype", "config", "interpret"))
    got = kernel(x, w, dtype=dtype, config=None, interpret=setting.rehearse)
    return judged(name, error(got, expected), PRODUCT_LIMITS[dtype])


def _attention_case(case: Given, setting: Setting) -> Case:
    label = (
        f"{case.heads.name}, {case.filled} in {case.slots} slots, {case.cache}, batch {case.batch}"
    )
    return Case(name=label, run=functools.partial(_attention, label, case, setting))


def _attention(label: str, case: Given, setting: Setting) -> Iterable[Row]:
    few, many = ((1, 4), (17,)) if setting.rehearse else (DECODED, PREFILLED)
    heads = case.heads
    some = [
        *product(few, ("float32",)),
        *product(few[1:], ("bfloat16",)),
        *product(many, ATTENTION_LIMITS),
    ]
    for t, dtype in some:
        found = f"{label}, T {t}, {dtype}"
        given = made.attention(
            heads,
            t=t,
            slots=case.slots,
            filled=case.filled,
            cache=case.cache,
            batch=case.batch,
            padding=case.padding if t > 1 else 0,
        )
        scoring = calls.scoring(heads, dtype)
        if (why := calls.attention_refusal(given)) is not None:
            yield Row(name=found, state=REFUSED, note=why)
            continue
        yield attempted(found, functools.partial(_attention_row, found, given, scoring, setting))


def _attention_row(name: str, given: Attention, scoring: Scoring, setting: Setting) -> Row:
    plain = replace(scoring, kernels="xla")
    expected = jax.jit(attend, static_argnums=7)(*given.args(), plain)
    kernel = jax.jit(calls.attention, static_argnames=("scoring", "config", "interpret"))
    got = kernel(*given.args(), scoring=scoring, config=None, interpret=setting.rehearse)
    return judged(name, error(got, expected), ATTENTION_LIMITS[scoring.dtype])


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
