"""The attention kernels, in interpret mode against plain XLA, and in the programs for CUDA."""

import dataclasses
import functools
import logging
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.model import kv_state as kv
from minfer_jax.model.attention import Scoring, attend, plain_attention
from minfer_jax.model.forward import forward
from minfer_jax.model.precision import arithmetic
from minfer_jax.pallas import attention_decode as decode
from minfer_jax.pallas import attention_prefill as prefill
from minfer_jax.pallas.scoring import seen, visible_blocks
from minfer_jax.quant import cache
from tests.helpers.tiny_models import load, tiny_model


def random(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def slots(newest: int, n_slots: int) -> np.ndarray:
    """What the slots hold once positions 0 to `newest` were written, each to slot p % S."""
    held = np.full(n_slots, -1, np.int32)
    for p in range(max(0, newest + 1 - n_slots), newest + 1):
        held[p % n_slots] = p
    return held


def up_to(newest: int, t: int) -> np.ndarray:
    """T positions, the last `newest`; where there are fewer, padding follows."""
    real = min(t, newest + 1)
    return np.r_[np.arange(newest + 1 - real, newest + 1), np.full(t - real, -1)]


def batch_of(*rows: np.ndarray) -> jax.Array:
    return jnp.asarray(np.stack(rows), jnp.int32)


# Compiled as fast as can be: a kernel in interpret mode is a long program that runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnums=(0, 8, 9), compiler_options=QUICK)
def interpreted(module: ModuleType, *args) -> jax.Array:
    *args, config = args
    return module.attention(*args, config=config, interpret=True)


plain = jax.jit(plain_attention, static_argnums=6, compiler_options=QUICK)
blocked = jax.jit(attend, static_argnums=7)


def caches(kind: str, heads_kv: int, n_slots: int, h: int, h_v: int, batch: int = 1) -> list[Any]:
    """Keys and values of two layers."""
    return [
        cache.rounded(random(i, 2, batch, heads_kv, n_slots, w), cache.empty((w,), kind))
        for i, w in ((1, h), (2, h_v))
    ]


@settings(max_examples=150, deadline=None)
@given(
    n_slots=st.integers(1, 40),
    block=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 45),
    newest=st.integers(-1, 120),
    t=st.integers(1, 9),
    full=st.booleans(),
)
def test_visible_blocks_are_those_of_the_mask(
    n_slots: int, block: int, window: int, newest: int, t: int, full: bool
):
    if full:  # such a cache is never written twice
        newest, window = min(newest, n_slots - 1), 0
    at = np.full(9, -1, np.int32)
    at[:t] = up_to(newest, t)
    sees = np.asarray(seen(at[:, None], slots(newest, n_slots)[None], window)).any(0)  # pyright: ignore
    first, count = (int(x) for x in visible_blocks(jnp.asarray(at), n_slots, block, window))
    n_blocks = -(-n_slots // block)
    visited = [(first + i) % n_blocks for i in range(count)]
    assert len(set(visited)) == count
    assert {s // block for s in np.flatnonzero(sees)} <= set(visited)
    # No more than a run of slots touches, that may also go through a short last block.
    run = min(n_slots, newest + 1 if full else window + t - 1)
    assert count <= min(n_blocks, -(-run // block) + 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Attention of a batch of two sequences, or of as many as `newest` says."""

    t: int = 1
    groups: int = 1
    heads_kv: int = 2
    h: int = 64
    h_v: int | None = None
    n_slots: int = 40
    newest: tuple[int, ...] = (39, 11)
    kind: str = "float16"
    window: int = 0
    softcap: float = 0.0
    sunk: bool = False
    dtype: str = "float32"
    config: dict[str, int] | None = None


DECODE = {
    "smollm2": Case(groups=3),
    "gemma3": Case(groups=4, heads_kv=1, h=256, n_slots=20, newest=(19, 3)),
    "llama3": Case(groups=4, h=128, kind="bfloat16"),
    "gpt-oss": Case(groups=8, heads_kv=1, sunk=True, window=16, newest=(100, 9)),
    "gemma2": Case(groups=2, softcap=2.0, kind="float32", window=30, newest=(39, 11)),
    "deepseek": Case(h=192, h_v=128, kind="bfloat16"),
    "short": Case(h=24, h_v=40, groups=5),
    "q8": Case(h=96, h_v=64, groups=2, kind="q8_0", sunk=True, newest=(39, -1)),
    "empty": Case(newest=(-1, -1), sunk=True),
    "wrapped": Case(groups=3, n_slots=37, newest=(1000, 36), window=20),
    "one program": Case(heads_kv=3, h=32, config={"block": 8, "splits": 1}),
    "more programs than blocks": Case(config={"block": 32, "splits": 8}),
    "four": Case(t=4, groups=2),
    "rows": Case(t=4, groups=3, newest=(39, 1), sunk=True, softcap=3.0),
    "eight": Case(t=8, groups=8, heads_kv=1, h=32, n_slots=90, newest=(170, 2), window=50),
    "eight bf16": Case(t=8, groups=4, dtype="bfloat16", n_slots=90, newest=(89, 30)),
}
PREFILL = {
    "17": Case(t=17, groups=3),
    "64": Case(t=64, groups=4, heads_kv=1, n_slots=100, newest=(99, 70), sunk=True),
    "130": Case(t=130, groups=2, h=32, n_slots=140, newest=(139, 50), softcap=2.0),
    "130 in a ring": Case(
        t=130, heads_kv=1, n_slots=160, newest=(1000, 120), window=30, config={"tile": 32}
    ),
    "bf16": Case(t=64, groups=8, heads_kv=1, dtype="bfloat16", n_slots=100, newest=(99, 70)),
    "bf16 130": Case(t=130, h=128, dtype="bfloat16", kind="bfloat16", n_slots=150, newest=(140, 9)),
    "deepseek": Case(t=17, h=192, h_v=128, sunk=True),
    "phi": Case(t=17, h=80),
    "q8": Case(t=17, h=96, h_v=32, groups=2, kind="q8_0", sunk=True, newest=(39, -1)),
    "one": Case(groups=71, heads_kv=1, h=64),  # Falcon: more rows than the other kernel takes
    "empty": Case(t=17, newest=(-1, -1), sunk=True),
}


def config_of(module: ModuleType, case: Case, *args: object) -> object:
    """The default with the case's own fields."""
    return dataclasses.replace(module.default(*args, case.dtype), **(case.config or {}))


@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(module, case, id=f"{module.NAME} {name}")
        for module, cases in ((decode, DECODE), (prefill, PREFILL))
        for name, case in cases.items()
    ],
)
def test_equals_plain_xla(module: ModuleType, case: Case):
    h_v = case.h if case.h_v is None else case.h_v
    n, batch = case.groups * case.heads_kv, len(case.newest)
    k, v = caches(case.kind, case.heads_kv, case.n_slots, case.h, h_v, batch)
    q = random(0, batch, case.t, n, case.h)
    at = batch_of(*(up_to(newest, case.t) for newest in case.newest))
    held = batch_of(*(slots(newest, case.n_slots) for newest in case.newest))
    scoring = Scoring(
        window=case.window,
        scale=1 / math.sqrt(case.h),
        softcap=case.softcap,
        dtype=case.dtype,
        kernels="xla",
    )
    args = (q, k, v, jnp.uint32(1), at, held, 2 * random(3, n) if case.sunk else None, scoring)
    assert module.supports(q, k, v) is None
    found = np.asarray(interpreted(module, *args, config_of(module, case, q, k, v)))
    if case.dtype == "float32":
        layer = jax.tree.map(lambda plane: plane[1], (k, v))
        expected = np.asarray(plain(q, *layer, *args[4:]))
    else:
        expected = np.asarray(blocked(*args))
    assert found.dtype == np.float32
    assert found.shape == (batch, case.t, n, h_v)
    bound = 2e-6 if case.dtype == "float32" else 8e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    assert not found[np.asarray(at) < 0].any()


@pytest.mark.parametrize(("module", "t"), [(decode, 1), (decode, 5), (prefill, 20)])
@settings(max_examples=20, deadline=None)
@given(newest=st.lists(st.integers(-1, 150), min_size=2, max_size=2))
def test_any_positions_of_a_ring(module: ModuleType, t: int, newest: list[int]):
    n_slots, window = 56, 12
    q, (k, v) = random(0, 2, t, 4, 16), caches("float32", 2, n_slots, 16, 16, batch=2)
    at, held = (batch_of(*(f(p, n) for p in newest)) for f, n in ((up_to, t), (slots, n_slots)))
    scoring = Scoring(window=window, scale=0.25)
    config = config_of(module, Case(config={"block": 16}), q, k, v)
    args = (jnp.uint32(1), at, held, None, scoring)
    found = np.asarray(interpreted(module, q, k, v, *args, config))
    expected = plain(q, k[1], v[1], at, held, None, scoring)
    np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("module", "t"), [(decode, 1), (decode, 5), (prefill, 20)])
def test_what_is_not_seen_changes_nothing(module: ModuleType, t: int):
    """Other layers, and what an earlier run left; but what is no number stays none."""
    q, (k, v) = random(0, 1, t, 4, 16), caches("float32", 2, 40, 16, 16)
    at, held, scoring = batch_of(up_to(24, t)), batch_of(slots(24, 40)), Scoring(scale=0.25)
    args = (jnp.uint32(1), at, held, jnp.zeros(4), scoring)
    config = config_of(module, Case(config={"block": 16}), q, k, v)
    found = interpreted(module, q, k, v, *args, config)
    left = [a.at[0].set(jnp.nan).at[:, :, :, 25:].set(-1e30) for a in (k, v)]
    np.testing.assert_array_equal(interpreted(module, q, *left, *args, config), found)
    bad = interpreted(module, q, k.at[1, 0, 0, 24, 3].set(jnp.nan), v, *args, config)
    assert np.isnan(bad[0, -1, :2]).all()  # of the last query, the heads of the first kv head
    np.testing.assert_array_equal(bad[0, :, 2:], found[0, :, 2:])


def test_refusals():
    q, (k, v) = random(0, 1, 9, 2, 16), caches("float32", 1, 4, 16, 16)
    assert decode.supports(q, k, v) == "9 positions, more than 8"
    assert decode.supports(random(0, 1, 1, 80, 16), k, v) == (
        "80 query rows of a kv head, more than 64"
    )
    wide = jnp.zeros((1, 1, 1, 4, 288))
    for module in (decode, prefill):
        assert module.supports(q[:, :1], wide, v) == "heads of 288 values, more than 256"
        large = jax.ShapeDtypeStruct((8, 2, 8, 2**20, 16), jnp.int8)  # 2 GiB
        scales = jax.ShapeDtypeStruct((8, 2, 8, 2**20, 1), jnp.float16)
        huge = cache.Q8Cache(values=large, scales=scales)  # pyright: ignore[reportArgumentType]
        assert module.supports(q[:, :1], huge, huge) == (
            "a plane of 2147483648 values of int8: offsets overflow 32 bits"
        )


def test_a_refusal_is_logged_and_runs_in_plain_xla(caplog: pytest.LogCaptureFixture):
    q, (k, v) = random(0, 1, 1, 2, 288), caches("float32", 1, 8, 288, 16)
    at, held = batch_of(up_to(5, 1)), batch_of(slots(5, 8))
    scoring = Scoring(scale=0.1, kernels="pallas")
    with caplog.at_level(logging.DEBUG, "minfer_jax"):
        found = attend(q, k, v, jnp.uint32(1), at, held, None, scoring)
    assert "attention in plain XLA: heads of 288 values, more than 256" in caplog.messages
    expected = plain(q, k[1], v[1], at, held, None, scoring)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=2e-6)


