"""Which tensor of a model gets which type: llama.cpp's mixes.

A mix is named after the type that most tensors get. What hurts most when rounded gets more bits: the
output layer, the values of attention, and the way down from the feed-forward, the two last in some
layers only. The rules are those of `llama_tensor_get_type` in llama.cpp's `src/llama-quant.cpp`,
without an importance matrix, and less what it does for single architectures (Falcon, GLM 5).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minfer_jax.gguf import GGML_TYPES, GGUFFile, TensorInfo
from minfer_jax.quant.quantizers import QUANTIZERS, TYPE_IDS


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a model a tensor is.

    Attributes:
        layer: which of `n_layer` it is, from 0.
        n_layer: how many there are.
        sharing: query heads that share a key and value head.
        n_expert: experts of a layer, 0 for none.
    """

    layer: int
    n_layer: int
    sharing: int
    n_expert: int


def _always(place: Place) -> bool:
    return True


def _first_2(place: Place) -> bool:
    return place.layer < 2


def _first_4(place: Place) -> bool:
    return place.layer < 4


def _first_eighth(place: Place) -> bool:
    return place.layer < place.n_layer // 8


def _first_sixteenth(place: Place) -> bool:
    return place.layer < place.n_layer // 16


def _ends_and_every_third(place: Place) -> bool:
    """llama.cpp's use_more_bits: an eighth at either end, and every third layer between."""
    i, n = place.layer, place.n_layer
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _shared_by_4(place: Place) -> bool:
    return place.sharing >= 4


def _8_experts(place: Place) -> bool:
    return place.n_expert == 8


Rule = tuple[tuple[Callable[[Place], bool], str], ...]  # the first that holds; else `most`


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A row of MIXES.

    Attributes:
        file_type: the number that `general.file_type` has for it (llama.h, enum llama_ftype).
        most: the type of whatever no rule names.
        attn_v: the values of attention, also where they lie in one tensor with queries and keys.
        attn_output: the output of attention.
        ffn_down: the way down from the feed-forward.
        embedding: the token embedding, where it is not the output layer too; None for `most`.
        not_experts: the type of all that is no stack of experts; None for no difference.
    """

    file_type: int
    most: str
    attn_v: Rule = ()
    attn_output: Rule = ()
    ffn_down: Rule = ()
    embedding: str | None = None
    not_experts: str | None = None


_8_EXPERTS_Q5_K: Rule = ((_8_experts, "Q5_K"),)
_MORE_Q6_K: Rule = ((_ends_and_every_third, "Q6_K"),)

MIXES: dict[str, Mix] = {
    "F32": Mix(file_type=0, most="F32"),
    "F16": Mix(file_type=1, most="F16"),
    "BF16": Mix(file_type=32, most="BF16"),
    "Q8_0": Mix(file_type=7, most="Q8_0"),
    "Q6_K": Mix(file_type=18, most="Q6_K"),
    "Q5_K_M": Mix(file_type=17, most="Q5_K", attn_v=_MORE_Q6_K, ffn_down=_MORE_Q6_K),
    "Q5_K_S": Mix(file_type=16, most="Q5_K"),
    "Q5_1": Mix(file_type=9, most="Q5_1"),
    "Q5_0": Mix(file_type=8, most="Q5_0"),
    "Q4_K_M": Mix(
        file_type=15,
        most="Q4_K",
        attn_v=_MORE_Q6_K,
        attn_output=_8_EXPERTS_Q5_K,
        ffn_down=_MORE_Q6_K,
    ),
    "Q4_K_S": Mix(
        file_type=14,
        most="Q4_K",
        attn_v=((_first_4, "Q5_K"),),
        attn_output=_8_EXPERTS_Q5_K,
        ffn_down=((_first_eighth, "Q5_K"),),
    ),
    "Q4_1": Mix(file_type=3, most="Q4_1"),
    "Q4_0": Mix(file_type=2, most="Q4_0"),
    "IQ4_NL": Mix(
        file_type=25,
        most="IQ4_NL",
        attn_v=((_shared_by_4, "Q5_K"),),
        attn_output=_8_EXPERTS_Q5_K,
        ffn_down=((_first_eighth, "Q5_K"),),
    ),
    "IQ4_XS": Mix(
        file_type=30,
        most="IQ4_XS",
        attn_v=((_shared_by_4, "Q5_K"),),
        attn_output=_8_EXPERTS_Q5_K,
        ffn_down=((_first_eighth, "Q5_K"),),
    ),
    "MXFP4": Mix(file_type=38, most="MXFP4"),
    "MXFP4_MOE": Mix(file_type=38, most="MXFP4", not_experts="Q8_0"),
    "Q3_K_L": Mix(
        file_type=13,
        most="Q3_K",
        attn_v=((_always, "Q5_K"),),
        attn_output=((_8_experts, "Q3_K"), (_always, "Q5_K")),
        ffn_down=((_always, "Q5_K"),),
    ),
    "Q3_K_M": Mix(
        file_type=12,
        most="Q3_K",
        attn_v=((_first_2, "Q5_K"), (_always, "Q4_K")),
        attn_output=(*_8_EXPERTS_Q5_K, (_always, "Q4_K")),
        ffn_down=((_first_sixteenth, "Q5_K"), (_always, "Q4_K")),
    ),
    "Q3_K_S": Mix(file_type=11, most="Q3_K", attn_output=_8_EXPERTS_Q5_K),
    "Q2_K": Mix(
        file_type=10,
        most="Q2_K",
        attn_v=((_shared_by_4, "Q4_K"), (_always, "Q3_K")),
        attn_output=(*_8_EXPERTS_Q5_K, (_always, "Q3_K")),
        ffn_down=((_always, "Q3_K"),),
    ),
    "TQ2_0": Mix(file_type=37, most="TQ2_0", embedding="Q4_K"),
    "TQ1_0": Mix(file_type=36, most="TQ1_0", embedding="Q4_K"),
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # short for a mix

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
        kind = GGML_TYPES[TYPE_IDS[self.type]]
        return math.prod(self.info.shape) // kind.block_size * kind.block_bytes


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
        if _8_experts(place):
            return "Q8_0"
        # Some models have attention in some layers only: those are counted.
        among = Place(
            layer=values[name], n_layer=len(values), sharing=place.sharing, n_expert=0
        )
        chosen = _apply(mix.attn_v, among, mix.most)
        is_70b = n_layer == 80 and place.sharing == 8  # eight times fewer values: bits cost little
        return "Q5_K" if is_70b and chosen in ("Q3_K", "Q4_K") else chosen
    if name.endswith("attn_k.weight") and _8_experts(place):
        return "Q8_0"
    if name.endswith("attn_output.weight"):
        return _apply(mix.attn_output, place, mix.most)
    if "ffn_down" in name:
        return _apply(mix.ffn_down, place, mix.most)
    return mix.most


def _apply(rule: Rule, place: Place, most: str) -> str:
    return next((name for holds, name in rule if holds(place)), most)


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


