"""llama.cpp as a peer in the same run, through the `llama_cpp` package where that is installed."""

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PeerError(ValueError):
    """The peer cannot run. One line."""


class LlamaCpp:
    """The same two tests as `bench.measure` times, run by llama.cpp on the same file."""

    def __init__(self, path: Path, *, n_ctx: int) -> None:
        """Load the model with all the threads that this process may use.

        Raises:
            PeerError: llama-cpp-python is not installed, or refuses the file.
        """
        try:
            self._module: Any = importlib.import_module("llama_cpp")
        except ImportError:
            raise PeerError(
                "--vs needs llama.cpp: pip install llama-cpp-python (a build of minutes)"
            ) from None
        threads = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        try:
            self._llama = self._module.Llama(
                str(path),
                n_ctx=n_ctx,
                n_batch=512,
                n_ubatch=512,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=0,
                verbose=False,
            )
        except ValueError as e:
            raise PeerError(f"llama.cpp cannot load {path}: {e}") from None

    def prefill_seconds(self, ids: Sequence[int]) -> float:
        """Run a prompt from an empty context."""
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()
        begin = time.perf_counter()
        self._llama.eval(ids)
        return time.perf_counter() - begin

    def decode_seconds(self, ids: Sequence[int], n_gen: int) -> float:
        """Run a prompt, and then time n_gen single tokens."""
        self.prefill_seconds(ids)
        begin = time.perf_counter()
        for _ in range(n_gen):
            self._llama.eval(ids[:1])
        return time.perf_counter() - begin