def test_a_derivative_is_that_of_the_plain_form():
    q, (k, v) = random(0, 1, 3, 4, 16), caches("float32", 2, 8, 16, 16)
    at, held = batch_of(up_to(5, 3)), batch_of(slots(5, 8))
    scoring = Scoring(scale=0.25, kernels="pallas")

    def loss(q: jax.Array) -> jax.Array:
        return attend(q, k, v, jnp.uint32(1), at, held, None, scoring).sum()

    assert "pallas_call" in str(jax.make_jaxpr(loss)(q))
    assert "pallas_call" not in str(jax.make_jaxpr(jax.grad(loss))(q))


REAL = [  # kernel, T, N, K, H, cache, type of the factors, window
    pytest.param(decode, 1, 9, 3, 64, "float16", "float32", 0, id="smollm2"),
    pytest.param(decode, 1, 4, 1, 256, "float16", "float32", 512, id="gemma3"),
    pytest.param(decode, 1, 32, 8, 128, "q8_0", "float32", 0, id="llama3-q8"),
    pytest.param(decode, 8, 32, 32, 80, "float16", "bfloat16", 0, id="phi-8"),
    pytest.param(decode, 8, 32, 8, 128, "float32", "float32", 0, id="llama3-8"),
    pytest.param(prefill, 512, 9, 3, 64, "float16", "bfloat16", 0, id="smollm2-512"),
    pytest.param(prefill, 512, 4, 1, 256, "float16", "bfloat16", 512, id="gemma3-512"),
    pytest.param(prefill, 500, 32, 8, 128, "q8_0", "bfloat16", 0, id="llama3-500"),
    pytest.param(prefill, 512, 32, 8, 128, "float32", "float32", 0, id="llama3-exact"),
]


