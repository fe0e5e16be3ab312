"""Cases whose outcome llama.cpp gave: values of the sampler, logits and a text so far."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minfer_jax.sampling import SamplingParams, samplers_from

N_VOCAB = 128  # the first tokens of tiny_text_model's vocabulary, most of them single bytes
A, B, C, D, COLON = 68, 69, 70, 71, 61  # letters, and ":" which breaks a sequence


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to give to a sampler.

    Attributes:
        values: Fields of SamplingParams, over those of `params`.
        scale: Of the logits.
        recent: The text so far.
        turns: Tokens to draw, where mirostat's bound moves.
    """

    values: dict[str, Any]
    scale: float = 1.0
    recent: list[int] = field(default_factory=list)
    turns: int = 1

    @property
    def params(self) -> SamplingParams:
        """All off but for the case's values."""
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        return SamplingParams(**{**off, **self.values})

    @property
    def logits(self) -> np.ndarray:
        """Float32 [N_VOCAB], no two alike, from -4 to 6 where the scale is 1; integers inside."""
        i = np.arange(N_VOCAB)
        spread = (i * 7919 + i * i * 104729 + 1234) % 10007
        assert len(set(spread.tolist())) == N_VOCAB
        return ((spread / 1000.7 - 4.0) * self.scale).astype(np.float32)


REPEAT = [A, B, C, C, B, C, D, A, B, C]  # llama.cpp's own example, with D for y
TEXT = [A, B, C, D, 100, 101, A, B, C, COLON, A, B, C, D, 7, 8, A, B, C]

CASES = {
    "penalties-repeat": Case(values={"repeat_penalty": 1.3}, recent=REPEAT),
    "penalties-frequency": Case(values={"frequency_penalty": 0.7}, recent=REPEAT),
    "penalties-presence": Case(values={"presence_penalty": -0.5}, recent=REPEAT),
    "penalties-last": Case(
        values={"frequency_penalty": 0.7, "presence_penalty": 0.2, "penalty_last_n": 4},
        recent=REPEAT,
    ),
    "dry": Case(values={"dry_multiplier": 0.8}, recent=REPEAT),
    "dry-allowed-1": Case(
        values={"dry_multiplier": 0.5, "dry_base": 1.2, "dry_allowed_length": 1}, recent=REPEAT
    ),
    "dry-allowed-0": Case(values={"dry_multiplier": 0.5, "dry_allowed_length": 0}, recent=REPEAT),
    "dry-last": Case(values={"dry_multiplier": 0.8, "dry_penalty_last_n": 8}, recent=REPEAT),
    "dry-breaker": Case(values={"dry_multiplier": 0.8}, recent=TEXT),
    "dry-breaker-next": Case(values={"dry_multiplier": 1.0}, recent=[A, B, C, COLON, A, B, C]),
    "dry-broken": Case(
        values={"dry_multiplier": 0.8, "dry_allowed_length": 2}, recent=[A, B, C, D, COLON, C, D]
    ),
    "dry-long": Case(
        values={"dry_multiplier": 1.0, "dry_base": 1.05, "dry_penalty_last_n": 300},
        recent=[A, B, C] * 90 + [D] + [A, B, C] * 30,
    ),
    "dry-one-token": Case(values={"dry_multiplier": 1.0, "dry_base": 3.0}, recent=[A] * 200),
    "top-n-sigma-1": Case(values={"top_n_sigma": 1.0}),
    "top-n-sigma-half": Case(values={"top_n_sigma": 0.5}, scale=3.0),
    "top-k-1": Case(values={"top_k": 1}),
    "top-k-7": Case(values={"top_k": 7}),
    "typical-low": Case(values={"typical_p": 0.2}),
    "typical-half": Case(values={"typical_p": 0.5}, scale=3.0),
    "typical-high": Case(values={"typical_p": 0.95}, scale=0.3),
    "top-p-half": Case(values={"top_p": 0.5}),
    "top-p-high": Case(values={"top_p": 0.9}, scale=3.0),
    "min-p": Case(values={"min_p": 0.1}),
    "min-p-half": Case(values={"min_p": 0.5}),
    "xtc": Case(values={"xtc_probability": 1.0, "xtc_threshold": 0.03}),
    "xtc-one": Case(values={"xtc_probability": 1.0, "xtc_threshold": 0.4}, scale=3.0),
    "xtc-all": Case(values={"xtc_probability": 1.0, "xtc_threshold": 0.0}),
    "xtc-off": Case(values={"xtc_probability": 1.0, "xtc_threshold": 0.51}, scale=3.0),
    "temperature": Case(values={"temperature": 0.5}),
    "dynatemp": Case(values={"temperature": 1.0, "dynatemp_range": 0.5}),
    "dynatemp-root": Case(
        values={"temperature": 0.8, "dynatemp_range": 2.0, "dynatemp_exponent": 0.5}, scale=3.0
    ),
    "dynatemp-square": Case(
        values={"temperature": 0.8, "dynatemp_range": 0.7, "dynatemp_exponent": 2.0}
    ),
    "greedy": Case(
        values={"temperature": 0.0, "dry_multiplier": 2.0, "xtc_probability": 1.0}, recent=REPEAT
    ),
    "mirostat": Case(
        values={"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3, "temperature": 0.9},
        turns=6,
    ),
    "mirostat-tight": Case(
        values={"mirostat": 2, "mirostat_tau": 0.6, "mirostat_eta": 1.0}, scale=2.0, turns=6
    ),
}

EVERY = {
    "repeat_penalty": 1.2,
    "dry_multiplier": 0.8,
    "top_k": 30,
    "typical_p": 0.9,
    "top_p": 0.93,
    "min_p": 0.02,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.05,
    "temperature": 0.7,
}
ORDERS = ("edkypmxt", "tkpme", "txmpykde", "xtk", "yxt", "dmpt", "ptkm", "kt", "t", "medt")


def _in_order(letters: str, **more: float) -> Case:
    return Case(values={**EVERY, **more, "samplers": samplers_from(letters)}, recent=TEXT)


CASES |= {f"order-{letters}": _in_order(letters) for letters in ORDERS}
CASES["order-sigma-first"] = _in_order("skpxt", top_n_sigma=1.2)
CASES["order-sigma-last"] = _in_order("ektps", top_n_sigma=1.2)
CASES["order-dynatemp"] = _in_order("edkptm", dynatemp_range=0.6)
