"""The model with its values laid open: what each name means, patches, derivatives, vmap."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.names import matching
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Add, Replace
from minfer_jax.model.tap import Captured
from minfer_jax.model.traced import forward_traced, gradients, known_values
from minfer_jax.quant import xla
from minfer_jax.quant.prologue import GATES, applied
from minfer_jax.sampling import SamplingParams, init_state, sample
from tests.helpers.tiny_models import load, run, tiny_model

T = 9
TOKENS = np.array([[(11 * i * i + 5 * i + 2) % 96 for i in range(T)]], np.int32)
OTHERS = np.array([[(7 * i * i + 3 * i + 1) % 96 for i in range(T)]], np.int32)
POSITIONS = np.arange(T, dtype=np.int32)[None]
# Largest difference of values that are the same but for the order of sums. Measured: 2e-5.
CLOSE = 2e-4
# Some of every kind: two groups of layers, windows and post norms; experts and a shared one;
# dense layers before experts; no gate; side by side; sinks; a gate on attention; post norms alone.
KINDS = (
    *("llama", "gemma3", "qwen2moe", "ernie4_5-moe", "nemotron", "command-r", "gpt-oss"),
    *("muse-glimmer", "olmo2"),
)
MIXED = ("gemma3", "ernie4_5-moe")  # whose layers are of several kinds


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


# What the names mean.


@pytest.mark.parametrize("arch", KINDS)
def test_each_value_is_what_its_name_says(arch: str):
    cfg, params = model(arch)
    logits, found = traced(arch)
    assert_close(logits, logits_of(arch))
    known = known_values(params, cfg, (1, T), fresh(cfg))
    assert list(found) == list(known)
    x = np.asarray(found["embd"])
    for layer in range(cfg.n_layer):
        own = {
            name.split(".", 2)[2]: np.asarray(found[name])
            for name in known
            if name.startswith(f"blk.{layer}.")
        }
        for short, value in own.items():
            assert value.shape == known[f"blk.{layer}.{short}"].shape, short
            assert value.any(), short
        check_layer(cfg, params, layer, x, own)
        x = own["residual"]
    group, _ = params.order[-1]
    assert_close(found["output_norm"], applied(jnp.asarray(x), params.output_norm))
    assert_close(found["logits"][0], logits)
    assert group < len(params.groups)


def check_layer(
    cfg: ModelConfig, params: Params, layer: int, x: np.ndarray, own: dict[str, np.ndarray]
) -> None:
    """The relations between a layer's values; x is its input [1, T, D]."""
    scores, weights = own["scores"], own["weights"]
    seen = np.isfinite(scores)
    window = cfg.window if cfg.layers[layer].sliding else T
    apart = POSITIONS[0][:, None] - POSITIONS[0][None]
    assert (seen == ((apart >= 0) & (apart < window))).all()
    groups = cfg.n_head // cfg.n_head_kv
    keys, values = (np.repeat(own[name], groups, axis=2) for name in "kv")
    raw = np.einsum("btnh,bsnh->bnts", own["q"], keys) * cfg.attention_scale
    cap = cfg.attention_softcap
    raw = cap * np.tanh(raw / cap) if cap else raw
    assert_close(scores[seen], raw[seen])
    p = params.groups[params.order[layer][0]]
    if p.sinks is None:
        assert_close(weights, jax.nn.softmax(jnp.asarray(scores), axis=-1))
    else:
        assert (weights.sum(-1) < 1 + 1e-5).all() and weights.sum(-1).mean() < 0.99
    if not p.gated:
        heads = np.einsum("bnts,bsnh->btnh", weights, values)
        assert_close(own["attn_heads"], heads)
    added = own.get("attn_post_norm", own["attn_out"]) * cfg.residual_scale
    assert_close(own["attn_residual"], x + added)
    added = own.get("ffn_post_norm", own["down"]) * cfg.residual_scale
    assert_close(own["residual"], own["attn_residual"] + added)
    if "gate" in own:
        gated = GATES[cfg.activation](jnp.asarray(own["gate"]), jnp.asarray(own["up"]))
        assert_close(own["ffn_act"], gated)
    if "router" in own:
        assert cfg.router is not None
        best = np.sort(own["experts"])
        assert ((best >= 0) & (best < cfg.router.n_expert)).all()
        if p.mlp.choice_bias is None:  # pyright: ignore
            wanted = np.argsort(-own["router"])[..., : cfg.router.n_used]
            np.testing.assert_array_equal(best, np.sort(wanted))


