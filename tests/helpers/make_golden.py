"""Golden logits: what llama.cpp computes for tiny models.

CASES are the models; `tests/test_architectures.py` runs them here and compares. To make the values
again, after a case was added or the tiny models changed, with llama-cpp-python installed:

    python -m tests.helpers.make_golden            # all of them
    python -m tests.helpers.make_golden llama-yarn # one

Stored values come from llama-cpp-python 0.3.36 (llama.cpp b11434) on an x86 CPU: float32 weights,
float32 cache, no flash attention.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tiny_models import MAPS, QKV, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden"
N_TOKENS = 40
POSITIONS = slice(1, None, 4)  # whose logits are stored
IDS = slice(0, None, 3)  # of the vocabulary
TOKENS = [(7 * i * i + 3 * i + 5) % 96 for i in range(N_TOKENS)]

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
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-one-kv-head": ("llama", {"n_head_kv": 1}),
    "llama-all-kv-heads": ("llama", {"n_head_kv": 4}),
    "llama-three-to-one": ("llama", {"width": 96, "n_head": 6, "n_head_kv": 2}),
    "llama-rope-factors": ("llama", {"rope_factors": True}),
    "llama-scale-linear": ("llama", {"keys": {"rope.scale_linear": 4.0}}),
    "llama-no-scaling": ("llama", {"keys": LINEAR | {"rope.scaling.type": "none"}}),
    "llama-yarn": ("llama", {"keys": YARN}),
    "llama-yarn-factors": ("llama", {"keys": YARN, "rope_factors": True}),
    "llama-linear-attn-factor": (
        "llama",
        {"keys": LINEAR | {"rope.scaling.attn_factor": 0.8}},
    ),
    "llama-biases-scales": ("llama", {"biases": MAPS, "scales": MAPS}),
    "llama-some-biases": ("llama", {"biases": ("attn_k", "ffn_up"), "scales": ("ffn_gate",)}),
    "llama-fused-qkv": ("llama", {"fused_qkv": True}),
    "llama-fused-qkv-bias": ("llama", {"fused_qkv": True, "biases": QKV}),
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
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-output-bias": (
        "qwen2",
        {"biases": (*QKV, "output"), "scales": ATTENTION, "keys": YARN},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-scales": ("qwen3", {"tied": True, "n_head_kv": 1, "scales": MAPS}),
    "smollm3": ("smollm3", {}),
    "smollm3-biases-scales": ("smollm3", {"biases": QKV, "scales": ATTENTION}),
    "smollm3-yarn-ends-unrotated": ("smollm3", {"n_layer": 4, "tied": False, "keys": YARN}),
}


def model(case: str) -> bytes:
    """The GGUF file of a case."""
    arch, options = CASES[case]
    return tiny_model(arch, **options)


def digest(data: bytes) -> str:
    """What tells whether stored values belong to a model."""
    return hashlib.sha256(data).hexdigest()[:16]


def stored(case: str) -> dict[str, Any]:
    """The golden values of a case: model, argmax of every position, logits of some."""
    return json.loads((GOLDEN / f"{case}.json").read_text(encoding="utf-8"))


def llama_cpp_logits(data: bytes) -> np.ndarray:
    """Float32 [N_TOKENS, V]."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        path.write_bytes(data)
        llm = llama_cpp.Llama(
            str(path),
            n_ctx=N_TOKENS,
            logits_all=True,
            flash_attn=False,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            yarn_beta_fast=-1.0,  # the model's own
            yarn_beta_slow=-1.0,
            yarn_attn_factor=-1.0,
            n_threads=1,
            n_threads_batch=1,
            verbose=False,
        )
        llm.eval(TOKENS)
        return np.array(llm.scores[:N_TOKENS], np.float32)


def main(cases: list[str]) -> None:
    """Write the values of some cases."""
    GOLDEN.mkdir(exist_ok=True)
    for case in cases:
        data = model(case)
        logits = llama_cpp_logits(data)
        values = {
            "model": digest(data),
            "argmax": logits.argmax(-1).tolist(),
            "logits": [[float(f"{x:.7g}") for x in row] for row in logits[POSITIONS, IDS]],
        }
        text = json.dumps(values, separators=(",", ":")).replace("],", "],\n")
        (GOLDEN / f"{case}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{case}: logits of {logits.shape}, standard deviation {logits.std():.3g}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
