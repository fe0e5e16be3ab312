"""Better block sizes, for the table that the package reads: blocks.json.

From the sizes in use, each is halved and doubled; from the fastest that is still right it goes on,
until none is better. What is compared is compiled side by side, and timed one after another.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

from minfer_jax import whole_file
from minfer_jax.pallas import blocks
from scripts.gpu_check import calls, clock, made, shapes, speeds
from scripts.gpu_check.calls import Chosen
from scripts.gpu_check.exactness import ATTENTION_LIMITS, error
from scripts.gpu_check.made import Heads
from scripts.gpu_check.rows import MEASURED, REFUSED, Case, Row, Setting

PRODUCTS = (
    ("Q4_K", "up", 1),
    ("Q4_K", "down", 1),
    ("Q4_K", "attn_output", 1),
    ("Q4_K", "qkv", 1),
    ("Q4_K", "up", 512),
    ("Q4_K", "down", 512),
    ("Q6_K", "output", 1),
    ("Q6_K", "down", 1),
    ("Q6_K", "down", 512),
    ("Q8_0", "down", 1),
    ("Q8_0", "down", 512),
)
ATTENTION = (("Mistral 7B", 1, 4096), ("Mistral 7B", 512, 4096), ("SmolLM2", 1, 2048))
ROUNDS = 4  # of going on from the best
GAIN = 0.97  # of the time: less is noise
THREADS = 8  # that compile

Program = Callable[[], list[Array]]  # a result a layer


def cases(setting: Setting) -> list[Case]:
    """The products of a 7B, then attention."""
    if setting.rehearse:
        return [_product_case("Q4_K", shapes.TINY["tiny"], 1, setting)]
    products = [(name, shapes.MISTRAL_7B[of], rows) for name, of, rows in PRODUCTS]
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
    stack, dtype = speeds.weights(name, shape, setting), speeds.FLOAT
    if (why := calls.product_refusal(rows, stack, dtype)) is not None:
        yield Row(name=label, state=REFUSED, note=why)
        return
    x = jax.random.normal(made.key(1), (rows, shape[1]))

    def compiled(config: Any) -> Program:
        one = functools.partial(
            calls.product, dtype=dtype, config=config, interpret=setting.rehearse
        )
        program = jax.jit(speeds.of_layers(one, stack)).lower(x, stack).compile()
        return functools.partial(program, x, stack)

    yield _tuned(label, calls.product_kernel(rows, stack, dtype), compiled, setting)


def _attention_case(heads: Heads, t: int, slots: int, setting: Setting) -> Case:
    label = f"{heads.name}, {t} queries, {slots} slots, {speeds.CACHE}"
    return Case(name=label, run=functools.partial(_attention, label, heads, t, slots, setting))


def _attention(label: str, heads: Heads, t: int, slots: int, setting: Setting) -> Iterable[Row]:
    given = speeds.caches(heads, t, slots, setting)
    scoring = calls.scoring(heads, speeds.factors(t))
    if (why := calls.attention_refusal(given)) is not None:
        yield Row(name=label, state=REFUSED, note=why)
        return

    def compiled(config: Any) -> Program:
        one = functools.partial(
            calls.attention, scoring=scoring, config=config, interpret=setting.rehearse
        )
        program = jax.jit(speeds.of_caches(one, given)).lower(*given.args()).compile()
        return functools.partial(program, *given.args())

    yield _tuned(label, calls.attention_kernel(given, scoring), compiled, setting)


def _tuned(label: str, chosen: Chosen, compiled: Callable[[Any], Program], setting: Setting) -> Row:
    """Look for better sizes and write down what was found."""
    start = blocks.chosen(chosen.kernel, chosen.case, chosen.default)
    rounds = 1 if setting.rehearse else ROUNDS
    best, before, after, tried = descend(start, compiled, rounds, setting.until)
    entry = {
        name: value
        for name, value in dataclasses.asdict(best).items()
        if value != getattr(chosen.default, name)
    }
    device = jax.devices()[0].device_kind
    for path in setting.blocks:
        put(path, device, chosen.kernel, chosen.case, entry)
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(best).items())
    figures = {"us before": before * 1e6, "us after": after * 1e6, "tried": tried}
    note = f"{chosen.kernel}, {chosen.case}: {sizes}"
    return Row(name=label, state=MEASURED, figures=figures, note=note)


def descend(
    start: Any, compiled: Callable[[Any], Program], rounds: int, until: float
) -> tuple[Any, float, float, int]:
    """The best Config near one.

    Args:
        start: where to begin; it must work.
        compiled: what runs a Config. One that cannot be compiled, or run, is left out, and one
            whose result is not that of `start`.
        rounds: how often to go on from the best.
        until: seconds since the epoch at which the last round must have begun.

    Returns:
        (the best Config, seconds of one layer with `start`, and with the best, how many were
        tried).
    """
    program = compiled(start)
    expected = program()[0]
    before = after = clock.seconds(program) / len(program())
    best, seen = start, {start}
    for _ in range(rounds):
        if time.time() >= until:
            break
        fresh = [config for config in neighbours(best) if config not in seen]
        seen.update(fresh)
        with ThreadPoolExecutor(THREADS) as pool:
            programs = list(pool.map(functools.partial(_or_none, compiled), fresh))
        least, better = after * GAIN, None
        for config, program in zip(fresh, programs, strict=True):
            seconds = None if program is None else _seconds(program, expected)
            if seconds is not None and seconds < least:
                least, better = seconds, config
        if better is None:
            break
        best, after = better, least
    return best, before, after, len(seen)


def neighbours(config: Any) -> list[Any]:
    """The same with one size halved or doubled."""
    found = []
    for name, value in dataclasses.asdict(config).items():
        halved = [value // 2] if value > 1 else []
        found += [dataclasses.replace(config, **{name: v}) for v in [*halved, value * 2]]
    return found


def _or_none(compiled: Callable[[Any], Program], config: Any) -> Program | None:
    try:
        return compiled(config)
    except Exception:  # noqa: BLE001  sizes that are refused, at whatever stage, are none
        return None


def _seconds(program: Program, expected: Array) -> float | None:
    """Seconds of one layer; None where it does not run, or is wrong."""
    try:
        results = program()
        right = error(results[0], expected) <= ATTENTION_LIMITS["bfloat16"]
        return clock.seconds(program, repeats=3) / len(results) if right else None
    except jax.errors.JaxRuntimeError:
        return None


def put(path: Path, device: str, kernel: str, case: str, entry: dict[str, int]) -> None:
    """Write an entry into a table, or take it out where it says nothing."""
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    of_kernel = table.setdefault(device, {}).setdefault(kernel, {})
    of_kernel.pop(case, None)
    if entry:
        of_kernel[case] = entry
    with whole_file.replacing(path, durable=False) as file:
        file.write((json.dumps(table, indent=1, sort_keys=True) + "\n").encode("utf-8"))