def test_unrolled_layers_have_the_same_values():
    cfg, params = model("gemma3")
    cfg = dataclasses.replace(cfg, unrolled=True)
    names = ("blk.*.residual", "blk.2.scores", "logits")
    _, _, found = program(cfg, names)(params, jnp.asarray(TOKENS))
    _, expected = traced("gemma3", names)
    assert list(found) == list(expected) and len(found) == cfg.n_layer + 2
    jax.tree.map(assert_close, dict(found), dict(expected))


def test_a_step_has_the_values_of_its_row():
    cfg, params = model("gemma3")
    state = kv.init(cfg, 16, chunk=T)
    ids, positions = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    _, state = run(params, ids[:, :-1], positions[:, :-1], state, cfg=cfg, n_out=1)
    names = ("blk.*.q", "blk.*.residual", "blk.2.weights")
    step = jax.jit(partial(forward_traced, cfg=cfg, names=names))
    _, after, found = step(params, ids[:, -1:], positions[:, -1:], state)
    _, expected = traced("gemma3", names)
    assert int(np.asarray(after.positions[kv.FULL]).max()) == T - 1
    for name in found:
        if name.endswith("weights"):
            assert_close(found[name][..., :T], expected[name][:, :, -1:])
            assert found[name].shape[-1] == 16
        else:
            assert_close(found[name], expected[name][:, -1:])


# The program without a tap.


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("t", [1, T])
def test_without_a_tap_nothing_of_it_is_in_the_program(
    arch: str, t: int, monkeypatch: pytest.MonkeyPatch
):
    cfg, params = model(arch)

    def lowered(function: Callable) -> str:
        ids = jnp.zeros((1, t), jnp.int32)
        return jax.jit(function).lower(params, ids, ids, fresh(cfg)).as_text()

    plain = partial(forward, cfg=cfg, n_out=t)
    before, bare = lowered(plain), partial(forward_traced, cfg=cfg, differentiable=False)
    assert len(lowered(lambda *a: bare(*a)[:2])) > len(before)  # norms of their own, and so on
    # The loop carries x, keys and values, and looks up three numbers a layer.
    jaxpr = jax.make_jaxpr(plain)(
        params, jnp.zeros((1, t), jnp.int32), POSITIONS[:, :t], fresh(cfg)
    )
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan.params["num_carry"] <= 5
    assert scan.invars[-1].aval.shape == (cfg.n_layer, 3)
    for name in ("Tap.stacks", "Values.__init__", "Values.__call__"):
        monkeypatch.setattr(f"minfer_jax.model.tap.{name}", None)
    assert lowered(plain) == before


# Patches.


@pytest.mark.parametrize("arch", ["llama", *MIXED])
def test_what_follows_follows_from_the_patch(arch: str):
    """Every value by itself, in one program: what another text has of it changes the logits."""
    cfg, params = model(arch)
    (expected, _), (others, other) = traced(arch), traced(arch, ids=OTHERS)
    names = [name for name in other if name != "blk.0.scores"]

    @jax.jit
    def swapped(params: Params, arrays: Captured, which: dict[str, Any]) -> tuple:
        patches = {name: Replace(arrays[name], which[name]) for name in names}
        logits, _, found = forward_traced(
            params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names="*", patches=patches
        )
        return logits[0], found

    def swap(*chosen: str) -> tuple[np.ndarray, Captured]:
        logits, found = swapped(params, other, {name: np.bool_(name in chosen) for name in names})
        return np.asarray(logits), found

    assert_close(swap()[0], expected)
    for name in names:
        if not name.startswith("blk.0."):
            assert abs(swap(name)[0] - expected).max() > 1e-3, name
    for name in ("embd", "blk.0.residual", "blk.2.residual", "output_norm", "logits"):
        logits, found = swap(name)
        assert_close(logits, others)
        assert_close(found[name], other[name])
    assert_close(swap("blk.0.residual")[1]["blk.2.up"], other["blk.2.up"])
    unlike = abs(np.asarray(swap("blk.0.residual")[1]["embd"]) - np.asarray(other["embd"]))
    assert unlike.max() > 1e-2


