"""What a row of the bench says.

In JSON it has these keys; they are the columns of the CSV too, but for the lists:

model, size, params          file, bytes and number of its weights
backend, threads, test       CPU, CUDA or Metal; of the CPU; as llama-bench names it
ts_mean, ts_stddev           tokens a second over the repetitions; sample deviation
samples_ts, ts_median        each of them, and the middle
precision, n_ctx             as for generate; positions of the KV state
cache_type                   of keys and values
kernels                      instruction set of the native kernels, "pallas" or "xla"
weight_bytes                 what one token reads of the weights: `bench_bytes`
gb_per_s, kv_gb_per_s        of weights, and of keys and values, in decode: bytes a token times
                             the median rate; null for a prefill, which reads weights once
memory_ceiling_gb_per_s      the better of two measurements, before the tests and after; null where
                             the model is on another device than the CPU
ceiling_share                gb_per_s over that
load_seconds                 reading weights and tokenizer
compile_seconds              of the programs that this test needed first, or of loading them
compile_cached               whether the compile cache had them
peak_rss_bytes               of this process, ceiling and peers left out
peers                        per peer: name, version, settings, ts_mean, ts_stddev, ts_median,
                             samples_ts, and ratio, which is our median over theirs
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from minfer_jax.bench_bytes import kv_bytes, weight_bytes
from minfer_jax.bench_table import Columns, Row
from minfer_jax.bench_tests import PeerResult, Rates, Result
from minfer_jax.device import backend_name
from minfer_jax.engine import Engine
from minfer_jax.gguf import GGUFFile
from minfer_jax.quant import native
from minfer_jax.quant.kernels import use_native, use_pallas


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all tests of a run share.

    Attributes:
        file: the model.
        engine: that ran it.
        threads: of the CPU.
        ceiling: bytes a second that memory gave; None where the model is in another.
        load_seconds: of weights and tokenizer.
        peak_rss_bytes: of this process.
    """

    file: GGUFFile
    engine: Engine
    threads: int
    ceiling: float | None
    load_seconds: float
    peak_rss_bytes: int


def row(result: Result, run: Run) -> dict[str, Any]:
    """One test as this module's docstring lists it."""
    test, rates, cfg = result.test, result.rates, run.engine.cfg
    tensors = run.file.tensors.values()
    read = weight_bytes(run.engine.params, run.engine.cfg)
    speed = kv_speed = share = None
    if test.n_gen:
        speed = read * rates.median / 1e9
        kv_speed = kv_bytes(cfg, test.depth, test.n_gen) * rates.median / 1e9
        share = None if run.ceiling is None else speed * 1e9 / run.ceiling
    return {
        "model": run.file.path.stem,
        "size": sum(info.nbytes for info in tensors),
        "params": sum(math.prod(info.shape) for info in tensors),
        "backend": backend(),
        "threads": run.threads,
        "test": test.name,
        **_rates(rates),
        "precision": cfg.precision,
        "n_ctx": run.engine.n_ctx,
        "cache_type": cfg.cache_dtype,
        "kernels": kernels(cfg.arithmetic.kernels),
        "weight_bytes": read,
        "gb_per_s": speed,
        "kv_gb_per_s": kv_speed,
        "memory_ceiling_gb_per_s": None if run.ceiling is None else run.ceiling / 1e9,
        "ceiling_share": share,
        "load_seconds": run.load_seconds,
        "compile_seconds": result.compile_seconds,
        "compile_cached": result.cached,
        "peak_rss_bytes": run.peak_rss_bytes,
        "peers": [_peer(peer, rates) for peer in result.peers],
    }


def _peer(peer: PeerResult, ours: Rates) -> dict[str, Any]:
    return {
        "name": peer.name,
        "version": peer.version,
        "settings": dict(peer.settings),
        **_rates(peer.rates),
        "ratio": ours.median / peer.rates.median,
    }


def _rates(rates: Rates) -> dict[str, Any]:
    return {
        "ts_mean": rates.mean,
        "ts_stddev": rates.deviation,
        "samples_ts": list(rates.samples),
        "ts_median": rates.median,
    }


def run_columns(peers: Sequence[str]) -> Columns:
    """What the Markdown table shows of such rows, with peers of these names."""
    columns = {
        "model": lambda row: row["model"],
        "size": lambda row: f"{row['size'] / 2**30:.2f} GiB",
        "params": lambda row: f"{row['params'] / 1e9:.2f} B",
        "backend": lambda row: row["backend"],
        "threads": lambda row: str(row["threads"]),
        "test": lambda row: row["test"],
        "t/s": _speed,
        "GB/s": lambda row: "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}",
        "of memory": lambda row: _percent(row["ceiling_share"]),
    }
    for i, name in enumerate(peers):
        columns[f"{name} t/s"] = lambda row, i=i: _speed(row["peers"][i])
        title = "ratio" if len(peers) == 1 else f"{name} ratio"
        columns[title] = lambda row, i=i: f"{row['peers'][i]['ratio']:.2f}"
    return columns


def _speed(row: Row) -> str:
    return f"{row['ts_mean']:.2f} ± {row['ts_stddev']:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def kernels(choice: str) -> str:
    """What a choice of kernels comes to here: an instruction set, "pallas", or "xla" for none."""
    if use_native(choice):
        return native.isa() or "xla"
    return "pallas" if use_pallas(choice) and jax.default_backend() == "gpu" else "xla"


def backend() -> str:
    """Where jax runs, as llama-bench names it."""
    return backend_name(jax.default_backend())
