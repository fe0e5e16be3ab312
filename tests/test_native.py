"""The library of kernels: how it is chosen and used. What it computes is tested with its XLA forms,
in test_qproduct and test_attention; here are whole models, on heads that the kernels take.
"""

import functools
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax import generate
from minfer_jax.engine import Engine
from minfer_jax.model import kv_state as kv
from minfer_jax.model.forward import forward
from minfer_jax.model.registry import ARCHS
from minfer_jax.quant import native
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.matmul import EXACT, NATIVE_ROWS, qmatmul
from minfer_jax.quant.qtensor import from_blocks
from tests.conftest import XLA
from tests.helpers.tiny_models import load, save, tiny_model, tiny_text_model
from tests.test_formats import blocks_of

MODEL = {"n_layer": 2, "width": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32}
TOKENS = [(11 * i * i + 5 * i + 2) % 96 for i in range(14)]


def test_the_kernels_are_built_where_there_is_a_compiler():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no C++ compiler")
    assert native.library() is not None, "an install without the kernels: install again"
    assert native.available()[-1] == "portable"


# What is in the program.


@functools.cache
def targets(implementation: str, rows: int) -> set[str]:
    """The kernels that a product of so many rows is compiled to."""
    w = from_blocks(blocks_of(FORMATS[2], 20, 64), 2)
    lowered = jax.jit(lambda x, w: qmatmul(x, w, EXACT)).lower(jnp.zeros((rows, 64)), w)
    text = lowered.compile().as_text() or ""
    return {name for name in native.CALLS if f'custom_call_target="{name}"' in text}


def test_products_are_calls_of_kernels(implementation: str):
    kernels = implementation != XLA
    assert targets(implementation, 1) == ({"minfer_product"} if kernels else set())
    assert targets(implementation, NATIVE_ROWS) == ({"minfer_product"} if kernels else set())
    assert targets(implementation, NATIVE_ROWS + 1) == ({"minfer_product"} if kernels else set())


# What is chosen.


def test_the_best_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    best = (*native.available(), None)[0]
    assert native.isa() == best
    monkeypatch.setenv(native.VARIABLE, "off")
    assert native.isa() is None and not native.bfloat16()
    monkeypatch.delenv(native.VARIABLE)
    assert native.isa() == best


