"""From a file to configuration and weights: what is refused, warned of, grouped and expanded."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.gguf import GGUFFile
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import LayerSpec, ModelError
from minfer_jax.model.load import load_model, read_model_config
from minfer_jax.model.params import Experts, Mlp, pick
from minfer_jax.model.registry import ARCHS
from minfer_jax.quant import xla
from minfer_jax.quant.matmul import EXACT
from minfer_jax.quant.prologue import RmsNorm
from tests.helpers.gguf_builder import Tensor, dense
from tests.helpers.tiny_models import load, run, save, tiny_model
from tests.helpers.tiny_options import EXPERT_MAPS, EXPERTS
from tests.helpers.tiny_tensors import encode

TOKENS = jnp.asarray([[(11 * i * i + 5 * i + 2) % 96 for i in range(9)]], jnp.int32)


def logits(folder: Path, data: bytes, n: int = 9) -> np.ndarray:
    """Float32 [n, V] of the first n of TOKENS."""
    cfg, params = load(folder, data)
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    state = kv.init(cfg, 16, chunk=16)
    return np.asarray(run(params, TOKENS[:, :n], positions, state, cfg=cfg, n_out=n)[0][0])


def refusal(folder: Path, data: bytes) -> str:
    """The message with which a file is refused, less its path."""
    file = save(folder, data)
    with pytest.raises(ModelError) as caught:
        load_model(file, precision="highest")
    message = str(caught.value)
    assert message.startswith(f"{file.path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{file.path}: ")


# What is refused.


def test_everything_wrong_with_the_tensors_is_said_at_once(tmp_path: Path):
    wrong: dict[str, Tensor | None] = {
        "blk.0.attn_q.weight": None,
        "blk.1.attn_norm.weight": dense(np.zeros(63, np.float32)),
        "blk.2.ffn_down.weight": dense(np.zeros((96, 64), np.float32)),
        "blk.2.ffn_up.bias": dense(np.zeros(64, np.float32)),
        "blk.2.ffn_up.scale": dense(np.zeros(96, np.float32)),
        "output.weight": dense(np.zeros((96, 64), np.int32)),
        "rope_freqs.weight": dense(np.zeros(16, np.float32)),
    }
    message = refusal(tmp_path, tiny_model("llama", tensors=wrong))
    for part in (
        "blk.0.attn_q.weight is missing",
        "blk.1.attn_norm.weight has shape [63], expected [64]",
        "blk.2.ffn_down.weight has shape [96, 64], expected [64, 96]",
        "blk.2.ffn_up.bias has shape [64], expected [96]",
        "blk.2.ffn_up.scale has shape [96], expected [1]",
        "output.weight has type I32, which cannot be read; expected BF16, F16, F32, IQ1_M, IQ1_S",
        "rope_freqs.weight has shape [16], expected [8]",
    ):
        assert part in message


def test_many_problems_are_counted(tmp_path: Path):
    message = refusal(tmp_path, tiny_model("llama", keys={"feed_forward_length": 95}))
    assert message.count("expected [95, 64]") + message.count("expected [64, 95]") == 8
    assert message.endswith(" (and 1 more)")


def test_extras_of_a_tied_output_are_checked(tmp_path: Path):
    wrong = {"output.bias": dense(np.zeros(95, np.float32))}
    message = refusal(tmp_path, tiny_model("llama", tied=True, tensors=wrong))
    assert message == "output.bias has shape [95], expected [96]"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "token_embd.weight: found no such tensor, expected [vocabulary, width]"),
        (np.zeros(64, np.float32), "token_embd.weight: found shape [64], expected [voc"),
        (np.zeros((96, 32), np.float32), "token_embd.weight has shape [96, 32], expected [96, 64]"),
    ],
)
def test_no_embedding(tensor: np.ndarray | None, message: str, tmp_path: Path):
    tensors = {"token_embd.weight": None if tensor is None else dense(tensor)}
    assert refusal(tmp_path, tiny_model("llama", tensors=tensors)).startswith(message)


def test_an_unknown_architecture_lists_those_that_are_known(tmp_path: Path):
    metadata = {"general.architecture": "rwkv9"}
    message = refusal(tmp_path, tiny_model("llama", metadata=metadata))
    assert "'rwkv9' is not supported" in message
    assert message.endswith(f"supported are {', '.join(sorted(ARCHS))}")


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"embedding_length": None}, "no key llama.embedding_length, which this architecture needs"),
    (
        {"embedding_length": "wide"},
        "llama.embedding_length is 'wide', expected a whole number >= 1",
    ),
    ({"embedding_length": 64.0}, "llama.embedding_length is 64.0, expected a whole number >= 1"),
    ({"embedding_length": True}, "llama.embedding_length is True, expected a whole number"),
    ({"block_count": 0}, "llama.block_count is 0, expected a whole number >= 1"),
    ({"block_count": 4_000_000_000}, "llama.block_count is 4000000000, expected at most 4096"),
    ({"context_length": -5}, "llama.context_length is -5, expected a whole number >= 1"),
    ({"attention.head_count": 5}, "head_count 5 is not a multiple of head_count_kv 2"),
    ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv is 0, expected a whole"),
    ({"attention.head_count_kv": [2, 1, 2]}, "differs from layer to layer ([2, 1, 2]...)"),
    ({"attention.value_length": 8}, "blk.0.attn_v.weight has shape [32, 64], expected [16, 64]"),
    ({"attention.layer_norm_rms_epsilon": None}, "no key llama.attention.layer_norm_rms_epsilon"),
    ({"attention.layer_norm_rms_epsilon": float("nan")}, "is nan, expected a number >= 0"),
    ({"rope.dimension_count": 7}, "llama.rope.dimension_count is 7, expected an even number"),
    ({"rope.dimension_count": 18}, "is 18, expected an even number up to 16"),
    ({"rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0, expected a number above 0"),
    ({"rope.freq_base": float("inf")}, "llama.rope.freq_base is inf, expected a number above 0"),
    ({"rope.scaling.type": "su"}, "'su', expected one of none, linear, yarn, longrope"),
    ({"rope.scaling.type": 1}, "llama.rope.scaling.type is 1, expected a string"),
    ({"rope.scaling.factor": -4.0}, "llama.rope.scaling.factor is -4.0, expected a number >= 0"),
    ({"expert_count": 4}, "no key llama.expert_used_count"),
    ({"expert_count": 4, "expert_used_count": 0}, "expert_used_count is 0, expected a whole"),
    (
        {"expert_count": 4, "expert_used_count": 5},
        "llama.expert_used_count is 5, but there are 4 experts",
    ),
    (
        {"expert_count": 4, "expert_used_count": 2, "expert_group_count": 2},
        "llama.expert_group_count: groups of experts are not supported",
    ),
    ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3, expected less than block_count 3"),
    (
        {"rope.scaling.type": "yarn", "rope.freq_base": 1.0},
        "rope.freq_base is 1.0, expected a number above 1",
    ),
]


@pytest.mark.parametrize(("keys", "message"), KEYS, ids=lambda value: str(value)[:50])
def test_wrong_keys(keys: dict[str, Any], message: str, tmp_path: Path):
    assert message in refusal(tmp_path, tiny_model("llama", keys=keys))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("beta_fast", 0.0, "yarn_beta_fast is 0.0, expected a number above 0"),
        ("beta_slow", -1.0, "yarn_beta_slow is -1.0, expected a number above 0"),
        ("log_multiplier", -20.0, "yarn_log_multiplier is -20.0, expected a number >= 0"),
    ],
)
def test_wrong_constants_of_yarn(key: str, value: float, message: str, tmp_path: Path):
    keys = {"rope.scaling.type": "yarn", f"rope.scaling.yarn_{key}": value}
    assert message in refusal(tmp_path, tiny_model("mistral3", keys=keys))


def test_a_sliding_pattern_that_is_too_short(tmp_path: Path):
    keys = {"attention.sliding_window_pattern": [True, False]}
    message = refusal(tmp_path, tiny_model("gemma3", keys=keys))
    assert "sliding_window_pattern has 2 entries, expected 4, one a layer" in message


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("granite", "attention.scale", -1.0, "scale is -1.0, expected a number >= 0"),
        ("cohere2", "logit_scale", None, "no key cohere2.logit_scale"),
        ("cohere2", "attention.sliding_window", None, "no key cohere2.attention.sliding_window"),
        ("gpt-oss", "attention.sliding_window", None, "no key gpt-oss.attention.sliding_window"),
        ("gpt-oss", "attention.sliding_window", 0, "is 0, expected a whole number >= 1"),
    ],
)
def test_wrong_keys_of_an_architecture(
    arch: str, key: str, value: Any, message: str, tmp_path: Path
):
    assert message in refusal(tmp_path, tiny_model(arch, keys={key: value}))


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("llama", "attention.scale", 0.03),
        ("granitemoe", "rope.scaling.finetuned", False),
        ("exaone4", "attention.sliding_window", 8),  # of the 32B alone
        ("phi3", "attention.sliding_window", 8),
    ],
)
def test_keys_without_effect(arch: str, key: str, value: Any, tmp_path: Path):
    """llama.cpp's logits are the same with them and without."""
    assert config(tmp_path, arch, keys={key: value}) == config(tmp_path, arch)


