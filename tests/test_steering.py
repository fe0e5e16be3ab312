"""Control vectors, held against biases that add the same; and their files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig, ModelError
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.model.steering import with_control_scales, with_control_vectors
from minfer_jax.model.steering_file import read_control_vector
from tests.helpers.gguf_builder import Tensor, build_gguf, dense
from tests.helpers.tiny_models import load, run, save, tiny_model

N_LAYER, WIDTH = 4, 64
TOKENS = jnp.asarray([[5, 2, 7, 1]], jnp.int32)
# Alike but for one layer: two groups. What its last map's bias adds is what a direction adds.
MODEL: dict[str, Any] = {
    "n_layer": N_LAYER,
    "biases": ("ffn_down",),
    "types": {"blk.1.ffn_up": "F16"},
}
BIASES = np.random.default_rng(0).normal(size=(N_LAYER, WIDTH)).astype(np.float32)


def with_biases(biases: np.ndarray) -> bytes:
    tensors = {f"blk.{i}.ffn_down.bias": dense(row) for i, row in enumerate(biases)}
    return tiny_model("llama", **MODEL, tensors=tensors)


def compiled() -> int:
    return run._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def logits(cfg: ModelConfig, params: Params) -> np.ndarray:
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    state = kv.init(cfg, 8, chunk=8)
    return np.asarray(run(params, TOKENS, positions, state, cfg=cfg, n_out=2)[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[ModelConfig, Params]:
    return load(tmp_path_factory.mktemp("steered"), with_biases(BIASES))


def test_they_add_up_within_their_layers(model, tmp_path: Path):
    cfg, params = model
    rng = np.random.default_rng(1)
    vectors = [jnp.asarray(rng.normal(size=(N_LAYER, WIDTH)), jnp.float32) for _ in range(2)]
    n = compiled()
    for scales, layers in (([1.0, 0.5], None), ([-2.0, 1.0], (1, 2)), ([0.7, 0.0], (3, 3))):
        steered = with_control_vectors(params, vectors, scales, layers)
        first, last = layers or (0, N_LAYER - 1)
        total = np.einsum("v,vld->ld", np.asarray(scales, np.float32), np.stack(vectors))
        added = np.zeros((N_LAYER, WIDTH), np.float32)
        added[first : last + 1] = total[first : last + 1]
        expected = logits(*load(tmp_path, with_biases(BIASES + added)))
        np.testing.assert_allclose(logits(cfg, steered), expected, atol=1e-4, rtol=1e-4)
    assert compiled() == n + 2, "scales and ranges are data"
    again = with_control_scales(with_control_vectors(params, vectors), [0.7, 0.0])
    kept = with_control_vectors(params, vectors, [0.7, 0.0])
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(one, other)
    without = with_control_vectors(again, [])
    assert jax.tree.structure(without) == jax.tree.structure(params)


def test_what_does_not_fit_the_weights(model):
    _, params = model
    vector = jnp.zeros((N_LAYER, WIDTH))
    with pytest.raises(ValueError, match=r"has shape \[4, 63\], expected \[4, 64\]"):
        with_control_vectors(params, [vector[:, 1:]])
    with pytest.raises(ValueError, match="layers 2 to 4 are asked for, expected some of 0-3"):
        with_control_vectors(params, [vector], layers=(2, 4))
    with pytest.raises(ValueError, match="2 scales for 1 control vectors"):
        with_control_vectors(params, [vector], [1.0, 2.0])


KEYS = {"general.architecture": "controlvector", "controlvector.model_hint": "llama"}


def direction(width: int = WIDTH, value: float = 1.0) -> Tensor:
    return dense(np.full(width, value, np.float32))


def test_a_file_gives_the_layers_that_it_has(model, tmp_path: Path, caplog):
    tensors = {"direction.1": direction(), "direction.3": direction(value=-2.5)}
    found = read_control_vector(save(tmp_path, build_gguf(KEYS, tensors)), model[0])
    assert found.shape == (N_LAYER, WIDTH) and found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 0], [0, 1, 0, -2.5])
    assert not caplog.text
    other = build_gguf({**KEYS, "controlvector.model_hint": "qwen2"}, tensors)
    read_control_vector(save(tmp_path, other), model[0])
    assert "made for 'qwen2', this is llama" in caplog.text


BAD: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
    ({"general.architecture": "llama"}, {"direction.1": direction()}, "it is no control vector"),
    ({}, {}, "it has no tensors"),
    ({}, {"direction.0": direction()}, "tensor 'direction.0' is not direction.1 to direction.3"),
    ({}, {"direction.4": direction()}, "tensor 'direction.4' is not direction.1 to direction.3"),
    ({}, {"direction.01": direction()}, "tensor 'direction.01' is not"),
    ({}, {"direct\nion": direction()}, r"tensor 'direct\nion' is not"),
    ({}, {"direction.1": direction(32)}, "direction.1 has shape [32], expected [64]"),
    ({}, {"direction.1": direction(value=np.inf)}, "values that are not finite"),
    ({}, {"direction.1": direction(3), "x": direction()}, "expected [64]; tensor 'x' is not"),
]


@pytest.mark.parametrize(("keys", "tensors", "why"), BAD)
def test_files_that_are_refused(keys, tensors, why: str, model, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        read_control_vector(save(tmp_path, build_gguf({**KEYS, **keys}, tensors)), model[0])
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and why in message and message.isprintable()


def test_tensors_of_16_bits(tmp_path: Path):
    cfg, _ = load_model(save(tmp_path, tiny_model("llama", n_layer=2)), precision="highest")
    tensors = {"direction.1": dense(np.full(WIDTH, 0.5, np.float16))}
    found = read_control_vector(save(tmp_path, build_gguf(KEYS, tensors), "v.gguf"), cfg)
    np.testing.assert_array_equal(found[1], 0.5)