def patched(arch: str, patches: Mapping[str, Any], names: Any = ()) -> tuple[np.ndarray, Captured]:
    """As `traced`, with functions too, not kept."""
    cfg, params = model(arch)
    logits, _, found = jax.jit(
        lambda p: forward_traced(
            p, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names=names, patches=patches
        )
    )(params)
    return np.asarray(logits)[0], found


def test_arrays_functions_and_sums_say_the_same():
    direction = np.linspace(-1, 1, 64, dtype=np.float32)
    layers = "blk.[02].attn_out"
    expected, found = patched("gemma3", {layers: lambda x: x + direction[None, None]}, layers)
    assert list(found) == ["blk.0.attn_out", "blk.2.attn_out"]
    assert abs(expected - traced("gemma3")[0]).max() > 0.1
    assert_close(patched("gemma3", {layers: Add(direction)})[0], expected)
    # Of layer 2 what it has become, after layer 0 was changed.
    arrays = {"blk.0.attn_out": Add(direction), "blk.2.attn_out": found["blk.2.attn_out"]}
    assert_close(patched("gemma3", arrays)[0], expected)


def test_two_functions_for_one_name():
    _, found = patched(
        "llama",
        {
            "blk.0.up": lambda x: x * 2.0,
            "blk.2.up": lambda x: x * 3.0,
            "blk.*.gate": jnp.zeros_like,
        },
        "blk.*.*",
    )
    for layer in range(3):
        assert not np.asarray(found[f"blk.{layer}.ffn_act"]).any()
        before = np.asarray(found[f"blk.{layer}.attn_residual"])
        np.testing.assert_array_equal(before, np.asarray(found[f"blk.{layer}.residual"]))


def test_where_leaves_the_rest_alone():
    untouched, own = traced("llama")
    where = np.arange(T)[:, None] == 4
    for patch, expected in ((Replace(7.0, where), 7.0), (Add(2.0, where), None)):
        logits, found = patched("llama", {"blk.1.residual": patch}, "blk.1.residual")
        wanted = np.array(own["blk.1.residual"])
        wanted[:, 4] = wanted[:, 4] + 2.0 if expected is None else expected
        assert_close(found["blk.1.residual"], wanted)
        assert_close(logits[:4], untouched[:4])
        assert abs(logits[4:] - untouched[4:]).max(1).all()


def test_values_outside_of_layers():
    logits, found = patched("llama", {"logits": lambda x: x - 1.0}, "logits")
    assert_close(logits, logits_of("llama") - 1.0)
    assert_close(found["logits"][0], logits)


def test_the_future_stays_masked():
    logits, found = patched("llama", {"blk.*.scores": 0.0}, "blk.0.weights")
    even = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    assert_close(found["blk.0.weights"][0], np.broadcast_to(even, (4, T, T)))
    assert np.isfinite(logits).all()


def test_experts_are_chosen_by_a_patch():
    names = "blk.*.down"
    _, found = patched("qwen3moe", {"blk.0.experts": 1, "blk.0.expert_weights": 0.5}, names)
    _, high = patched("qwen3moe", {"blk.0.experts": 1000, "blk.0.expert_weights": 0.5}, names)
    n = model("qwen3moe")[0].router.n_expert  # pyright: ignore
    _, last = patched("qwen3moe", {"blk.0.experts": n - 1, "blk.0.expert_weights": 0.5}, names)
    assert_close(high["blk.0.down"], last["blk.0.down"])
    assert abs(found["blk.0.down"] - last["blk.0.down"]).max() > 1e-3


