"""The shape-specialised compile benchmark: what each of an engine's programs costs to make."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from minfer_jax.bench_table import Columns
from minfer_jax.compile_cache import EVERYTHING
from minfer_jax.programs import Recipe

COLUMNS: Columns = {
    "program": lambda row: row["program"],
    "trace s": lambda row: _seconds(row["trace_seconds"]),
    "lower s": lambda row: _seconds(row["lower_seconds"]),
    "compile s": lambda row: _seconds(row["compile_seconds"]),
    "cache hit s": lambda row: _seconds(row["cached_seconds"]),
    "HLO": lambda row: str(row["hlo_instructions"]),
    "stored kB": lambda row: f"{row['stored_bytes'] / 1e3:.0f}",
    "temp MB": lambda row: f"{row['temp_bytes'] / 1e6:.1f}",
    "arguments MB": lambda row: f"{row['argument_bytes'] / 1e6:.1f}",
    "output MB": lambda row: f"{row['output_bytes'] / 1e6:.1f}",
    "t/s": lambda row: f"{row['ts_median']:.1f}",
}
_CALLS = 5  # of a program, whose speed is their median


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def measure(
    recipes: Mapping[str, Recipe],
    *,
    repeat: int,
    on_turn: Callable[[], object] = lambda: None,
    on_program: Callable[[str, Lowered, Compiled], object] = lambda name, lowered, compiled: None,
) -> list[dict[str, Any]]:
    """Make every program of an engine, from nothing and then from the compile cache; and run it.

    jax's memory of what it traced and compiled is emptied before each program, and the cache is an
    empty folder of its own, so each starts as in a fresh process.

    Args:
        recipes: of the programs, by name, as `Engine.recipes` gives them.
        repeat: how often each is made; seconds are medians.
        on_turn: called after each program and repetition.
        on_program: called once with each program, before and after XLA's optimisation.

    Returns:
        One row a program:

            trace_seconds, lower_seconds: from Python to a jaxpr, and to StableHLO
            compile_seconds: XLA's, where the cache is empty; writing to it is included
            cached_seconds: in place of those, where the cache has it; None if nothing was stored
            hlo_instructions: of the optimised program, those of fusions included
            stored_bytes: of its entry in the cache, compressed
            code_bytes, temp_bytes, argument_bytes, output_bytes: as XLA accounts for the memory of
                the executable; code is 0 where it does not say. The KV state is both an argument
                and an output, in one place: alias_bytes of the two are shared.
            ts_median: tokens a second that it runs or draws, from an empty context on
    """
    rows = []
    for name, recipe in recipes.items():
        times, facts = [], {}
        for turn in range(repeat):
            seconds, lowered, compiled, stored = _make(recipe.trace)
            times.append(seconds)
            if turn == 0:
                facts = {**_facts(compiled, stored), "ts_median": _speed(recipe, compiled)}
                on_program(name, lowered, compiled)
            on_turn()
        medians = {
            key: None if times[0][key] is None else statistics.median(t[key] for t in times)
            for key in times[0]
        }
        rows.append({"program": name, **medians, **facts})
    return rows


def _make(
    trace: Callable[[], jax.stages.Traced],
) -> tuple[dict[str, Any], Lowered, Compiled, int]:
    """(seconds of each stage, the program before and after XLA, bytes of its cache entry)."""
    with _empty_cache() as folder:
        jax.clear_caches()
        marks = [time.perf_counter()]
        traced = trace()
        marks.append(time.perf_counter())
        lowered = traced.lower()
        marks.append(time.perf_counter())
        compiled = lowered.compile()
        marks.append(time.perf_counter())
        stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        cached_seconds = None
        if stored:
            jax.clear_caches()
            again = trace().lower()
            begin = time.perf_counter()
            again.compile()
            cached_seconds = time.perf_counter() - begin
    names = ("trace_seconds", "lower_seconds", "compile_seconds")
    seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    return {**seconds, "cached_seconds": cached_seconds}, lowered, compiled, stored


def _facts(compiled: Compiled, stored: int) -> dict[str, int]:
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None, "XLA says both"
    return {
        "hlo_instructions": sum(" = " in line for line in text.splitlines()),
        "stored_bytes": stored,
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def _speed(recipe: Recipe, compiled: Compiled) -> float:
    """Tokens a second, the first call left out."""
    arguments = recipe.arguments()
    seconds = []
    for _ in range(1 + _CALLS):
        begin = time.perf_counter()
        state, *_ = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
        arguments = (*arguments[:3], state, *arguments[4:])
    return recipe.n_tokens / statistics.median(seconds[1:])


@contextlib.contextmanager
def _empty_cache() -> Iterator[Path]:
    """Jax's compile cache is a new folder, and afterwards what it was."""
    names = ("jax_compilation_cache_dir", *EVERYTHING)
    before = {name: jax.config.values[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in {"jax_compilation_cache_dir": folder, **EVERYTHING}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield Path(folder)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
