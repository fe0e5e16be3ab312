"""Several tokens in one call have the numbers that they have one by one, and so the same draws."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.programs import verify
from minfer_jax.quant import native
from minfer_jax.quant.cache import Q8_0
from minfer_jax.sampling import SamplingParams, init_state, sample
from tests.helpers.tiny_models import save, tiny_model

TOKENS = np.array([(11 * i * i + 5 * i + 2) % 96 for i in range(40)], np.int32)
N_CTX, CHUNK, BEFORE = 48, 16, 14
RUN = jax.jit(forward, static_argnames="cfg")
VERIFY = jax.jit(verify, static_argnames="cfg")
NEEDS_KERNELS = pytest.mark.skipif(not native.available(), reason="there are no kernels")


@functools.cache
def model(
    arch: str, precision: str = "default", cache_type: str | None = None, head_dim: int = 0
) -> tuple[ModelConfig, Params]:
    heads = {"head_dim": head_dim} if head_dim else {}
    with tempfile.TemporaryDirectory() as folder:
        file = save(Path(folder), tiny_model(arch, weight_type="Q4_0", **heads))
        return load_model(file, precision=precision, cache_type=cache_type)


def differences(cfg: ModelConfig, params: Params, n: int, real: int) -> tuple[float, bool]:
    """Of n rows at once, `real` of them no padding: (largest of logits, whether caches differ)."""
    run = jax.jit(forward, static_argnames=("cfg", "n_out", "stepwise"))
    state = kv.init(cfg, N_CTX, chunk=CHUNK)
    for start, size in ((0, 8), (8, BEFORE - 8)):
        ids = jnp.asarray(TOKENS[None, start : start + size])
        at = jnp.arange(start, start + size, dtype=jnp.int32)[None]
        _, state = run(params, ids, at, state, cfg=cfg, n_out=0)
    single, alone = [], state
    for i in range(BEFORE, BEFORE + real):
        at = jnp.full((1, 1), i, jnp.int32)
        logits, alone = run(params, jnp.asarray(TOKENS[None, i : i + 1]), at, alone, cfg=cfg)
        single.append(np.asarray(logits)[0, 0])
    ids = jnp.asarray(TOKENS[None, BEFORE : BEFORE + n])
    at = np.arange(BEFORE, BEFORE + n, dtype=np.int32)[None]
    at[0, real:] = -1
    logits, state = run(params, ids, jnp.asarray(at), state, cfg=cfg, n_out=n, stepwise=True)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True)
    cache = any(not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    return float(np.abs(np.asarray(logits)[0, :real] - np.stack(single)).max()), cache


@NEEDS_KERNELS
@pytest.mark.parametrize("arch", ["gemma3", "gpt-oss", "qwen3moe", "mistral3", "phi3"])
def test_rows_are_those_of_single_calls_to_the_bit(arch: str):
    """Rings, sinks, experts, a temperature of queries, fused tensors."""
    cfg, params = model(arch, head_dim=32 if arch == "gpt-oss" else 0)
    assert differences(cfg, params, 8, 8) == (0.0, False)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_for_every_instruction_set(kernels: str, precision: str):
    cfg, params = model("llama", precision)
    assert differences(cfg, params, 8, 5) == (0.0, False)


@NEEDS_KERNELS
def test_a_quantised_cache():
    cfg, params = model("llama", cache_type="q8_0", head_dim=32)
    assert cfg.cache_dtype == Q8_0
    assert differences(cfg, params, 16, 16) == (0.0, False)


def test_elsewhere_all_but_rounding():
    """Norms over all heads at once are no part of the kernel; plain XLA sums in another order."""
    assert differences(*model("olmo2", "highest"), 4, 4)[0] < 2e-4
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, native.OFF)
        assert differences(*model("llama", "highest"), 4, 4)[0] < 2e-4


@pytest.mark.parametrize("chosen", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3}])
@pytest.mark.parametrize("n_right", [0, 1, 3, 4])
def test_it_draws_up_to_the_first_wrong_guess(chosen: dict[str, Any], n_right: int):
    cfg, params = model("llama", "highest")
    sampling = SamplingParams(repeat_penalty=1.2, **chosen)
    state, sampler, args = kv.init(cfg, N_CTX), init_state(sampling, [5]), sampling.arrays()
    last, right = jnp.asarray([[5]], jnp.int32), []
    for i in range(5):
        logits, state = RUN(params, last, jnp.full((1, 1), i, jnp.int32), state, cfg=cfg)
        token, sampler = sample(logits[:, 0], sampler, args)
        last = token[:, None]
        right.append(int(token[0]))
    guesses = [5, *(g if i < n_right else (g + 1) % 96 for i, g in enumerate(right[:4]))]
    at = jnp.arange(5, dtype=jnp.int32)[None]
    ids, sampler = jnp.asarray([guesses], jnp.int32), init_state(sampling, [5])
    _, drawn = VERIFY(params, ids, at, kv.init(cfg, N_CTX), sampler, args, cfg=cfg)
    assert drawn[0].tolist() == [*right[: n_right + 1], *[-1] * (4 - n_right)]
    at = jnp.where(at > n_right, -1, at)  # no guesses but the right ones
    _, drawn = VERIFY(params, ids, at, kv.init(cfg, N_CTX), sampler, args, cfg=cfg)
    assert drawn[0].tolist() == [*right[: n_right + 1], *[-1] * (4 - n_right)]
