"""What a tiny model is made of, and what each architecture's has beyond llama's block."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.gguf_builder import Tensor

QKV = ("attn_q", "attn_k", "attn_v")
MAPS = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")

EXPERT_MAPS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
QK_NORMS = ("attn_q_norm", "attn_k_norm")
WINDOW: dict[str, Any] = {"attention.sliding_window": 8}

# What makes a tiny model of an architecture more than llama's block.
EXPERTS: dict[str, Any] = {"n_expert": 6, "n_expert_used": 2}

DEFAULTS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere2": {"tied": True, "keys": WINDOW | {"logit_scale": 0.25}},
    "command-r": {"tied": True, "keys": {"logit_scale": 0.25}, "no_norms": QK_NORMS},
    "ernie4_5": {},
    "ernie4_5-moe": EXPERTS
    | {
        "n_ff_shared": 64,
        "choice_bias": True,
        "dense_layers": 1,
        "keys": {
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_shared_feed_forward_length": 64,
        },
    },
    "exaone": {},
    "exaone4": {},
    "gemma": {"tied": True, "head_dim": 24},
    "gemma2": {"tied": True, "keys": {"attention.sliding_window": 8}},
    "gemma3": {
        "n_layer": 4,
        "head_dim": 24,
        "n_head_kv": 1,
        "tied": True,
        "keys": {
            "rope.freq_base": 1e6,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
    },
    "glm4": {"fused_up": True, "biases": QKV, "keys": {"rope.dimension_count": 8}},
    "gpt-oss": EXPERTS
    | {
        "head_dim": 24,
        "biases": (*QKV, "attn_output", *EXPERT_MAPS, "ffn_gate_inp"),
        "keys": WINDOW,
    },
    "granite": {
        "keys": {
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention.scale": 0.03,
            "logit_scale": 8.0,
        }
    },
    "granitemoe": EXPERTS
    | {
        "n_ff_shared": 64,
        "keys": {
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention.scale": 0.03,
            "logit_scale": 8.0,
            "expert_shared_feed_forward_length": 64,
        },
    },
    "internlm2": {},
    "llama": {},
    "minicpm": {},
    "mistral3": {
        "keys": {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 8}
    },
    "muse-glimmer": {
        "n_layer": 5,
        "n_head_kv": 1,
        "keys": WINDOW | {"logit_scale": 0.2, "final_logit_softcapping": 20.0},
    },
    "nemotron": {"keys": {"rope.dimension_count": 8}},
    "olmo2": {},
    "olmoe": EXPERTS | {"n_head_kv": 4},
    "orion": {},
    "phi3": {"fused_qkv": True, "fused_up": True},
    "qwen2": {"tied": True, "biases": QKV},
    "qwen2moe": EXPERTS
    | {
        "biases": QKV,
        "n_ff_shared": 64,
        "shared_gate": True,
        "keys": {"expert_shared_feed_forward_length": 64},
    },
    "qwen3": {"head_dim": 32, "n_head_kv": 4},
    "qwen3moe": EXPERTS | {"head_dim": 32},
    "seed_oss": {"biases": QKV, "head_dim": 24},
    "smollm3": {"n_layer": 5, "tied": True},  # the fourth does not rotate
    "stablelm": {"keys": {"rope.dimension_count": 4}, "no_norms": QK_NORMS},
    "starcoder2": {"biases": (*QKV, "attn_output", "ffn_up", "ffn_down")},
    "xverse": {},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a tiny model is made of.

    Attributes:
        arch: `general.architecture`.
        seed: of all weights.
        weight_type: ggml's name of the type of all matrices; vectors are float32.
        tied: the output is the embedding.
        fused_qkv: one tensor (and bias, and scale) for q, k and v.
        biases, scales: names of MAPS or EXPERT_MAPS, "ffn_gate_inp" or "output", that have one.
        fused_up: one tensor for the MLP's gate and up.
        no_norms: optional norms of the architecture that are left out.
        shared_gate, choice_bias: there are such tensors.
        n_expert, n_expert_used, n_ff_shared: of a mixture of experts.
        dense_layers: how many layers at the front have none.
        rope_factors: there is a `rope_freqs.weight`.
        long_factors: there are `rope_factors_short.weight` and `_long.weight`.
        keys: metadata under the architecture's prefix; None takes a key out.
        metadata: metadata under full names, likewise.
        types: ggml's type of single matrices, by name without ".weight".
        tensors: tensors to put in place of others, or None to leave one out.
    """

    arch: str
    seed: int = 0
    weight_type: str = "F32"
    n_layer: int = 3
    width: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 0  # width / n_head
    n_ff: int = 96
    n_vocab: int = 96
    n_ctx: int = 256
    tied: bool = False
    fused_qkv: bool = False
    biases: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    fused_up: bool = False
    no_norms: tuple[str, ...] = ()
    shared_gate: bool = False
    choice_bias: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_shared: int = 0
    dense_layers: int = 0
    rope_factors: bool = False
    long_factors: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, Tensor | None] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, int]:
        """Width of all queries, and of all keys."""
        head_dim = self.head_dim or self.width // self.n_head
        return self.n_head * head_dim, self.n_head_kv * head_dim