def test_a_soft_prompt_stands_for_its_rows():
    cfg, params = model("gemma3")
    _, other = traced("gemma3", "embd", OTHERS)
    soft = other["embd"][:, :4]
    prompted = jax.jit(partial(forward_traced, cfg=cfg, differentiable=False))
    logits, _, _ = prompted(params, TOKENS, POSITIONS, fresh(cfg), embeddings=soft)
    mixed = np.concatenate([OTHERS[:, :4], TOKENS[:, 4:]], axis=1)
    assert_close(logits[0], logits_of("gemma3", mixed))


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "blk.*.foo"}, r"'blk.\*.foo' is no name.*blk.N.attn_out.* N from 0 to 2"),
        ({"patches": {"blk.7.up": 0.0}}, "'blk.7.up' is no name"),
        ({"names": "blk.0.router"}, "no name"),
        ({"patches": {"blk.1.up": 0.0, "blk.*.up": 0.0}}, r"blk.1.up has two patches, 'blk.\*.up'"),
        ({"patches": {"blk.1.up": np.zeros((5, 96))}}, r"\[5, 96\], expected \[1, 9, 96\] \(B T F"),
        ({"patches": {"blk.1.up": np.zeros((1, 1, 9, 96))}}, r"expected \[1, 9, 96\]"),
        ({"patches": {"blk.1.up": "x"}}, "a patch is str, expected an array, a function"),
        ({"patches": {"blk.1.up": lambda x: x[:, 0]}}, "expected it to keep shape and dtype"),
        (
            {"names": "*", "max_bytes": 10_000},
            r"48 values of .* but at most 0.01 MB .*: ask for fewer",
        ),
        ({"embeddings": np.zeros((1, T + 1, 64))}, r"\[1, 10, 64\], expected \[B=1, up to T=9"),
        ({"embeddings": np.zeros((T, 64))}, r"\[9, 64\], expected \[B=1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str):
    cfg, params = model("llama")
    with pytest.raises(ValueError, match=message):
        forward_traced(params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, **options)


def test_integers_have_no_derivative():
    cfg, params = model("qwen3moe")
    with pytest.raises(ValueError, match=r"blk.0.experts holds integers"):
        gradients(jnp.sum, params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names="blk.0.e*")


def test_a_quantised_cache():
    cfg, params = model("qwen3")  # heads of 32
    cfg = dataclasses.replace(cfg, cache_dtype="q8_0")
    with pytest.raises(ValueError, match="q8_0"):
        program(cfg, "blk.0.scores")(params, jnp.asarray(TOKENS))
    rounded = program(cfg, "blk.0.scores", differentiable=False)
    logits, _, found = rounded(params, jnp.asarray(TOKENS))
    expected, _ = run(
        params, jnp.asarray(TOKENS), jnp.asarray(POSITIONS), fresh(cfg), cfg=cfg, n_out=T
    )
    assert abs(logits - expected).max() < 0.02 and len(found) == 1


# Derivatives, through packed weights.

DIFFERENTIATED = (
    *("embd", "blk.0.attn_norm", "blk.1.q", "blk.1.k", "blk.0.v", "blk.1.scores", "blk.0.weights"),
    *("blk.0.attn_heads", "blk.1.attn_out", "blk.0.attn_residual", "blk.1.gate", "blk.0.up"),
    *("blk.1.ffn_act", "blk.0.down", "blk.0.residual", "blk.1.residual", "output_norm", "logits"),
)
# Mixed as Q4_K_M is: two groups of layers.
PACKED = {
    "weight_type": "Q4_K",
    "types": {"blk.1.ffn_down": "Q6_K"},
    **{"width": 256, "n_ff": 256, "n_head": 2, "n_head_kv": 1, "n_layer": 2, "n_vocab": 96},
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Params]:
    cfg, params = load(tmp_path_factory.mktemp("packed"), tiny_model("llama", **PACKED))
    assert len(params.groups) == 2
    return cfg, params


def loss_of(logits: jax.Array) -> jax.Array:
    chosen = jax.nn.log_softmax(logits[0, :-1])
    return -jnp.take_along_axis(chosen, jnp.asarray(TOKENS[0, 1:, None]), -1).mean()


def slope(function: Callable[[Any], jax.Array], at: Any, direction: Any, step: float) -> float:
    """The derivative along a direction, by differences of fourth order."""

    def moved(by: float) -> float:
        return float(function(jax.tree.map(lambda a, d: a + jnp.float32(by) * d, at, direction)))

    near, far = moved(step) - moved(-step), moved(2 * step) - moved(-2 * step)
    return (8 * near - far) / (12 * step)


def test_gradients_are_those_of_finite_differences(packed: tuple[ModelConfig, Params]):
    cfg, params = packed

    @jax.jit
    def found_for(params: Params) -> tuple:
        return gradients(
            loss_of, params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names=DIFFERENTIATED
        )

    @jax.jit
    def loss(deltas: dict[str, jax.Array]) -> jax.Array:
        patches = {name: Add(delta) for name, delta in deltas.items()}
        logits, _, _ = forward_traced(
            params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, patches=patches
        )
        return loss_of(logits)

    value, values, slopes = found_for(params)
    assert list(values) == list(slopes) == matching(DIFFERENTIATED, list(values))
    zeros = {name: jnp.zeros_like(values[name]) for name in values}
    assert float(value) == pytest.approx(float(loss(zeros)), rel=1e-5)
    rng = np.random.default_rng(0)
    for name in values:
        own = np.asarray(slopes[name])
        assert np.isfinite(own).all(), name
        # Along the gradient itself, and across it somewhat: so the difference is well above noise.
        size = np.linalg.norm(own)
        noise = rng.standard_normal(own.shape).astype(np.float32)
        direction = own / size + 0.3 * noise / np.linalg.norm(noise)
        moved = {**{k: jnp.zeros_like(v) for k, v in zeros.items()}, name: jnp.asarray(direction)}
        step = 0.02 * min(1.0, 1.0 / size)
        expected = slope(loss, zeros, moved, step)
        assert float(np.vdot(own, direction)) == pytest.approx(expected, rel=2e-2), name


def test_derivatives_of_patches_and_of_a_soft_prompt(packed: tuple[ModelConfig, Params]):
    cfg, params = packed
    rng = np.random.default_rng(1)
    soft = xla.rows(params.token_embd, jnp.arange(3, dtype=jnp.int32))[None]
    at = {"soft": soft, "vector": jnp.zeros(cfg.n_embd)}

    @jax.jit
    def loss(of: dict[str, jax.Array]) -> jax.Array:
        logits, _, _ = forward_traced(
            params,
            *(TOKENS, POSITIONS, fresh(cfg)),
            cfg=cfg,
            embeddings=of["soft"],
            patches={"blk.0.residual": lambda x: x + of["vector"][None, None]},
        )
        return loss_of(logits)

    found = jax.jit(jax.grad(loss))(at)
    for name, own_slope in found.items():
        noise = rng.standard_normal(own_slope.shape)
        direction = np.asarray(own_slope / jnp.linalg.norm(own_slope) + 0.05 * noise, np.float32)
        moved = {**{k: jnp.zeros_like(v) for k, v in at.items()}, name: jnp.asarray(direction)}
        expected = slope(loss, at, moved, 0.005)
        assert float(jnp.vdot(own_slope, direction)) == pytest.approx(expected, rel=2e-2), name


# Many at once.


def test_vmap_over_prompts():
    cfg, params = model("gemma3")
    names = ("blk.*.attn_out", "blk.1.scores", "embd")
    both = jnp.asarray(np.stack([TOKENS, OTHERS]))

    def one(ids: jax.Array) -> tuple:
        logits, _, found = forward_traced(
            params, ids, POSITIONS, fresh(cfg), cfg=cfg, names=names, differentiable=False
        )
        return logits, found

    logits, found = jax.jit(jax.vmap(one))(both)
    for i, ids in enumerate((TOKENS, OTHERS)):
        expected, single = traced("gemma3", names, ids)
        assert_close(logits[i, 0], expected)
        assert list(found) == list(single)
        for name in single:
            assert_close(found[name][i], single[name])


def test_vmap_over_patches():
    cfg, params = model("llama")
    rows = jnp.eye(T, dtype=bool)[:, None, :, None]  # each position by itself

    def one(where: jax.Array) -> tuple:
        patch = {"blk.1.residual": Replace(0.0, where)}
        logits, _, found = forward_traced(
            params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names="blk.2.up", patches=patch
        )
        return logits, found["blk.2.up"]

    logits, up = jax.jit(jax.vmap(one))(rows)
    for position in (0, 5):
        patch = {"blk.1.residual": Replace(0.0, rows[position])}
        expected, found = patched("llama", patch, "blk.2.up")
        assert_close(logits[position, 0], expected)
        assert_close(up[position], found["blk.2.up"])


def test_vmap_over_sampling_keys():
    logits = jnp.asarray(traced("llama")[0][-1:])
    chosen = [SamplingParams(temperature=1.5, top_k=20, seed=seed) for seed in range(6)]
    states = [init_state(c, []) for c in chosen]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    args = chosen[0].arrays()
    one = jax.jit(lambda state: sample(logits, state, args))
    tokens, _ = jax.jit(jax.vmap(one))(stacked)
    expected = [int(one(state)[0][0]) for state in states]
    assert tokens[:, 0].tolist() == expected
    assert len(set(expected)) > 1
