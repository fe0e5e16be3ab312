"""LoRA pairs beside packed weights, held against weights that the pairs were added to."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig, ModelError
from minfer_jax.model.forward import forward
from minfer_jax.model.load import load_model
from minfer_jax.model.lora import Adapter, Pair, fresh, with_lora, with_scales
from minfer_jax.model.lora_file import map_shapes
from minfer_jax.model.params import Params
from tests.helpers.tiny_adapters import merged, random_adapter
from tests.helpers.tiny_models import load, run, save, tiny_model

T = 5
TOKENS = jnp.asarray([[5, 2, 7, 1, 60]], jnp.int32)
POSITIONS = jnp.arange(T, dtype=jnp.int32)[None]
SCALES = [0.5, -1.25]
# Each has maps that others lack, or has them in another form.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"types": {"blk.1.attn_v": "F16", "blk.1.ffn_up": "F16"}},  # two groups, split maps
    "phi3": {"fused_qkv": True, "fused_up": True, "n_layer": 2},
    "qwen2moe": {"n_ff_shared": 32, "shared_gate": True, "n_layer": 2},
    "muse-glimmer": {"tied": True, "n_layer": 2},  # attention has a gate
}


def compiled() -> int:
    return run._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def logits(cfg: ModelConfig, params: Params) -> np.ndarray:
    state = kv.init(cfg, 8, chunk=8)
    return np.asarray(run(params, TOKENS, POSITIONS, state, cfg=cfg, n_out=T)[0])


@pytest.mark.parametrize("arch", MODELS)
def test_pairs_do_what_their_products_do_in_the_weights(arch: str, tmp_path: Path):
    base = save(tmp_path, tiny_model(arch, **MODELS[arch]))
    cfg, params = load_model(base, precision="highest")
    shapes = map_shapes(base)
    assert len(shapes) >= 3 * cfg.n_layer + 1
    few = map_shapes(base, "blk.1.*_[qvku]*")
    adapters = [random_adapter(shapes, 2), random_adapter(few, 5, seed=7, alpha=0.0)]
    adapters[1].pairs.update(random_adapter(map_shapes(base, "blk.0.attn_*"), 4, seed=9).pairs)
    if "output.weight" not in base.tensors:  # else the merged output would change too
        del adapters[0].pairs["token_embd.weight"]
    options = {**MODELS[arch], "types": {}, "tensors": merged(base, adapters, SCALES)}
    expected = logits(*load(tmp_path, tiny_model(arch, **options)))
    got = logits(cfg, with_lora(params, cfg, adapters, SCALES))
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[ModelConfig, Params, dict[str, tuple[int, int]]]:
    """A quantised one."""
    folder = tmp_path_factory.mktemp("lora")
    base = save(folder, tiny_model("llama", weight_type="Q4_0", n_layer=2))
    return *load_model(base, precision="highest"), map_shapes(base)


def test_scales_are_data(model):
    cfg, params, shapes = model
    adapters = [random_adapter(shapes, 2), random_adapter(shapes, 3, seed=4)]
    first = with_lora(params, cfg, adapters, SCALES)
    before = compiled()
    scaled = logits(cfg, first)
    n_compiled = compiled()
    assert n_compiled > before
    other = with_scales(first, [jnp.float32(2.0), 0])
    assert jax.tree.structure(other) == jax.tree.structure(first)
    got = logits(cfg, other)
    np.testing.assert_array_equal(got, logits(cfg, with_lora(params, cfg, adapters, [2.0, 0.0])))
    assert np.abs(got - scaled).max() > 0.1
    np.testing.assert_array_equal(scaled, logits(cfg, with_scales(other, SCALES)))
    assert compiled() == n_compiled
    with pytest.raises(ValueError, match="1 scales for 2 adapters"):
        with_scales(first, [1.0])


def test_without_adapters_the_program_is_as_it_was(model):
    cfg, params, shapes = model
    adapted = with_lora(params, cfg, [random_adapter(shapes)])
    again = with_lora(adapted, cfg, [])
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert jax.tree.structure(adapted) != jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert one is other


def test_a_fresh_pair_changes_nothing_yet(model):
    _, _, shapes = model
    adapter = fresh(shapes, 4, jax.random.key(1), alpha=8.0)
    assert list(adapter.pairs) == list(shapes)
    for name, pair in adapter.pairs.items():
        n, k = shapes[name]
        bound = float(np.abs(pair.a).max()) * k**0.5
        assert 0.8 < bound <= 1.0 and not pair.b.any()
        expected = ((n, 4), (k, 4)) if name == "token_embd.weight" else ((4, k), (n, 4))
        assert (pair.a.shape, pair.b.shape) == expected
    a = [np.asarray(pair.a) for pair in adapter.pairs.values() if pair.a.shape == (4, 64)]
    assert not np.array_equal(a[0], a[1])
    with pytest.raises(ValueError, match=r"rank is 33, expected 1 to 32 for blk.0.attn_k.weight"):
        fresh(map_shapes_of(shapes, "blk.0.attn_k.weight"), 33, jax.random.key(0))


def map_shapes_of(shapes: dict[str, tuple[int, int]], *names: str) -> dict[str, tuple[int, int]]:
    return {name: shapes[name] for name in names}


def test_gradients_of_pairs_and_scales_through_packed_weights(model):
    """Along a random direction of each pair's A and B, and of the scale."""
    cfg, params, shapes = model
    names = ("token_embd.weight", "output.weight", "blk.0.attn_v.weight", "blk.1.attn_q.weight")
    names += ("blk.1.attn_v.weight", "blk.0.ffn_gate.weight", "blk.1.ffn_down.weight")
    adapter = random_adapter(map_shapes_of(shapes, *names), 2)
    weights = jax.random.normal(jax.random.key(3), (1, T, cfg.n_vocab))
    state = kv.init(cfg, 8, chunk=8)

    def loss(of: tuple[Adapter, jax.Array]) -> jax.Array:
        adapted = with_lora(params, cfg, [of[0]], [of[1]])
        found, _ = forward(adapted, TOKENS, POSITIONS, state, cfg=cfg, n_out=T, differentiable=True)
        return jnp.sum(jnp.tanh(found / 10) * weights)

    at = (adapter, jnp.float32(0.7))
    both = jax.jit(jax.value_and_grad(loss))
    leaves, structure = jax.tree.flatten(at)
    assert len(leaves) == 2 * len(names) + 1
    for i, slope in enumerate(jax.tree.leaves(both(at)[1])):
        steepness = jnp.linalg.norm(slope.reshape(-1))
        assert steepness > 0.05
        # Far enough along the steepest direction for rounding not to count, and no farther.
        step = jnp.minimum(0.02 / steepness, 5e-3)
        ends = []
        for sign in (1, -1):
            moved = leaves[i] + sign * step * slope / steepness
            ends.append(both(jax.tree.unflatten(structure, [*leaves[:i], moved, *leaves[i + 1 :]])))
        found = (float(ends[0][0]) - float(ends[1][0])) / (2 * float(step))
        assert found == pytest.approx(float(steepness), rel=2e-2), i


def test_pairs_that_no_map_takes_are_all_named(model):
    cfg, params, shapes = model
    pair = random_adapter(map_shapes_of(shapes, "blk.0.attn_k.weight")).pairs["blk.0.attn_k.weight"]
    wide = Pair(a=pair.a, b=jnp.zeros((33, 3)))
    adapters = [
        Adapter(pairs={"blk.0.attn_k.weight": pair, "blk.2.attn_k.weight": pair}),
        Adapter(pairs={"blk.1.attn_k.weight": wide, "token_embd.weight": pair}),
    ]
    with pytest.raises(ModelError) as caught:
        with_lora(params, cfg, adapters)
    message = str(caught.value)
    assert "blk.0.attn_k" not in message
    assert "blk.2.attn_k.weight: the model has no map for A [3, 64] and B [32, 3]; " in message
    assert "blk.1.attn_k.weight: the model has no map for A [3, 64] and B [33, 3]; " in message
    assert message.endswith("token_embd.weight: the model has no map for A [3, 64] and B [32, 3]")
