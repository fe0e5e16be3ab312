"""The model with its values laid open: what each name means, patches, derivatives, vmap."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Add, Replace
from minfer_jax.model.tap import Captured
from minfer_jax.model.traced import forward_traced, gradients, known_values
from minfer_jax.quant.prologue import GATES, applied
from tests.helpers.laid_open import (
    OTHERS,
    POSITIONS,
    TOKENS,
    T,
    assert_close,
    fresh,
    logits_of,
    model,
    patched,
    program,
    traced,
)
from tests.helpers.tiny_models import run

# Some of every kind: two groups of layers, windows and post norms; experts and a shared one;
# dense layers before experts; no gate; side by side; sinks; a gate on attention; post norms alone.
KINDS = (
    *("llama", "gemma3", "qwen2moe", "ernie4_5-moe", "nemotron", "command-r", "gpt-oss"),
    *("muse-glimmer", "olmo2"),
)
MIXED = ("gemma3", "ernie4_5-moe")  # whose layers are of several kinds


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
