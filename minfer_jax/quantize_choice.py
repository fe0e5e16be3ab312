"""Which tensor of a model gets which type, by a mix.

This too is as in llama.cpp's `src/llama-quant.cpp`: what stays as it is, which rule of the mix goes
for a tensor, and what becomes of rows that are no multiple of a block.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from minfer_jax.gguf import GGUFFile, TensorInfo
from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.quantize_mix import Mix, Place, apply, eight_experts

# Where a block does not divide the rows of a tensor, another type takes its place.
FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

_FLOATS = ("F32", "F16", "BF16")
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_ATTN_V = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")

# Small, or too delicate: whatever has one of these in its name stays as it is.
_KEPT = re.compile(
    "|".join(
        (
            r"_norm\.weight",
            r"^(position_embd|token_types)\.weight",
            r"ffn_gate_(inp|tid2eid)\.weight",  # the router of experts
            r"altup|laurel|per_layer_model_proj",  # Gemma 3n
            r"ssm_conv1d|shortconv\.conv\.weight",  # Mamba, LFM2
            r"indexer\.[kq]_proj\.weight",  # MiniMax
            r"time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight",  # RWKV
            r"attn_rel_b\.weight",  # T5
            r"\.position_embd|sam\.pos_embd|sam\.neck\.|sam\.net_|\.rel_pos",  # images
            r"\.patch_embd|\.patch_merger|a\.rvq\.codebook|mm\.a\.code_embd",  # and sound
        )
    )
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The type that a tensor gets.

    Attributes:
        info: the tensor.
        type: name of its type in the new file.
        wanted: what it would be if its rows were a multiple of that type's block.
    """

    info: TensorInfo
    type: str
    wanted: str

    @property
    def old(self) -> str:
        """Name of the type that the tensor has."""
        return GGML_TYPES[self.info.ggml_type].name

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the new file."""
        return GGML_TYPES[TYPE_IDS[self.type]].nbytes(math.prod(self.info.shape))


def choose(
    file: GGUFFile,
    mix: Mix,
    *,
    output_type: str | None = None,
    embedding_type: str | None = None,
    pure: bool = False,
) -> tuple[Choice, ...]:
    """Chooses a type for every tensor of a model.

    Args:
        file: the model.
        mix: a row of MIXES.
        output_type: a type for the output layer, be it `output.weight` or the token embedding.
        embedding_type: a type for the token embedding; it goes before `output_type`.
        pure: the same type for all tensors that are quantised at all.

    Returns:
        In file order.
    """
    tensors = sorted(file.tensors.values(), key=lambda t: (_layer(t.name), t.name))
    attn_v = (t.name for t in tensors if t.name.endswith(_ATTN_V))
    values = {name: i for i, name in enumerate(attn_v)}
    tied = "output.weight" not in file.tensors

    def wanted(info: TensorInfo) -> str:
        name = info.name
        is_output = name == "output.weight" or (tied and name in _EMBEDDINGS)
        if embedding_type and name in _EMBEDDINGS:
            return embedding_type
        if output_type and is_output:
            return output_type
        if pure or mix.most in _FLOATS:
            return mix.most
        if is_output:
            return _output_type(mix, info.shape[-1])
        if mix.not_experts and not (len(info.shape) > 2 and info.shape[-3] > 1):
            return mix.not_experts
        if name in _EMBEDDINGS:
            return mix.embedding or mix.most
        return _layer_type(file, mix, name, values)

    choices = []
    for info in file.tensors.values():
        old = GGML_TYPES[info.ggml_type].name
        first = wanted(info) if _is_quantised(info) else old
        new = first if first == old else fitting(first, info.shape[-1])
        choices.append(Choice(info=info, type=new, wanted=first))
    return tuple(choices)


def fitting(wanted: str, row: int) -> str:
    """A type itself, or what takes its place in rows that are no multiple of its block."""
    for name in (wanted, FALLBACKS.get(wanted, wanted)):
        if row % GGML_TYPES[TYPE_IDS[name]].block_size == 0:
            return name
    return "F16"


def _is_quantised(info: TensorInfo) -> bool:
    """Whether a tensor is one of those that a mix is about."""
    name, dims = info.name, len(info.shape)
    while dims > 1 and info.shape[-dims] == 1:
        dims -= 1
    return (
        dims > 1
        and name.endswith("weight")
        and not _KEPT.search(name)
        and GGML_TYPES[info.ggml_type].name not in _NOT_WEIGHTS
    )


def _output_type(mix: Mix, row: int) -> str:
    """Six bits at least."""
    eight = row % GGML_TYPES[TYPE_IDS[mix.most]].block_size or mix.not_experts
    return "Q8_0" if eight or mix.most == "Q8_0" else "Q6_K"


def _layer_type(file: GGUFFile, mix: Mix, name: str, values: dict[str, int]) -> str:
    """The type of a tensor within the layers; `values` numbers those of attention's values."""
    n_layer = _number(file, "block_count", 0)
    heads = _number(file, "attention.head_count", 1)
    kv_heads = _number(file, "attention.head_count_kv", heads)
    place = Place(
        layer=_layer(name),
        n_layer=n_layer,
        sharing=heads // kv_heads if kv_heads > 0 else 0,
        n_expert=_number(file, "expert_count", 0),
    )
    if name.endswith(_ATTN_V):
        if eight_experts(place):
            return "Q8_0"
        # Some models have attention in some layers only: those are counted.
        among = Place(layer=values[name], n_layer=len(values), sharing=place.sharing, n_expert=0)
        chosen = apply(mix.attn_v, among, mix.most)
        is_70b = n_layer == 80 and place.sharing == 8  # eight times fewer values: bits cost little
        return "Q5_K" if is_70b and chosen in ("Q3_K", "Q4_K") else chosen
    if name.endswith("attn_k.weight") and eight_experts(place):
        return "Q8_0"
    if name.endswith("attn_output.weight"):
        return apply(mix.attn_output, place, mix.most)
    if "ffn_down" in name:
        return apply(mix.ffn_down, place, mix.most)
    return mix.most


def _layer(name: str) -> int:
    """The number of a tensor's layer, -1 outside of them."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _number(file: GGUFFile, key: str, default: int) -> int:
    """A number of the model's own; the first where each layer has one."""
    value = file.get(f"{file.get('general.architecture')}.{key}", default)
    if isinstance(value, np.ndarray):
        value = value[0].item() if value.size else default
    return value if isinstance(value, int) else default
