"""The shape-specialised compile benchmark: what each of an engine's programs costs to make."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from minfer_jax.bench_table import Columns
from minfer_jax.compile_cache import EVERYTHING
from minfer_jax.engine import Engine

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
}


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def measure(
    engine: Engine, *, repeat: int, on_turn: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """Make every program of an engine, from nothing and then from the compile cache.

    jax's memory of what it traced and compiled is emptied before each program, and the cache is an
    empty folder of its own, so each starts as in a fresh process.

    Args:
        engine: whose programs; it is not run.
        repeat: how often; seconds are medians.
        on_turn: called after each program and repetition.

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
    """
    rows = []
    for name, trace in engine.traces().items():
        times, facts = [], {}
        for _ in range(repeat):
            seconds, facts = _make(trace)
            times.append(seconds)
            on_turn()
        keys = times[0]
        medians = {
            key: None if times[0][key] is None else statistics.median(t[key] for t in times)
            for key in keys
        }
        rows.append({"program": name, **medians, **facts})
    return rows


def _make(trace: Callable[[], jax.stages.Traced]) -> tuple[dict[str, Any], dict[str, int]]:
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
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None, "XLA says both"
    names = ("trace_seconds", "lower_seconds", "compile_seconds")
    seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    facts = {
        "hlo_instructions": sum(" = " in line for line in text.splitlines()),
        "stored_bytes": stored,
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }
    return {**seconds, "cached_seconds": cached_seconds}, facts


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
