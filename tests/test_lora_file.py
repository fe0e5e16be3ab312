"""LoRA adapters as files: what is written is read back, and what does not fit is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelError
from minfer_jax.model.lora_file import map_shapes, read_lora, write_lora
from tests.helpers.gguf_builder import Tensor, build_gguf, dense
from tests.helpers.tiny_adapters import random_adapter
from tests.helpers.tiny_models import save, tiny_model
from tests.helpers.tiny_tensors import encode

NAME = "blk.0.attn_k.weight"  # [32, 64]
KEYS = {
    "general.type": "adapter",
    "general.architecture": "qwen2moe",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}


def values(*shape: int) -> Tensor:
    return dense(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape))


PAIR = {f"{NAME}.lora_a": values(4, 64), f"{NAME}.lora_b": values(32, 4)}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> GGUFFile:
    return save(tmp_path_factory.mktemp("base"), tiny_model("qwen2moe", n_layer=1))


def test_what_is_written_is_read_back(base, tmp_path: Path):
    adapter = random_adapter(map_shapes(base), 3, alpha=6.0)
    path = tmp_path / "adapter.gguf"
    path.write_bytes(b"an older one")
    write_lora(path, adapter, "qwen2moe")
    found = read_lora(open_gguf(path), base)
    assert found.alpha == 6.0
    assert list(found.pairs) == list(adapter.pairs)
    for name, pair in adapter.pairs.items():
        np.testing.assert_array_equal(found.pairs[name].a, pair.a)
        np.testing.assert_array_equal(found.pairs[name].b, pair.b)
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_file_is_as_llama_cpp_s_converter_writes_it(base, tmp_path: Path):
    """Keys and shapes as llama_adapter_lora_init_impl checks them (ggml's order of axes)."""
    names = ("token_embd.weight", NAME)
    shapes = {name: map_shapes(base)[name] for name in names}
    write_lora(tmp_path / "adapter.gguf", random_adapter(shapes, 3, alpha=6.0), "qwen2moe")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    found = {key: reader.fields[key].contents() for key in KEYS}
    assert found == {**KEYS, "adapter.lora.alpha": 6.0}
    assert {t.name: t.shape.tolist() for t in reader.tensors} == {
        "token_embd.weight.lora_a": [3, 96],  # rows of R, looked up by token
        "token_embd.weight.lora_b": [3, 64],
        f"{NAME}.lora_a": [64, 3],
        f"{NAME}.lora_b": [3, 32],
    }


def test_what_cannot_be_written_leaves_nothing(base, tmp_path: Path):
    adapter = random_adapter({NAME: (32, 64)})
    with pytest.raises(OSError):
        write_lora(tmp_path / "none" / "adapter.gguf", adapter, "llama")
    (tmp_path / "adapter.gguf").mkdir()
    with pytest.raises(OSError):
        write_lora(tmp_path / "adapter.gguf", adapter, "llama")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.gguf"]


def test_maps_by_pattern(base):
    assert list(map_shapes(base, "blk.*.attn_[qk].weight")) == ["blk.0.attn_q.weight", NAME]
    whole = map_shapes(base)
    assert whole[NAME] == (32, 64) and whole["blk.0.ffn_down_shexp.weight"] == (64, 64)
    assert not [name for name in whole if "_exps" in name or "norm" in name]


def test_halves_of_other_types_norms_and_no_alpha(base, tmp_path: Path, caplog):
    keys = {key: value for key, value in KEYS.items() if "alpha" not in key}
    a = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    tensors = {
        f"{NAME}.lora_a": encode(a, "Q8_0"),
        f"{NAME}.lora_b": encode(np.ones((32, 4), np.float32), "F16"),
        "blk.0.attn_norm.weight": values(64),
    }
    found = read_lora(save(tmp_path, build_gguf(keys, tensors)), base)
    assert found.alpha == 0.0
    np.testing.assert_allclose(found.pairs[NAME].a, a, atol=0.01)
    np.testing.assert_array_equal(found.pairs[NAME].b, 1.0)
    assert "1 norms in it are left out" in caplog.text


BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"general.type": None}, "general.type is None, expected 'adapter': it is no adapter"),
    ({"general.type": "mod\nel"}, r"general.type is 'mod\nel', expected 'adapter'"),
    ({"general.architecture": "llama"}, "architecture is 'llama', expected 'qwen2moe'"),
    ({"adapter.type": "dora"}, "adapter.type is 'dora', expected 'lora'"),
    ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha is nan, expected a finite number"),
    ({"adapter.lora.alpha": "8"}, "adapter.lora.alpha' is str '8', expected float"),
    ({"adapter.alora.invocation_tokens": np.array([1], np.uint32)}, "(aLoRA), which is not"),
]


