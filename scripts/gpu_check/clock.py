"""Times of compiled programs, and the device's own ceilings."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from scripts.gpu_check import made

REPEATS = 5  # the median counts
LEAST = 0.02  # seconds of work that one measurement takes


def seconds(
    program: Callable, *args: object, repeats: int = REPEATS, least: float = LEAST
) -> float:
    """Seconds that one call takes on the device.

    Calls are sent off one after another and waited for together, so that what the host does for a
    call is hidden behind the one before, as it is in a model's decode.

    Args:
        program: compiled; its results are dropped.
        *args: its arguments, on the device.
        repeats: measurements, of which the median is taken.
        least: seconds that one measurement lasts; it decides the calls in it.
    """
    jax.block_until_ready(program(*args))
    once = _timed(program, args, 2) / 2
    calls = max(1, min(200, int(least / max(once, 1e-6))))
    return statistics.median(_timed(program, args, calls) / calls for _ in range(repeats))


def _timed(program: Callable, args: tuple, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        out = program(*args)
    jax.block_until_ready(out)  # pyright: ignore[reportPossiblyUnboundVariable]
    return time.perf_counter() - begin


@functools.cache
def copy_rate(n_bytes: int) -> float:
    """Bytes a second of a copy on the device, those read and those written."""
    source = jax.random.bits(made.key(0), (n_bytes // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    return 2 * source.nbytes / seconds(copy, source)


@functools.cache
def product_rate(size: int) -> float:
    """FLOP a second of a square product of bfloat16, summed in float32."""
    keys = jax.random.split(made.key(1))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    dot = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.bfloat16))
    return 2 * size**3 / seconds(dot, a, b)
