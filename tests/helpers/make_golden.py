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

from tests.helpers.golden_cases import CASES
from tests.helpers.tiny_models import tiny_model

GOLDEN = Path(__file__).parents[1] / "golden"
N_TOKENS = 40
POSITIONS = slice(1, None, 4)  # whose logits are stored
IDS = slice(0, None, 3)  # of the vocabulary
TOKENS = [(7 * i * i + 3 * i + 5) % 96 for i in range(N_TOKENS)]


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