@pytest.mark.parametrize(("keys", "why"), BAD_KEYS)
def test_keys_that_are_refused(keys: dict[str, Any], why: str, base, tmp_path: Path):
    keys = {key: value for key, value in {**KEYS, **keys}.items() if value is not None}
    assert why in refusal(base, build_gguf(keys, PAIR), tmp_path)


def refusal(base: GGUFFile, data: bytes, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_lora(save(folder, data), base)
    message = str(caught.value)
    assert message.startswith(str(folder)) and message.isprintable() and len(message) < 1500
    return message


NAN = dense(np.full((32, 4), np.nan, np.float32))
BAD_TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({f"{NAME}.lora_b": None}, f"{NAME}.lora_b is missing, the other half of the pair is there"),
    ({f"{NAME}.lora_a": None}, f"{NAME}.lora_a is missing, the other half of the pair is there"),
    ({f"{NAME}.lora_a": values(4, 32)}, "lora_a has shape [4, 32], expected [4, 64]"),
    ({f"{NAME}.lora_b": values(4, 32)}, "lora_a has shape [4, 64], expected [32, 64]"),
    ({f"{NAME}.lora_b": values(64, 4)}, "lora_b has shape [64, 4], expected [32, 4]"),
    ({f"{NAME}.lora_b": values(32)}, "lora_b has shape [32], expected [32, 32]"),
    ({f"{NAME}.lora_b": values(32, 0)}, "lora_b has shape [32, 0], expected one with elements"),
    ({f"{NAME}.lora_b": values(32, 33)}, "a pair of rank 33, expected 1 to 32"),
    ({f"{NAME}.lora_b": NAN}, "a pair with values that are not finite"),
    ({f"{NAME}.lora_b": (24, (32, 4), bytes(128))}, "lora_b has type I8, which cannot be read"),
    ({"blk.0.attn_k.bias": values(32)}, "'blk.0.attn_k.bias' ends neither in .lora_a nor in"),
    ({"blk.7.attn_q.weight.lora_a": values(4, 64)}, "'blk.7.attn_q.weight' is not in the model"),
    ({"blk.0.attn_norm.weight.lora_a": values(4, 64)}, "is none of the maps that can be adapted"),
    ({"blk.0.ffn_up_exps.weight.lora_a": values(4, 64)}, "adapted: experts have no pairs here"),
    (dict.fromkeys(PAIR), "it has no pairs"),
]


@pytest.mark.parametrize(("tensors", "why"), BAD_TENSORS)
def test_tensors_that_are_refused(tensors, why: str, base, tmp_path: Path):
    all_of_them = {name: t for name, t in {**PAIR, **tensors}.items() if t is not None}
    assert why in refusal(base, build_gguf(KEYS, all_of_them), tmp_path)


def test_all_that_is_wrong_is_told_at_once(base, tmp_path: Path):
    wrong = {f"blk.{i}.attn_q.weight.lora_a": values(4, 64) for i in range(20)}
    message = refusal(base, build_gguf(KEYS, {"x": values(1), **wrong}), tmp_path)
    assert "'x' ends" in message and "blk.0.attn_q.weight.lora_b is missing" in message
    assert "'blk.6.attn_q.weight' is not in the model (and 13 more)" in message
