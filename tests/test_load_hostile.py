"""Files that no converter writes: refused in one line that names what is wrong, or run right."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelError
from minfer_jax.model.load import load_model
from tests.helpers.gguf_builder import Tensor, dense
from tests.helpers.tiny_models import load, run, save, tiny_model

LAYERS = range(3)


def ones(*shape: int) -> Tensor:
    return dense(np.ones(shape, np.float32))


def refusal(folder: Path, data: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(save(folder, data), precision="highest")
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500
    return message


def logits(folder: Path, data: bytes) -> np.ndarray:
    cfg, params = load(folder, data)
    tokens = jnp.asarray([[5, 2, 7, 1]], jnp.int32)
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    return np.asarray(run(params, tokens, positions, kv.init(cfg, 8, chunk=8), cfg=cfg, n_out=4)[0])


def experts(end: str, width: int, layer: int, *front: int) -> dict[str, Tensor]:
    up = {f"blk.{layer}.ffn_{name}{end}.weight": ones(*front, width, 64) for name in ("gate", "up")}
    return up | {f"blk.{layer}.ffn_down{end}.weight": ones(*front, 64, width)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_of_none(tied: bool, tmp_path: Path):
    message = refusal(tmp_path, tiny_model("llama", n_vocab=0, tied=tied))
    assert "token_embd.weight has shape [0, 64], expected one with elements" in message


@pytest.mark.parametrize(("end", "front"), [("_exps", (6,)), ("_shexp", ())])
def test_experts_of_no_width(end: str, front: tuple[int, ...], tmp_path: Path):
    tensors = {k: v for i in LAYERS for k, v in experts(end, 0, i, *front).items()}
    message = refusal(tmp_path, tiny_model("qwen2moe", tensors=tensors))
    assert f"blk.0.ffn_down{end}.weight has shape {[*front, 64, 0]}, expected one with" in message


@pytest.mark.parametrize(("end", "front"), [("_exps", (6,)), ("_shexp", ())])
def test_the_width_of_experts_may_differ_from_layer_to_layer(
    end: str, front: tuple[int, ...], tmp_path: Path
):
    """Zeros beside them make narrow experts as wide as those of the other layers."""
    narrow = experts(end, 32, 1, *front)
    found = logits(tmp_path, tiny_model("qwen2moe", tensors=narrow))
    wide = {}
    for name, (kind, shape, raw) in narrow.items():
        axis = -1 if "down" in name else -2
        values = np.frombuffer(raw, np.float32).reshape(shape)
        pad = [(0, 0)] * len(shape)
        pad[axis] = (0, (96 if front else 48) - 32)
        values = np.pad(values, pad)
        wide[name] = (kind, values.shape, values.tobytes())
    expected = logits(tmp_path, tiny_model("qwen2moe", tensors=wide))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("left", ["gate", "up", "down"])
def test_a_part_of_a_shared_expert(left: str, tmp_path: Path):
    tensors = {f"blk.1.ffn_{left}_shexp.weight": None}
    message = refusal(tmp_path, tiny_model("qwen2moe", tensors=tensors))
    assert f"blk.1.ffn_{left}_shexp.weight is missing" in message


@pytest.mark.parametrize("arch", ["nemotron", "starcoder2"])
def test_a_gate_that_the_architecture_does_not_have_is_left_out(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    strays = {f"blk.{i}.ffn_gate.weight": ones(96, 64) for i in LAYERS}
    found = logits(tmp_path, tiny_model(arch, tensors=strays))
    assert "not used" in caplog.text
    np.testing.assert_array_equal(found, logits(tmp_path, tiny_model(arch)))


@pytest.mark.parametrize(("one", "width"), [("q", 64), ("k", 32), ("v", 32)])
def test_one_of_the_three_biases_of_a_fused_map(one: str, width: int, tmp_path: Path):
    tensors = {f"blk.0.attn_{one}.bias": ones(width)}
    message = refusal(tmp_path, tiny_model("phi3", tensors=tensors))
    for name in sorted({"q", "k", "v"} - {one}):
        assert f"blk.0.attn_{name}.bias is missing" in message


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("arch", "name"),
    [("llama", "rope_freqs"), ("phi3", "rope_factors_short"), ("phi3", "rope_factors_long")],
)
def test_factors_that_divide_by_nothing(arch: str, name: str, value: float, tmp_path: Path):
    factors = np.full(8, value, np.float32)
    message = refusal(tmp_path, tiny_model(arch, tensors={f"{name}.weight": dense(factors)}))
    assert f"{name}.weight holds {value:.4g}, expected finite factors above 0" in message


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
TINY = np.float64(1e-320)
KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope.freq_base": 1e-45}, "rope.freq_base is 1.40"),
    ("llama", {"rope.freq_base": TINY}, "expected a number above 0 that float32 holds"),
    (
        "llama",
        {"rope.freq_base": 1.2e-38, "rope.scale_linear": 2e-6},
        "RoPE with base 1.2e-38, 16 dimensions and a stretch of 2e-06 turns by more than float32",
    ),
    ("mistral3", YARN | {"rope.scaling.yarn_beta_fast": TINY}, "yarn_beta_fast is"),
    ("mistral3", YARN | {"rope.scaling.yarn_beta_slow": TINY}, "yarn_beta_slow is"),
    ("llama", YARN | {"rope.scaling.attn_factor": 3e38}, "attn_factor and yarn_log_multiplier"),
    ("gpt-oss", YARN | {"rope.freq_base_swa": 1.0}, "freq_base_swa is 1.0, expected a number ab"),
    ("granite", {"logit_scale": 1e-45}, "granite.logit_scale is 1.40"),
    ("llama", {"embedding_length": "x" * 10**6}, "llama.embedding_length is 'xxx"),
    ("llama", {"rope.freq_base": ["long"] * 10**4}, "llama.rope.freq_base is ['long', "),
    ("llama", {"rope.scaling.type": "x" * 10**6}, "llama.rope.scaling.type is 'xxx"),
]


@pytest.mark.parametrize(("arch", "keys", "part"), KEYS, ids=lambda value: str(value)[:40])
def test_values_at_the_edge(arch: str, keys: dict[str, Any], part: str, tmp_path: Path):
    assert part in refusal(tmp_path, tiny_model(arch, keys=keys))


def test_an_architecture_with_a_long_name(tmp_path: Path):
    data = tiny_model("llama", metadata={"general.architecture": "x" * 10**6})
    assert "is not supported" in refusal(tmp_path, data)


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("gemma3", {"context_length": 2**40, "attention.sliding_window": 2**39}),
        ("mistral3", {"context_length": 2**40, "rope.scaling.original_context_length": 2**39}),
        ("mistral3", {"context_length": 2**40, "rope.scaling.original_context_length": 0}),
    ],
)
def test_contexts_longer_than_positions_count(arch: str, keys: dict[str, Any], tmp_path: Path):
    found = logits(tmp_path, tiny_model(arch, keys=keys))
    keys = {key: min(value, 2**31 - 1) for key, value in keys.items()}
    np.testing.assert_array_equal(found, logits(tmp_path, tiny_model(arch, keys=keys)))
