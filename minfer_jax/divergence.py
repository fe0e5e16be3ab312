"""How two models differ in what they say of the next token, row by row, in float64.

numpy, as figures near the rounding of float32 are told here: a mean divergence of 1e-11 is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from minfer_jax.context import EngineError

_BLOCK = 1 << 21  # logits at once: five arrays of float64 of them are 80 MB


def log_softmax(
    logits: Float[np.ndarray, "... V"],
) -> tuple[Float[np.ndarray, "... V"], Float[np.ndarray, "... V"]]:
    """Logarithms of probabilities, and probabilities: float64."""
    logs = logits.astype(np.float64)
    logs -= logs.max(-1, keepdims=True)
    probs = np.exp(logs)
    total = probs.sum(-1, keepdims=True)
    logs -= np.log(total)
    probs /= total
    return logs, probs


@dataclass(frozen=True, kw_only=True, eq=False)
class Positions:
    """What M models, one or two, say at n positions.

    Attributes:
        nll: float64 [M, n], negative logarithm of the probability of the token that follows.
        top: int64 [M, n], the likeliest token.
        top_prob: float64 [M, n], its probability.
        kl: float64 [M * (M - 1), n]. Of two models, row 0 is KL(A‖B), sum of
            p_A * log(p_A / p_B) over the vocabulary in nats, and row 1 is KL(B‖A).
    """

    nll: Float[np.ndarray, "M n"]
    top: Int[np.ndarray, "M n"]
    top_prob: Float[np.ndarray, "M n"]
    kl: Float[np.ndarray, "K n"]

    def __len__(self) -> int:
        return self.nll.shape[1]


def joined(parts: Sequence[Positions]) -> Positions:
    """The positions of several, one after another."""
    fields = ("nll", "top", "top_prob", "kl")
    return Positions(**{f: np.concatenate([getattr(p, f) for p in parts], 1) for f in fields})


def said(rows: Sequence[Float[np.ndarray, "n V"]], targets: Int[np.ndarray, " n"]) -> Positions:
    """What models say at the same positions.

    Args:
        rows: logits of one model, or of A and of B.
        targets: the token that follows each position.

    Raises:
        EngineError: logits are not finite.
    """
    n, n_vocab = rows[0].shape
    size = max(1, _BLOCK // n_vocab)
    blocks = (slice(i, i + size) for i in range(0, n, size))
    return joined([_block([r[b] for r in rows], targets[b]) for b in blocks])


def _block(rows: Sequence[Float[np.ndarray, "n V"]], targets: Int[np.ndarray, " n"]) -> Positions:
    for name, logits in zip("AB", rows, strict=False):
        if not np.isfinite(logits).all():
            raise EngineError(f"model {name} gives logits that are not finite")
    at = np.arange(len(targets))
    models = [log_softmax(logits) for logits in rows]
    return Positions(
        nll=np.stack([-logs[at, targets] for logs, _ in models]),
        top=np.stack([logits.argmax(-1) for logits in rows]),
        top_prob=np.stack([probs.max(-1) for _, probs in models]),
        kl=_both_ways(*models) if len(models) == 2 else np.zeros((0, len(targets))),
    )


def _both_ways(a: tuple, b: tuple) -> Float[np.ndarray, "2 n"]:
    (logs_a, probs_a), (logs_b, probs_b) = a, b
    apart = logs_a - logs_b
    kl = np.stack([np.vecdot(probs_a, apart), -np.vecdot(probs_b, apart)])
    return np.maximum(kl, 0.0)  # of rows that are alike, rounding may leave less
