"""Tokens a second of whole models, with the kernels and without.

Prefill is of a prompt that fills the largest bucket, and one decode step, which draws the first
token; decode begins with a prompt of one token. The weights' bytes a second are those of decode.
"""

import functools
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from minfer_jax.bench_bytes import weight_bytes
from minfer_jax.engine import Engine
from minfer_jax.gguf import open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from scripts.gpu_check import device, files, synthetic
from scripts.gpu_check.rows import MEASURED, Case, Row, Setting
from scripts.gpu_check.texts import N_CTX

N_PREFILL, N_DECODE = 512, 64
STEPS = (16, 1)  # tokens that one call of decode draws
REPEATS = 3
SYNTHETIC = Path("Mistral 7B's shapes, random Q4_K")


def cases(setting: Setting) -> list[Case]:
    """All models with the kernels, then without."""
    paths = [SYNTHETIC, *files.models(setting)]
    found = [
        Case(
            name=f"{path.stem}, {choice}",
            run=functools.partial(_rates, setting, path, choice),
        )
        for choice in ("pallas", "xla")
        for path in paths
    ]
    return found if len(paths) > 1 else [*found, files.absent(setting)]


def _rates(setting: Setting, path: Path, choice: str) -> Iterable[Row]:
    cfg, params = _loaded(setting, path, choice)
    copy, _ = device.ceilings(setting)
    ids = np.random.default_rng(0).integers(0, cfg.n_vocab, N_PREFILL + 1).tolist()
    for steps in STEPS:
        engine = Engine(params, cfg, n_ctx=N_CTX, steps_per_dispatch=steps)
        _, decode = _median(setting, engine, ids[:1], N_DECODE)
        read = weight_bytes(params, cfg) * decode
        figures: dict[str, float | str] = {
            "steps a call": steps,
            "decode tok/s": decode,
            "weights GB/s": read / 1e9,
            "of a copy": read / copy,
        }
        if steps == STEPS[0]:
            figures["prefill tok/s"], _ = _median(setting, engine, ids, 1)
        figures["compiling s"] = sum(c.seconds for c in engine.compiles)
        yield Row(name=f"{path.stem}, {choice}", state=MEASURED, figures=figures)


def _loaded(setting: Setting, path: Path, choice: str) -> tuple[ModelConfig, Params]:
    if path == SYNTHETIC:
        return synthetic.model(tiny=setting.rehearse, kernels=choice)
    with files.opened(path) as there:
        return load_model(open_gguf(there), kernels=choice)


def _median(setting: Setting, engine: Engine, ids: list[int], n_tokens: int) -> tuple[float, float]:
    """Prefilled and decoded tokens a second; the first run, which compiles, does not count."""
    found = []
    for _ in range(2 if setting.rehearse else 1 + REPEATS):
        drawn = len(list(engine.generate_tokens(ids, n_tokens, temperature=0.0, reuse=False)))
        if drawn != n_tokens:
            raise ValueError(f"{drawn} tokens were drawn, expected {n_tokens}")
        found.append((engine.stats.prefill_rate, engine.stats.decode_rate))
    prefill, decode = zip(*found[1:], strict=True)
    return statistics.median(prefill), statistics.median(decode)
