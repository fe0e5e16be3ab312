"""Which kernels may be used: the choice, and what it puts into a program."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.forward import forward
from minfer_jax.model.precision import arithmetic
from minfer_jax.quant import kernels, native
from minfer_jax.quant.matmul import MATVEC_ROWS, NATIVE_ROWS, few_rows
from tests.helpers.tiny_models import load, tiny_model

T = 3


def lowered(folder: Path, choice: str, platform: str) -> str:
    """The program of a model for a platform, as text."""
    cfg, params = load(folder, tiny_model("llama"))
    cfg = dataclasses.replace(cfg, arithmetic=arithmetic("default", choice=choice))
    ids = jnp.zeros((1, T), jnp.int32)
    state = kv.init(cfg, 16)
    traced = jax.jit(forward, static_argnames=("cfg", "n_out")).trace(
        params, ids, ids, state, cfg=cfg, n_out=T
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_xla_leaves_the_native_kernels_out(tmp_path: Path):
    assert "minfer_" not in lowered(tmp_path, "xla", "cpu")
    assert ("minfer_" in lowered(tmp_path, "auto", "cpu")) == (native.isa() is not None)


def test_the_choice_is_one_of_three():
    with pytest.raises(ValueError, match="kernels is 'triton', expected one of auto, xla, pallas"):
        arithmetic("default", choice="triton")


@pytest.mark.parametrize("choice", kernels.CHOICES)
def test_highest_stays_exact(choice: str):
    found = arithmetic("highest", choice=choice)
    assert (found.few, found.many, found.kernels) == ("float32", "float32", choice)


def test_few_rows_follow_the_choice():
    assert few_rows("xla") == MATVEC_ROWS
    assert few_rows("auto") == (MATVEC_ROWS if native.isa() is None else NATIVE_ROWS)
