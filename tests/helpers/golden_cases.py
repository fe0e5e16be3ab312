"""The cases of the golden logits: all that a file can ask of the block, in tiny models."""

from typing import Any

from tests.helpers.tiny_options import EXPERT_MAPS, EXPERTS, MAPS, QKV, WINDOW

LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
# A ramp that begins and ends inside a head of 8 pairs.
BETAS = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.25}
# Where all architectures take scales; of the feed-forward ones some graphs make no use.
ATTENTION = (*QKV, "attn_output")

# Name to architecture and options of `tiny_model`: everything that a file can ask of the block.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {}),
    "command-r": ("command-r", {}),
    # From 64 layers on there are norms of queries and keys.
    "command-r-64": (
        "command-r",
        {"n_layer": 64, "width": 32, "n_ff": 32, "no_norms": ()},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5-moe", {}),
    "exaone": ("exaone", {"rope_factors": True}),
    "exaone4": ("exaone4", {}),
    # 64 layers make it the 32B, most of whose layers slide.
    "exaone4-32b": (
        "exaone4",
        {"n_layer": 64, "width": 32, "n_ff": 32, "keys": WINDOW},
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2-caps": (
        "gemma2",
        {
            "keys": {
                "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 4.0,
                "rope.freq_base_swa": 500.0,
            }
        },
    ),
    # 46 layers make it the 27B, whose scores are scaled by the width of a head of the embedding.
    "gemma2-27b": ("gemma2", {"n_layer": 46, "width": 32, "n_ff": 32, "head_dim": 24}),
    "gemma3": ("gemma3", {}),
    "gemma3-untied-softcap": (
        "gemma3",
        {
            "tied": False,
            "n_head_kv": 2,
            "keys": {
                "final_logit_softcapping": 5.0,
                "rope.freq_base_swa": 500.0,
                "attention.sliding_window_pattern": 2,  # a period
            },
        },
    ),
    "gemma3-every-sixth": (
        "gemma3",
        {
            "n_layer": 7,
            "scales": ATTENTION,
            "keys": {"attention.sliding_window_pattern": None},
        },
    ),
    # Only the full layers are stretched.
    "gemma3-linear-partial-rope": ("gemma3", {"keys": LINEAR | {"rope.dimension_count": 16}}),
    "gemma3-yarn": ("gemma3", {"keys": YARN}),
    "gemma3-yarn-no-window": (
        "gemma3",
        {
            "keys": YARN
            | {"attention.sliding_window": None, "attention.sliding_window_pattern": None}
        },
    ),
    # 62 layers make it the 27B, whose scores are scaled by the width of a head of the embedding.
    "gemma3-27b": (
        "gemma3",
        {
            "n_layer": 62,
            "width": 32,
            "n_ff": 32,
            "keys": {"attention.sliding_window_pattern": None},
        },
    ),
    "glm4": ("glm4", {}),
    "glm4-for-images": ("glm4", {"keys": {"rope.dimension_sections": [2, 2, 0, 0]}}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss-yarn": ("gpt-oss", {"keys": YARN}),
    "granite": ("granite", {}),
    "granite-not-rotated": (
        "granite",
        {"keys": {"rope.scaling.finetuned": False, "attention.scale": 0.0}},
    ),
    "granitemoe": ("granitemoe", {}),
    "granitemoe-no-shared": (
        "granitemoe",
        {"n_ff_shared": 0, "keys": {"expert_shared_feed_forward_length": 0}},
    ),
    "internlm2": ("internlm2", {}),
    "llama": ("llama", {}),
    "llama-experts": ("llama", EXPERTS),
    "llama-experts-scales": ("llama", EXPERTS | {"scales": EXPERT_MAPS}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-one-kv-head": ("llama", {"n_head_kv": 1}),
    "llama-all-kv-heads": ("llama", {"n_head_kv": 4}),
    "llama-three-to-one": ("llama", {"width": 96, "n_head": 6, "n_head_kv": 2}),
    "llama-rope-factors": ("llama", {"rope_factors": True}),
    "llama-scale-linear": ("llama", {"keys": {"rope.scale_linear": 4.0}}),
    "llama-no-scaling": ("llama", {"keys": LINEAR | {"rope.scaling.type": "none"}}),
    "llama-yarn": ("llama", {"keys": YARN}),
    "llama-yarn-betas-without-effect": ("llama", {"keys": YARN | BETAS}),
    "llama-yarn-factors": ("llama", {"keys": YARN, "rope_factors": True}),
    "llama-linear-attn-factor": (
        "llama",
        {"keys": LINEAR | {"rope.scaling.attn_factor": 0.8}},
    ),
    "llama-biases-scales": ("llama", {"biases": MAPS, "scales": MAPS}),
    "llama-some-biases": ("llama", {"biases": ("attn_k", "ffn_up"), "scales": ("ffn_gate",)}),
    "llama-fused-qkv": ("llama", {"fused_qkv": True}),
    "llama-fused-qkv-bias": ("llama", {"fused_qkv": True, "biases": QKV}),
    "minicpm": ("minicpm", {}),
    "minicpm-keys": (
        "minicpm",
        {"keys": {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}},
    ),
    "mistral3": ("mistral3", {}),
    # As in the files of Ministral 3, but for the sizes.
    "mistral3-yarn-log": (
        "mistral3",
        {"keys": YARN | BETAS | {"rope.scaling.yarn_log_multiplier": 1.0}},
    ),
    "mistral3-yarn-log-half": (
        "mistral3",
        {
            "keys": YARN
            | BETAS
            | {"rope.scaling.yarn_log_multiplier": 0.5, "rope.scaling.attn_factor": 0.9}
        },
    ),
    "muse-glimmer": ("muse-glimmer", {}),
    "muse-glimmer-cap-unsaid": (
        "muse-glimmer",
        {
            "keys": {
                "final_logit_softcapping": None,
                "logit_scale": 20.0,
                "rope.freq_base_swa": 500.0,
                "attention.sliding_window_pattern": 2,
            }
        },
    ),
    "muse-glimmer-no-cap": (
        "muse-glimmer",
        {
            "keys": {
                "final_logit_softcapping": 0.0,
                "attention.sliding_window_pattern": [False, True, True, False, True],
            }
        },
    ),
    "nemotron": ("nemotron", {}),
    "nemotron-biases": ("nemotron", {"biases": (*QKV, "attn_output", "ffn_up", "ffn_down")}),
    "olmo2": ("olmo2", {}),
    "olmo2-one-kv-head": ("olmo2", {"n_head_kv": 1}),
    "olmo3": ("olmo2", {"n_layer": 5, "keys": WINDOW | YARN}),
    "olmoe": ("olmoe", {}),
    "orion": ("orion", {}),
    "phi3": ("phi3", {}),
    "phi3-long": (
        "phi3",
        {
            "fused_qkv": False,
            "long_factors": True,
            "keys": {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": 16,
                "rope.scaling.attn_factor": 1.2,
            },
        },
    ),
    "phi3-short": (
        "phi3",
        {
            "long_factors": True,
            "keys": {
                "context_length": 1024,
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": 512,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-output-bias": (
        "qwen2",
        {"biases": (*QKV, "output"), "scales": ATTENTION, "keys": YARN},
    ),
    "qwen2moe": ("qwen2moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-scales": ("qwen3", {"tied": True, "n_head_kv": 1, "scales": MAPS}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe-key-without-effect": (
        "qwen3moe",
        {"keys": {"expert_weights_scale": 2.5, "expert_gating_func": 2}},
    ),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "smollm3-biases-scales": ("smollm3", {"biases": QKV, "scales": ATTENTION}),
    "smollm3-yarn-ends-unrotated": ("smollm3", {"n_layer": 4, "tied": False, "keys": YARN}),
    "stablelm": ("stablelm", {}),
    "stablelm-side-by-side": ("stablelm", {"no_norms": ("ffn_norm",)}),
    "starcoder2": ("starcoder2", {}),
    "xverse": ("xverse", {}),
}
