"""Which tensor gets which type: as llama.cpp chooses, and what the flags change in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.quant.quantizers import QUANTIZERS
from minfer_jax.quantize_choice import FALLBACKS, choose, fitting
from minfer_jax.quantize_mix import ALIASES, MIXES
from tests.helpers.gguf_builder import build_gguf, dense

# Types that llama_model_quantize of llama.cpp b11434 gives to `model`, run lengths over the layers
# where they differ. `dense`: 22 layers, 8 heads on 4, tied. `moe`: 24 layers of 8 experts, 8 on 2.
_THIRDS = "2*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 3*Q6_K"
DENSE = {  # token_embd, attn_q, attn_v, attn_output, ffn_down; ffn_up and attn_k are as attn_q
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q6_K", "Q5_K", _THIRDS.format("Q5_K"), "Q5_K", _THIRDS.format("Q5_K")),
    "Q5_K_S": ("Q6_K", "Q5_K", "Q5_K", "Q5_K", "Q5_K"),
    "Q5_1": ("Q6_K", "Q5_1", "Q5_1", "Q5_1", "Q5_1"),
    "Q5_0": ("Q6_K", "Q5_0", "Q5_0", "Q5_0", "Q5_0"),
    "Q4_K_M": ("Q6_K", "Q4_K", _THIRDS.format("Q4_K"), "Q4_K", _THIRDS.format("Q4_K")),
    "Q4_K_S": ("Q6_K", "Q4_K", "4*Q5_K 18*Q4_K", "Q4_K", "2*Q5_K 20*Q4_K"),
    "Q4_1": ("Q6_K", "Q4_1", "Q4_1", "Q4_1", "Q4_1"),
    "Q4_0": ("Q6_K", "Q4_0", "Q4_0", "Q4_0", "Q4_0"),
    "IQ4_NL": ("Q6_K", "IQ4_NL", "IQ4_NL", "IQ4_NL", "2*Q5_K 20*IQ4_NL"),
    "IQ4_XS": ("Q6_K", "IQ4_XS", "IQ4_XS", "IQ4_XS", "2*Q5_K 20*IQ4_XS"),
    "MXFP4_MOE": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Q3_K_L": ("Q6_K", "Q3_K", "Q5_K", "Q5_K", "Q5_K"),
    "Q3_K_M": ("Q6_K", "Q3_K", "2*Q5_K 20*Q4_K", "Q4_K", "1*Q5_K 21*Q4_K"),
    "Q3_K_S": ("Q6_K", "Q3_K", "Q3_K", "Q3_K", "Q3_K"),
    "Q2_K": ("Q6_K", "Q2_K", "Q3_K", "Q3_K", "Q3_K"),
    "TQ2_0": ("Q6_K", "TQ2_0", "TQ2_0", "TQ2_0", "TQ2_0"),
    "TQ1_0": ("Q6_K", "TQ1_0", "TQ1_0", "TQ1_0", "TQ1_0"),
}
_EIGHTHS = "3*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 1*Q6_K 2*{0} 4*Q6_K"
MOE = {  # token_embd, output, attn_q, attn_output, ffn_up_exps, ffn_down_exps; attn_k, attn_v Q8_0
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q5_K", "Q5_K", "Q5_K", _EIGHTHS.format("Q5_K")),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q4_K", "Q5_K", "Q4_K", _EIGHTHS.format("Q4_K")),
    "Q4_0": ("Q4_0", "Q6_K", "Q4_0", "Q4_0", "Q4_0", "Q4_0"),
    "IQ4_XS": ("IQ4_XS", "Q6_K", "IQ4_XS", "Q5_K", "IQ4_XS", "3*Q5_K 21*IQ4_XS"),
    "MXFP4_MOE": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "MXFP4", "MXFP4"),
    "Q3_K_L": ("Q3_K", "Q6_K", "Q3_K", "Q3_K", "Q3_K", "Q5_K"),
    "Q3_K_M": ("Q3_K", "Q6_K", "Q3_K", "Q5_K", "Q3_K", "1*Q5_K 23*Q4_K"),
    "Q3_K_S": ("Q3_K", "Q6_K", "Q3_K", "Q5_K", "Q3_K", "Q3_K"),
    "Q2_K": ("Q2_K", "Q6_K", "Q2_K", "Q5_K", "Q2_K", "Q3_K"),
    "TQ2_0": ("Q4_K", "Q6_K", "TQ2_0", "TQ2_0", "TQ2_0", "TQ2_0"),
}
FLOATS = ("F32", "F16", "BF16")


def model(
    tmp_path: Path,
    n_layer: int = 2,
    *,
    heads: tuple[int, int] = (8, 4),
    experts: int = 0,
    tied: bool = False,
    row: int = 256,
    more: dict[str, Any] | None = None,
) -> GGUFFile:
    """A model of F16 tensors with two rows each."""
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (2, row)}
    shapes |= {} if tied else {"output.weight": (2, row)}
    for i in reversed(range(n_layer)):  # the order in the file is of no account
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{i}.{name}.weight"] = (2, row)
        for name in ("ffn_up", "ffn_down"):
            shapes[f"blk.{i}.{name}{suffix}.weight"] = (*stack, 2, row)
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = (2, row)
    tensors = {name: dense(np.zeros(shape, np.float16)) for name, shape in shapes.items()}
    keys = {
        "general.architecture": "llama",
        "llama.block_count": n_layer,
        "llama.attention.head_count": heads[0],
        "llama.attention.head_count_kv": heads[1],
        "llama.expert_count": experts,
    }
    (tmp_path / "model.gguf").write_bytes(build_gguf(keys, tensors | (more or {})))
    return open_gguf(tmp_path / "model.gguf")


def types(file: GGUFFile, mix: str, **flags: Any) -> dict[str, str]:
    choices = choose(file, MIXES[mix], **flags)
    assert [c.info for c in choices] == list(file.tensors.values())
    return {c.info.name: c.type for c in choices}


def layers(found: dict[str, str], part: str) -> str:
    """The types of a part over the layers, equal ones run together."""
    n = sum(name.endswith(f".{part}.weight") for name in found)
    runs: list[tuple[int, str]] = []
    for name in (found[f"blk.{i}.{part}.weight"] for i in range(n)):
        if runs and runs[-1][1] == name:
            runs[-1] = runs[-1][0] + 1, name
        else:
            runs.append((1, name))
    return runs[0][1] if len(runs) == 1 else " ".join(f"{n}*{name}" for n, name in runs)


@pytest.mark.parametrize("mix", DENSE)
def test_a_dense_model_as_llama_cpp(tmp_path: Path, mix: str):
    found = types(model(tmp_path, 22, tied=True), mix)
    embedding, query, value, output, down = DENSE[mix]
    assert found["token_embd.weight"] == embedding
    for part, expected in (
        *((part, query) for part in ("attn_q", "attn_k", "ffn_up")),
        *(("attn_v", value), ("attn_output", output), ("ffn_down", down)),
    ):
        assert layers(found, part) == expected, part


@pytest.mark.parametrize("mix", MOE)
def test_a_model_of_eight_experts_as_llama_cpp(tmp_path: Path, mix: str):
    found = types(model(tmp_path, 24, heads=(8, 2), experts=8), mix)
    embedding, last, query, output, up, down = MOE[mix]
    assert (found["token_embd.weight"], found["output.weight"]) == (embedding, last)
    for part, expected in (
        *(("attn_k", "Q8_0"), ("attn_v", "Q8_0"), ("ffn_gate_inp", "F16"), ("attn_q", query)),
        *(("attn_output", output), ("ffn_up_exps", up), ("ffn_down_exps", down)),
    ):
        assert layers(found, part) == expected, part


def test_every_mix_is_checked_here():
    assert MIXES.keys() == {*DENSE, *FLOATS, "MXFP4"}
    assert {mix.most for mix in MIXES.values()} == QUANTIZERS.keys()
    assert set(ALIASES.values()) <= MIXES.keys()


@pytest.mark.parametrize("mix", [*FLOATS, "MXFP4"])
def test_mixes_of_one_type(tmp_path: Path, mix: str):
    found = types(model(tmp_path, 2), mix)
    kept = {name for name in found if "ffn_gate_inp" in name}
    expected = mix if mix in FLOATS else "Q6_K"
    assert found.pop("output.weight") == expected
    assert {found.pop(name) for name in kept} == {"F16"}
    assert set(found.values()) == {mix}


@pytest.mark.parametrize(
    ("mix", "value"), [("Q4_K_S", "Q5_K"), ("Q2_K", "Q4_K"), ("IQ4_NL", "Q5_K"), ("Q3_K_S", "Q3_K")]
)
def test_values_that_four_heads_share(tmp_path: Path, mix: str, value: str):
    assert layers(types(model(tmp_path, 2, heads=(8, 2)), mix), "attn_v") == value


@pytest.mark.parametrize(("mix", "value"), [("Q3_K_S", "Q5_K"), ("Q6_K", "Q6_K"), ("Q4_0", "Q4_0")])
def test_a_model_of_80_layers_and_shared_values(tmp_path: Path, mix: str, value: str):
    assert layers(types(model(tmp_path, 80, heads=(16, 2)), mix), "attn_v") == value


def test_head_counts_by_layer(tmp_path: Path):
    # The file of `model` has numbers; here each layer has its own, and the first counts.
    file = model(tmp_path)
    heads = {"llama.attention.head_count_kv": np.array([2, 8], np.int32)}
    file = GGUFFile(**{**vars(file), "metadata": {**file.metadata, **heads}})
    assert layers(types(file, "Q2_K"), "attn_v") == "Q4_K"


def test_what_stays_as_it_is(tmp_path: Path):
    weight = dense(np.zeros((2, 256), np.float32))
    kept = {
        "blk.0.attn_norm.weight": dense(np.zeros(256, np.float32)),
        "blk.0.attn_q.bias": weight,
        "blk.0.one_row.weight": dense(np.zeros((1, 1, 256), np.float32)),
        "blk.0.attn_q_norm.weight": weight,
        "blk.0.ssm_conv1d.weight": weight,
        "blk.0.time_mix_w1.weight": weight,
        "position_embd.weight": weight,
        "v.patch_embd.weight": weight,
        "ids.weight": dense(np.zeros((2, 256), np.int32)),
    }
    changed = {"blk.0.other.weight": weight, "blk.0.time_mix_key.weight": weight}
    found = types(model(tmp_path, more=kept | changed), "Q8_0")
    assert {name: found[name] for name in kept} == {
        name: "I32" if name == "ids.weight" else "F32" for name in kept
    }
    assert {found[name] for name in changed} == {"Q8_0"}


@pytest.mark.parametrize("wanted", QUANTIZERS)
def test_rows_that_no_block_divides(wanted: str):
    assert fitting(wanted, 512) == wanted
    assert fitting(wanted, 96) == FALLBACKS.get(wanted, wanted)
    assert fitting(wanted, 50) == (wanted if wanted in FLOATS else "F16")


def test_rows_of_96(tmp_path: Path):
    # llama.cpp's choice for SmolLM2, whose rows are 576: no multiple of 256 either.
    found = types(model(tmp_path, 2, row=96), "Q4_K_M")
    assert found["output.weight"] == "Q8_0"
    assert layers(found, "attn_q") == "Q5_0"
    assert layers(found, "ffn_down") == "1*Q5_0 1*Q8_0"  # of two layers the last has more bits


def test_flags_for_single_tensors(tmp_path: Path):
    file, tied = model(tmp_path), model(tmp_path, tied=True)
    plain = types(file, "Q4_K_S")
    for flags, changed in (
        ({"output_type": "F16"}, {"output.weight": "F16"}),
        ({"embedding_type": "Q2_K"}, {"token_embd.weight": "Q2_K"}),
        ({"pure": True, "output_type": "Q5_0"}, {"output.weight": "Q5_0"}),
    ):
        base = types(file, "Q4_K_S", pure=flags.get("pure", False))
        assert types(file, "Q4_K_S", **flags) == base | changed
    assert types(tied, "Q4_0", output_type="F16")["token_embd.weight"] == "F16"
    both = types(tied, "Q4_0", output_type="F16", embedding_type="Q8_0")
    assert both["token_embd.weight"] == "Q8_0"
    assert plain["output.weight"] == "Q6_K"


def test_pure(tmp_path: Path):
    found = types(model(tmp_path, 24, heads=(8, 2), experts=8), "Q3_K_M", pure=True)
    assert set(found.values()) == {"Q3_K", "F16"}
    assert {name for name, kind in found.items() if kind == "F16"} == {
        f"blk.{i}.ffn_gate_inp.weight" for i in range(24)
    }