@pytest.mark.parametrize("platform", ["gpu", "METAL"])
def test_other_devices_have_no_cpu_kernels(platform: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert native.isa() is None


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_a_name_that_there_is_not(
    precision: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(native.VARIABLE, "sse9")
    path = str(save(tmp_path, tiny_text_model(n_layer=1)).path)
    assert generate.main(["generate", path, "hi", "-n", "2", "--precision", precision]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: MINFER_CPU_ISA is 'sse9', expected one of ")
    assert kernels in last and "off" in last


def test_an_install_without_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        assert native.library.__wrapped__() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("no native kernels in this install")
    assert line.endswith("using plain XLA") and "\n" not in line


@pytest.mark.skipif(not native.available(), reason="there are no kernels")
def test_a_library_that_is_of_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(native, "CALLS", ("minfer_of_the_future",))
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        assert native.library.__wrapped__() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "minfer_of_the_future" in line and "install again" in line


# Threads.

DIGESTS = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from minfer_jax.model.attention import Scoring, attend
from minfer_jax.quant import native
from minfer_jax.quant.experts import expert_product
from minfer_jax.quant.matmul import EXACT, Arithmetic, qmatmul
from minfer_jax.quant.qtensor import from_blocks, stack_blocks
from tests.test_formats import FORMATS, blocks_of

rng = np.random.default_rng(0)
w = from_blocks(blocks_of(FORMATS[12], 1000, 512), 12)
stack = stack_blocks([[blocks_of(FORMATS[12], 400, 512, seed=e)] for e in range(5)], 12)
ids = jnp.asarray(rng.choice(5, 200, p=[0.8, 0.1, 0.04, 0.06, 0]), jnp.int32)
x = jnp.asarray(rng.standard_normal((200, 512)), jnp.float32)
q, k, v = (
    jnp.asarray(rng.standard_normal(shape), jnp.float32)
    for shape in ((1, 70, 6, 64), (1, 1, 2, 700, 64), (1, 1, 2, 700, 64))
)
held, last = jnp.arange(700, dtype=jnp.int32)[None], jnp.arange(630, 700, dtype=jnp.int32)[None]
for name in native.available():
    assert native.library().minfer_choose(name.encode())
    results = [qmatmul(x[:3], w, EXACT), qmatmul(x[:3], w, Arithmetic(few="int16"))]
    results += [qmatmul(x, w, EXACT)]
    results += [expert_product(x[:n], stack, ids[:n], EXACT) for n in (4, 200)]
    for t in (1, 70):
        at = last[:, -t:]
        results.append(
            attend(q[:, -t:], k, v, jnp.uint32(0), at, held, None, Scoring(scale=0.125))
        )
    print(name, *(hashlib.sha256(np.asarray(r).tobytes()).hexdigest()[:16] for r in results))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one processor")
@pytest.mark.skipif(not native.available(), reason="there are no kernels")
def test_results_do_not_depend_on_the_number_of_threads():
    def digests(threads: str) -> str:
        env = os.environ | {"NPROC": threads, "XLA_FLAGS": ""}
        env.pop(native.VARIABLE, None)
        run = subprocess.run(
            [sys.executable, "-c", DIGESTS], capture_output=True, text=True, timeout=120, env=env
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    alone = digests("1")
    assert len(alone.splitlines()) == len(native.available())
    assert digests("2") == alone


# Whole models.


def logits(folder: Path, arch: str, sizes: list[int]) -> np.ndarray:
    """Float32 [T, V] of TOKENS, in calls of so many of them."""
    # The hidden size of the shared experts is no multiple of a block.
    types = {f"blk.{i}.ffn_down_shexp": "F16" for i in range(MODEL["n_layer"])}
    cfg, params = load(folder, tiny_model(arch, **MODEL, weight_type="Q8_0", types=types))
    # A function of its own: what was compiled for another implementation must not be taken.
    run = jax.jit(functools.partial(forward), static_argnames=("cfg", "n_out"))
    state, rows, at = kv.init(cfg, 16, chunk=8), [], 0
    for n in sizes:
        ids = jnp.asarray([TOKENS[at : at + n]], jnp.int32)
        positions = jnp.arange(at, at + n, dtype=jnp.int32)[None]
        out, state = run(params, ids, positions, state, cfg=cfg, n_out=n)
        rows.append(np.asarray(out[0]))
        at += n
    return np.concatenate(rows)


@pytest.mark.skipif(not native.available(), reason="there are no kernels")
@pytest.mark.parametrize("arch", ARCHS)
def test_a_model_on_kernels_equals_it_in_xla(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = logits(tmp_path, arch, [8] + [1] * 6)
    monkeypatch.setenv(native.VARIABLE, native.OFF)
    np.testing.assert_allclose(found, logits(tmp_path, arch, [8, 6]), rtol=0, atol=2e-4)


def greedy(folder: Path, precision: str) -> list[int]:
    cfg, params = load(folder, tiny_model("gemma3", **MODEL, weight_type="Q8_0"), precision)
    return list(Engine(params, cfg, n_ctx=64).generate_tokens(TOKENS, 12, temperature=0.0))


@pytest.mark.skipif(not native.available(), reason="there are no kernels")
def test_the_same_tokens_whatever_computes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {}
    for name in (native.OFF, *native.available()):
        monkeypatch.setenv(native.VARIABLE, name)
        found[name] = greedy(tmp_path, "highest")
    assert len(found[native.OFF]) == 12
    assert all(tokens == found[native.OFF] for tokens in found.values()), found


def test_a_weight_that_is_not_a_number_is_found_while_decoding(kernels: str, tmp_path: Path):
    """At the default precision too, where activations are rounded to whole numbers."""
    cfg, params = load(tmp_path, tiny_model("llama", **MODEL, weight_type="Q8_0"), "default")
    tokens = Engine(params, cfg, n_ctx=64).generate_tokens(TOKENS, 4, temperature=0.0)
    assert len(list(tokens)) == 4
    bad = jax.tree.map(
        lambda a: a.at[0].set(jnp.nan) if a.dtype == jnp.float32 and a.ndim == 2 else a, params
    )
    with pytest.raises(ValueError, match=r"NaN|not a number|finite"):
        list(Engine(bad, cfg, n_ctx=64).generate_tokens(TOKENS, 4, temperature=0.0))
