"""Sliding layers keep a ring of slots: their logits are those of a cache that keeps everything.

To float32 rounding, not to the bit: a ring holds the same keys and values in other slots, so that
attention adds the same terms up in another order.
"""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.params import Params
from tests.conftest import KERNELS, XLA
from tests.helpers.tiny_models import load, tiny_model

ARCHS = ("gemma3", "muse-glimmer")
WINDOW = 32
N_CTX = 600
TOKENS = np.random.default_rng(0).integers(0, 96, 580).astype(np.int32)
# The first position, the wraps of the window, and the edges of chunks of 64 and of 512.
EDGES = (1, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 63, 64, 65, 511, 512, 513)
# Largest difference of two logits that are the same but for the order of sums; logits have a
# standard deviation of 2.8. Measured: 9e-6.
CLOSE = 1e-4


@functools.cache
def model(arch: str) -> tuple[ModelConfig, Params]:
    with tempfile.TemporaryDirectory() as folder:
        # Heads that the kernels take.
        keys = {"attention.sliding_window": WINDOW, "logit_scale": 1.0}
        data = tiny_model(arch, head_dim=32, n_ctx=1024, keys=keys)
        return load(Path(folder), data)


@functools.cache
def compiled(implementation: str):
    """`forward`, compiled for one implementation alone."""
    del implementation
    return jax.jit(functools.partial(forward), static_argnames=("cfg", "n_out"))


@functools.cache
def logits(implementation: str, arch: str, size: int, chunk: int) -> np.ndarray:
    """Float32 [T, V] of TOKENS in runs of `size`, in a state that is made for runs of `chunk`."""
    cfg, params = model(arch)
    state = kv.init(cfg, N_CTX, chunk=chunk)
    out = []
    for start in range(0, len(TOKENS), size):
        n = min(size, len(TOKENS) - start)
        ids, positions = np.zeros((1, size), np.int32), np.full((1, size), -1, np.int32)
        ids[0, :n] = TOKENS[start : start + n]
        positions[0, :n] = np.arange(start, start + n)
        rows, state = compiled(implementation)(
            params, jnp.asarray(ids), jnp.asarray(positions), state, cfg=cfg, n_out=size
        )
        out.append(np.asarray(rows[0, :n]))
    return np.concatenate(out)


@pytest.mark.parametrize("implementation", (XLA, *KERNELS[:1]), indirect=True)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("size", "chunk"),
    [
        pytest.param(64, 64, id="64"),
        pytest.param(512, 512, id="512"),
        pytest.param(64, N_CTX, id="64-in-a-full-cache"),
        pytest.param(1, 1, id="one-by-one"),
    ],
)
def test_a_ring_equals_a_full_cache(implementation: str, arch: str, size: int, chunk: int):
    cfg, _ = model(arch)
    slots = [kv.init(cfg, N_CTX, chunk=c).positions[kv.SLIDING].shape[1] for c in (chunk, N_CTX)]
    assert slots == [min(WINDOW + chunk, N_CTX), N_CTX]
    assert {spec.sliding for spec in cfg.layers} == {True, False}
    found = logits(implementation, arch, size, chunk)
    expected = logits(implementation, arch, len(TOKENS), N_CTX)
    apart = np.abs(found - expected).max(axis=1)
    assert {p: apart[p] for p in EDGES if apart[p] > CLOSE} == {}
    assert apart.max() <= CLOSE
    assert expected.std() > 0.3  # caps make logits small