def test_an_unknown_precision(tmp_path: Path):
    with pytest.raises(ValueError, match=r"precision is 'half', expected one of highest, default"):
        load_model(save(tmp_path, tiny_model("llama")), precision="half")


def test_a_cache_that_does_not_take_the_heads_is_refused_before_a_weight_is_read(tmp_path: Path):
    file, sizes = save(tmp_path, tiny_model("llama")), []
    with pytest.raises(ModelError, match=r"tiny.gguf: a q8_0 cache takes .* have 16; choose"):
        load_model(file, cache_type="q8_0", on_bytes=sizes.append)
    assert sizes == []


# What is read.


def config(folder: Path, arch: str, **options: Any):
    return read_model_config(save(folder, tiny_model(arch, **options)), "highest")


def test_configuration_of_gemma3(tmp_path: Path):
    cfg = config(tmp_path, "gemma3")
    assert (cfg.n_layer, cfg.n_embd, cfg.n_ff, cfg.n_vocab, cfg.n_ctx_train) == (4, 64, 96, 96, 256)
    assert (cfg.n_head, cfg.n_head_kv, cfg.head_dim, cfg.window) == (4, 1, 24, 8)
    assert cfg.layers == tuple(LayerSpec(sliding=s, rope=int(s)) for s in (True, True, False, True))
    assert [rope.base for rope in cfg.ropes] == [1e6, 1e4]
    assert (cfg.embedding_scale, cfg.attention_scale) == (8.0, pytest.approx(24**-0.5))
    assert (cfg.activation, cfg.arithmetic, cfg.cache_dtype) == ("gelu", EXACT, "float32")
    assert hash(cfg) == hash(dataclasses.replace(cfg))