@pytest.mark.parametrize(("module", "t", "n", "heads_kv", "h", "kind", "dtype", "window"), REAL)
def test_real_shapes_lower_for_cuda(
    module: ModuleType, t: int, n: int, heads_kv: int, h: int, kind: str, dtype: str, window: int
):
    shape = jax.ShapeDtypeStruct
    planes = jax.eval_shape(lambda: cache.empty((24, 1, heads_kv, 4096, h), kind))
    numbers = [shape(s, jnp.int32) for s in ((), (1, t), (1, 4096))]
    scoring = Scoring(scale=0.1, softcap=30.0, window=window, dtype=dtype, kernels="pallas")
    q, sinks = (shape(s, jnp.float32) for s in ((1, t, n, h), (n,)))
    traced = blocked.trace(q, planes, planes, *numbers, sinks, scoring)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f'name = "{module.NAME}"' in text
    assert "stablehlo.while" not in text  # that of plain XLA
    assert module.NAME not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder: Path = tmp_path_factory.mktemp("model")
    return load(folder, tiny_model("llama"))


@pytest.mark.parametrize(
    ("t", "names"),
    [(1, ["attention_decode", "attention_merge"]), (12, ["attention_prefill"])],
)
def test_a_model_for_cuda_has_the_kernels_and_copies_no_layer(model: tuple, t: int, names: list):
    cfg, params = model
    ids = jnp.zeros((1, t), jnp.int32)
    state = kv.init(cfg, 24)
    layer = [1, *state.k[kv.FULL].shape[1:]]

    def lowered(choice: str) -> str:
        chosen = dataclasses.replace(cfg, arithmetic=arithmetic("default", choice=choice))
        traced = jax.jit(forward, static_argnames=("cfg", "n_out")).trace(
            params, ids, ids, state, cfg=chosen, n_out=t
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    def layers_made(text: str) -> list[str]:
        """Results of one layer's size, with or without the axis of layers."""
        made = re.findall(r"-> \(?tensor<([0-9x]+)x[a-z]\w*>", text)
        return [m for m in made if m in ("x".join(map(str, s)) for s in (layer, layer[1:]))]

    text = lowered("pallas")
    assert [name for name in names if f'name = "{name}"' not in text] == []
    assert layers_made(text) == []
    other = lowered("xla")
    assert [name for name in names if name in other] == []
    assert layers_made(other) != []  # its block of slots is as large as this cache
