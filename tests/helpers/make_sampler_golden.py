"""Golden distributions: what llama.cpp's samplers leave of some logits.

CASES of `sampler_cases` are the cases; `tests/test_sampling_golden.py` runs them here and compares.
To make the values again, with llama-cpp-python installed:

    python -m tests.helpers.make_sampler_golden

Stored values come from llama-cpp-python 0.3.36 (llama.cpp b11434) on an x86 CPU. A chain is built
as llama.cpp's own commands build it, less the final draw. No case has what differs there: the
repeat penalty comes before the others where both are on, mirostat turns penalties and DRY off, and
a token that top-n-sigma has dropped still counts for typical-p and the dynamic temperature.
"""

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.dry import BREAKERS
from tests.helpers.sampler_cases import CASES, N_VOCAB, Case
from tests.helpers.tiny_models import tiny_text_model

FILE = Path(__file__).parents[1] / "golden" / "sampling" / "samplers.json"
SEED = 1


def stored() -> dict[str, list[dict[str, Any]]]:
    """The golden values of every case: for each turn ids, probabilities and the token drawn."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def sampler(name: str, p: SamplingParams, lib: Any, vocab: Any) -> Any:
    """One sampler of llama.cpp."""
    n = max(1, p.dry_penalty_last_n if p.dry_penalty_last_n >= 0 else 1024)
    texts = (ctypes.c_char_p * len(BREAKERS))(*[text.encode() for text in BREAKERS])
    dry = (p.dry_multiplier, p.dry_base, p.dry_allowed_length, n, texts, len(BREAKERS))
    penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    dynamic = (p.temperature, p.dynatemp_range, p.dynatemp_exponent)
    make = {
        "penalties": lambda: lib.llama_sampler_init_penalties(
            N_VOCAB, p.penalty_last_n, *penalties
        ),
        "dry": lambda: lib.llama_sampler_init_dry(vocab, *dry),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma),
        "top_k": lambda: lib.llama_sampler_init_top_k(p.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(p.typical_p, 0),
        "top_p": lambda: lib.llama_sampler_init_top_p(p.top_p, 0),
        "min_p": lambda: lib.llama_sampler_init_min_p(p.min_p, 0),
        "xtc": lambda: lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, 0, SEED),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(*dynamic),
        "mirostat": lambda: lib.llama_sampler_init_mirostat_v2(
            SEED, p.mirostat_tau, p.mirostat_eta
        ),
    }
    return make[name]()


def outcome(case: Case, lib: Any, vocab: Any) -> list[dict[str, Any]]:
    """What is left at each turn, largest first."""
    p = case.params
    steps = ("temperature", "mirostat") if p.mirostat else p.samplers
    chain = [sampler(name, p, lib, vocab) for name in steps]
    for step in chain:
        for token in case.recent:
            lib.llama_sampler_accept(step, token)
    turns = []
    for _ in range(case.turns):
        data = (lib.llama_token_data * N_VOCAB)()
        for i, logit in enumerate(case.logits):
            data[i] = lib.llama_token_data(i, logit, 0.0)
        left = lib.llama_token_data_array(data, N_VOCAB, -1, False)
        for step in chain:
            lib.llama_sampler_apply(step, ctypes.byref(left))
        found = {left.data[i].id: left.data[i].logit for i in range(left.size)}
        logits = np.array(list(found.values()), np.float64)
        weights = np.exp(logits - logits.max())
        probabilities = dict(zip(found, (weights / weights.sum()).tolist(), strict=True))
        ids = sorted((i for i in found if probabilities[i] > 0), key=lambda i: -probabilities[i])
        turns.append(
            {
                "ids": ids,
                "p": [float(f"{probabilities[i]:.6g}") for i in ids],
                "drawn": left.data[left.selected].id if p.mirostat else -1,
            }
        )
    return turns


def main() -> None:
    """Write the values of all cases."""
    import llama_cpp as lib  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        path.write_bytes(tiny_text_model())
        model = lib.Llama(str(path), vocab_only=True, verbose=False)
        vocab = lib.llama_model_get_vocab(model.model)
        found = {name: outcome(case, lib, vocab) for name, case in CASES.items()}
    FILE.parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(turns)}" for name, turns in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, turns in found.items():
        print(f"{name}: {[len(turn['ids']) for turn in turns]} left of {N_VOCAB}")


if __name__ == "__main__":
    main()