def test_an_rms_norm_has_no_bias(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bias = dense(np.ones(64, np.float32))
    load(tmp_path, tiny_model("llama", tensors={"blk.0.attn_norm.bias": bias}))
    assert "1 tensors are not used by architecture llama: blk.0.attn_norm.bias" in caplog.text


def test_one_value_for_all_layers_may_be_an_array(tmp_path: Path):
    assert config(tmp_path, "llama", keys={"attention.head_count_kv": [2, 2, 2]}).n_head_kv == 2


def test_defaults_of_keys(tmp_path: Path):
    left_out = dict.fromkeys(
        (
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
            "rope.freq_base",
        )
    )
    cfg = config(tmp_path, "llama", n_head_kv=4, keys=left_out)
    assert (cfg.n_head_kv, cfg.head_dim) == (4, 16)
    assert (cfg.ropes[0].dims, cfg.ropes[0].base, cfg.ropes[0].magnitude) == (16, 10000.0, 1.0)
    assert cfg == config(tmp_path, "llama", n_head_kv=4)


def test_a_factor_of_zero_is_none(tmp_path: Path):
    # As in llama.cpp; some converters write it.
    cfg = config(tmp_path, "llama", keys={"rope.scaling.factor": 0.0})
    assert cfg.ropes[0].freq_scale == 1.0


def test_a_tied_output_is_the_embedding(tmp_path: Path):
    _, params = load(tmp_path, tiny_model("llama", tied=True))
    assert params.output.weight is params.token_embd
    leaves = jax.tree.leaves(params)
    tied = jax.tree.leaves(params.token_embd)
    assert params.nbytes == sum(a.nbytes for a in leaves) - sum(a.nbytes for a in tied)
    _, params = load(tmp_path, tiny_model("llama"))
    assert params.output.weight is not params.token_embd


def test_progress_counts_every_weight_once(tmp_path: Path):
    file = save(tmp_path, tiny_model("gemma3", weight_type="Q8_0", types={"blk.1.ffn_up": "F16"}))
    sizes: list[int] = []
    load_model(file, precision="highest", on_bytes=sizes.append)
    matrices = [t.nbytes for t in file.tensors.values() if len(t.shape) == 2]
    assert sorted(sizes) == sorted(matrices)


def test_a_layer_out_of_its_stack(tmp_path: Path):
    _, params = load(tmp_path, tiny_model("llama", types={"blk.1.ffn_down": "F16"}))
    assert params.order == ((0, 0), (1, 0), (0, 1))
    file = save(tmp_path, tiny_model("llama"))
    for i in range(3):
        group, index = params.order[i]
        layer = pick(params.groups[group], index)
        assert isinstance(layer.attn_norm, RmsNorm) and isinstance(layer.mlp, Mlp)
        norm = file.raw(f"blk.{i}.attn_norm.weight").view(np.float32)
        np.testing.assert_array_equal(np.asarray(layer.attn_norm.own()), norm)
        down = xla.dequantize(layer.mlp.down.weight, jnp.dtype("float32"))
        expected = file.raw(f"blk.{i}.ffn_down.weight").view(np.float32).T
        np.testing.assert_allclose(np.asarray(down), expected, atol=1e-3)


def test_a_fused_qkv_equals_separate_ones(tmp_path: Path):
    options: dict[str, Any] = {"biases": ("attn_q", "attn_k", "attn_v"), "weight_type": "Q8_0"}
    separate = load(tmp_path, tiny_model("llama", **options))[1]
    fused = load(tmp_path, tiny_model("llama", fused_qkv=True, **options))[1]
    assert jax.tree.structure(fused) == jax.tree.structure(separate)
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(separate), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Formats.


def as_floats(file: GGUFFile) -> dict[str, Tensor | None]:
    """Every tensor of a file, dequantised by gguf-py."""
    out: dict[str, Tensor | None] = {}
    for name, info in file.tensors.items():
        kind = gguf.GGMLQuantizationType(info.ggml_type)
        values = gguf.quants.dequantize(file.raw(name), kind)
        out[name] = dense(np.ascontiguousarray(values, np.float32).reshape(info.shape))
    return out


MIXES: dict[str, tuple[dict[str, Any], list[int]]] = {  # options, group of each layer
    # As quantisers mix them: Q6_K where it matters most, in some layers only; the head in Q6_K.
    "Q4_K_M": (
        {
            "n_layer": 4,
            "width": 256,
            "n_ff": 256,
            "weight_type": "Q4_K",
            "types": {
                "token_embd": "Q6_K",
                "output": "Q6_K",
                **{f"blk.{i}.{name}": "Q6_K" for i in (0, 3) for name in ("attn_v", "ffn_down")},
            },
        },
        [0, 1, 1, 0],
    ),
    # Types that cannot lie side by side, in one layer.
    "all kinds": (
        {
            "n_layer": 2,
            "weight_type": "Q8_0",
            "types": {
                "token_embd": "F16",
                "blk.0.attn_q": "Q4_0",
                "blk.0.ffn_up": "Q5_1",
                "blk.1.attn_output": "BF16",
                "output": "F32",
            },
            "biases": ("attn_k",),
        },
        [0, 1],
    ),
}


@pytest.mark.parametrize(("mix", "n"), [("Q4_K_M", 9), ("all kinds", 2)])
def test_mixed_formats_give_the_logits_of_their_values(mix: str, n: int, tmp_path: Path):
    options, groups = MIXES[mix]
    data = tiny_model("llama", **options)
    plain = tiny_model("llama", **options, tensors=as_floats(save(tmp_path, data)))
    _, params = load(tmp_path, data)
    assert params.order == tuple((g, groups[:i].count(g)) for i, g in enumerate(groups))
    found, expected = logits(tmp_path, data, n), logits(tmp_path, plain, n)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_extras_of_some_layers_make_groups(tmp_path: Path):
    bias = {"blk.1.ffn_up.bias": dense(np.ones(96, np.float32))}
    _, params = load(tmp_path, tiny_model("llama", tensors=bias))
    assert params.order == ((0, 0), (1, 0), (0, 1))
    # Up has a bias and gate has none, so they are two products there.
    assert [len(group.mlp.up) for group in params.groups] == [1, 2]


def test_experts_may_be_of_another_width_in_each_layer(tmp_path: Path):
    """Their width is that of the file, and no key's."""
    narrow = {}
    for seed, name in enumerate(EXPERT_MAPS):
        values = np.random.default_rng(seed).standard_normal((6, 64, 64)) / 8  # 64 for 96
        narrow[f"blk.1.{name}.weight"] = dense(values.astype(np.float32))
    data = tiny_model("qwen3moe", tensors=narrow)
    _, params = load(tmp_path, data)
    assert params.order == ((0, 0), (1, 0), (0, 1))
    assert np.isfinite(logits(tmp_path, data)).all()


def test_experts_with_what_is_wrong_said(tmp_path: Path):
    wrong: dict[str, Tensor | None] = {
        "blk.0.ffn_up_exps.weight": dense(np.zeros((5, 96, 64), np.float32)),
        "blk.1.ffn_down_exps.weight": None,
        "blk.2.ffn_gate_exps.bias": dense(np.zeros((6, 64), np.float32)),
    }
    message = refusal(tmp_path, tiny_model("llama", **EXPERTS, tensors=wrong))
    for part in (
        "blk.0.ffn_up_exps.weight has shape [5, 96, 64], expected [6, 96, 64]",
        "blk.1.ffn_down_exps.weight is missing",
        "blk.2.ffn_gate_exps.bias has shape [6, 64], expected [6, 96]",
    ):
        assert part in message
    message = refusal(tmp_path, tiny_model("llama", **EXPERTS, keys={"expert_count": 0}))
    assert "ffn_gate_inp.weight is there, but no key llama.expert_count above 0" in message


def test_an_mlp_without_its_gate_is_refused_where_there_must_be_one(tmp_path: Path):
    missing: dict[str, Any] = {"tensors": {"blk.1.ffn_gate.weight": None}}
    assert "blk.1.ffn_gate.weight is missing" in refusal(tmp_path, tiny_model("llama", **missing))


@pytest.mark.parametrize("weight_type", ["Q8_0", "Q4_K"])
def test_experts_stay_packed_and_apart(tmp_path: Path, weight_type: str):
    sizes: list[int] = []
    options: dict[str, Any] = {"width": 256, "n_ff": 256, "weight_type": weight_type}
    file = save(tmp_path, tiny_model("llama", **EXPERTS, **options))
    cfg, params = load_model(file, precision="highest", on_bytes=sizes.append)
    matrices = [t.nbytes for t in file.tensors.values() if len(t.shape) > 1]
    assert sorted(sizes) == sorted(matrices)
    assert cfg.router is not None and cfg.router.n_expert == 6
    for i in range(3):
        layer = pick(params.groups[0], i)
        assert isinstance(layer.mlp, Experts)
        down = layer.mlp.down.weight
        name = f"blk.{i}.ffn_down_exps.weight"
        kind = gguf.GGMLQuantizationType(file.tensors[name].ggml_type)
        for e in range(6):
            assert down.layer is not None
            found = xla.dequantize(down.at(down.layer + jnp.uint32(e)), jnp.dtype("float32"))
            expected = gguf.quants.dequantize(file.raw(name)[e], kind)
            np.testing.assert_array_equal(np.asarray(found).T, expected)


def test_code_books_give_the_logits_of_their_values(tmp_path: Path):
    options: dict[str, Any] = {"types": {f"blk.{i}.ffn_down": "MXFP4" for i in range(3)}}
    options["types"] |= {"blk.1.attn_output": "IQ4_NL", "blk.2.ffn_up": "NVFP4"}
    data = tiny_model("llama", **options)
    plain = tiny_model("llama", **{**options, "tensors": as_floats(save(tmp_path, data))})
    _, params = load(tmp_path, data)
    assert not [group for group in params.groups if group.mlp.down.weight.dense is not None]
    np.testing.assert_allclose(logits(tmp_path, data), logits(tmp_path, plain), rtol=0, atol=2e-4)


def test_experts_in_mxfp4_give_the_logits_of_their_values(tmp_path: Path):
    # As the files of gpt-oss are: experts in MXFP4, the rest in Q8_0.
    experts = {f"blk.{i}.{name}": "MXFP4" for i in range(3) for name in EXPERT_MAPS}
    options: dict[str, Any] = {"weight_type": "Q8_0", "types": experts, "head_dim": 16}
    data = tiny_model("gpt-oss", **options)
    plain = tiny_model("gpt-oss", **{**options, "tensors": as_floats(save(tmp_path, data))})
    np.testing.assert_allclose(logits(tmp_path, data), logits(tmp_path, plain), rtol=0, atol=2e-4)


def test_unused_tensors_are_named_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    one = dense(np.zeros(1, np.float32))
    extra = {f"blk.{i}.attn_sinks.weight": one for i in range(3, 10)}
    quiet = {"blk.0.ffn_up.input_scale": one, "cls.output.weight": one}
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        load(tmp_path, tiny_model("llama", tensors=quiet))
        assert not caplog.records
        load(tmp_path, tiny_model("llama", tensors={**extra, **quiet}))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "7 tensors are not used by architecture llama: blk.3.attn_sinks.weight, " in message
    assert message.endswith("blk.7.attn_sinks.weight, ...")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="minfer_jax"):
        load(tmp_path, tiny_model("qwen2", biases=("output",)))  # tied, but for the bias
    assert not caplog.records


def test_vectors_of_any_type(tmp_path: Path):
    norm = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    wanted = norm.astype(np.float16).astype(np.float32)
    quantised = encode(norm, "Q8_0")
    eight_bits = gguf.quants.dequantize(
        np.frombuffer(quantised[2], np.uint8), gguf.GGMLQuantizationType.Q8_0
    )
    for tensor, values in (
        (dense(norm.astype(np.float16)), wanted),
        (encode(norm, "F16"), wanted),
        (quantised, eight_bits),
    ):
        _, params = load(tmp_path, tiny_model("llama", tensors={"output_norm.weight": tensor}))
        assert params.output_norm.weight.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(params.output_norm.weight), values)
