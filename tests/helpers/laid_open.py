"""Tiny models run with their values laid open, for tests of those."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params
from minfer_jax.model.tap import Captured
from minfer_jax.model.traced import forward_traced
from tests.helpers.tiny_models import load, run, tiny_model

T = 9
# Any: numpy's arrays, where jax's are asked for.
TOKENS: Any = np.array([[(11 * i * i + 5 * i + 2) % 96 for i in range(T)]], np.int32)
OTHERS: Any = np.array([[(7 * i * i + 3 * i + 1) % 96 for i in range(T)]], np.int32)
POSITIONS: Any = np.arange(T, dtype=np.int32)[None]
# Largest difference of values that are the same but for the order of sums. Measured: 2e-5.
CLOSE = 2e-4


@functools.cache
def model(arch: str) -> tuple[ModelConfig, Params]:
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), tiny_model(arch))


def fresh(cfg: ModelConfig, n: int = T, batch: int = 1) -> kv.KVState:
    return kv.init(cfg, n, batch=batch, chunk=n)


@functools.cache
def program(cfg: ModelConfig, names: str | tuple[str, ...], **static: Any) -> Callable:
    """(params, ids) -> (logits, state, values)."""

    def traced(params: Params, ids: jax.Array) -> tuple:
        return forward_traced(params, ids, POSITIONS, fresh(cfg), cfg=cfg, names=names, **static)

    return jax.jit(traced)


def traced(
    arch: str, names: str | tuple[str, ...] = "*", ids: np.ndarray = TOKENS
) -> tuple[np.ndarray, Captured]:
    """Logits [T, V], and values."""
    cfg, params = model(arch)
    logits, _, found = program(cfg, names)(params, jnp.asarray(ids))
    return np.asarray(logits)[0], found


def logits_of(arch: str, ids: np.ndarray = TOKENS) -> np.ndarray:
    cfg, params = model(arch)
    logits, _ = run(params, jnp.asarray(ids), jnp.asarray(POSITIONS), fresh(cfg), cfg=cfg, n_out=T)
    return np.asarray(logits)[0]


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=CLOSE)


def patched(arch: str, patches: Mapping[str, Any], names: Any = ()) -> tuple[np.ndarray, Captured]:
    """As `traced`, with functions too, not kept."""
    cfg, params = model(arch)
    logits, _, found = jax.jit(
        lambda p: forward_traced(
            p, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names=names, patches=patches
        )
    )(params)
    return np.asarray(logits)[0], found
