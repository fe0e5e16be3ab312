"""The table of mixes: what a quantised model is made of.

A mix is named after the type that most tensors get. What hurts most when rounded gets more bits:
the output layer, the values of attention, and the way down from the feed-forward, the last two in
some layers only. The rules are those of `llama_tensor_get_type` in llama.cpp's
`src/llama-quant.cpp`, without an importance matrix, and less what it does for single architectures
(Falcon, GLM 5).
"""

from collections.abc import Callable
from dataclasses import dataclass


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


def eight_experts(place: Place) -> bool:
    """Whether it is a model like Mixtral, of which attention is a small part."""
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


def apply(rule: Rule, place: Place, most: str) -> str:
    """The type that a rule gives to a tensor at some place."""
    return next((name for holds, name in rule if holds(place)), most)


_8_EXPERTS_Q5_K: Rule = ((eight_experts, "Q5_K"),)
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
        attn_output=((eight_experts, "Q3_K"), (_always, "Q5_K")),
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
