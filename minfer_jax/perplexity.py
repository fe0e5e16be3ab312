"""Perplexity as llama.cpp's `llama-perplexity` computes it, and the windows that a text is run in.

A text of n tokens is cut into n // n_ctx windows, and what is left over is dropped. Each is run by
itself; its first half is there to be seen only, and counts for nothing:

    n_ctx = 8          0   1   2   3   4   5   6   7
    tokens             BOS b   c   d   e   f   g   h     the first is replaced by BOS
    counted                            f   g   h         by what is said after e, f and g

The figure is exp of the mean negative log-likelihood; the one after +/- follows from the standard
error of that mean (tools/perplexity/perplexity.cpp).
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from minfer_jax.context import EngineError
from minfer_jax.divergence import Positions, said
from minfer_jax.engine import Engine

N_CTX = 512  # tokens of a window, unless told
LEAST = 4  # with fewer, nothing would be counted
_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Tokens that are run together.

    Attributes:
        ids: int32 [T], what is run.
        first: the position that counting begins at.
        targets: int32 [T - first], what follows each counted position.
    """

    ids: Int[np.ndarray, " T"]
    first: int
    targets: Int[np.ndarray, " n"]


def whole_text(ids: Sequence[int]) -> Window:
    """All of a text in one window, and every position counted that has a next token.

    Raises:
        EngineError: there are fewer than two tokens.
    """
    if len(ids) < 2:
        raise EngineError(f"the text has {len(ids)} tokens, expected 2 or more")
    tokens = np.asarray(ids, np.int32)
    return Window(ids=tokens[:-1], first=0, targets=tokens[1:])


def windows(
    ids: Sequence[int], n_ctx: int, bos_id: int | None, most: int | None = None
) -> list[Window]:
    """The windows of a text, as drawn above. The last token of each is a target only.

    Args:
        ids: the text, with BOS in front where the vocabulary has it so.
        n_ctx: tokens of a window, LEAST or more.
        bos_id: what each window begins with in place of its first token; None to leave it.
        most: windows at most.

    Raises:
        EngineError: the text does not fill two windows.
    """
    if len(ids) < 2 * n_ctx:
        raise EngineError(
            f"the text has {len(ids)} tokens, and two windows of {n_ctx} take {2 * n_ctx}: give a "
            "longer text, or a lower --n-ctx"
        )
    found = []
    for start in range(0, len(ids) - n_ctx + 1, n_ctx)[:most]:
        tokens, first = np.array(ids[start : start + n_ctx], np.int32), n_ctx // 2
        targets = tokens[first + 1 :].copy()
        if bos_id is not None:
            tokens[0] = bos_id
        found.append(Window(ids=tokens[:-1], first=first, targets=targets))
    return found


def run(engines: Sequence[Engine], window: Window) -> Iterator[Positions]:
    """What one model, or two, say at the counted positions of a window, some rows at a time.

    Args:
        engines: with prefill chunks of one length, and n_ctx of T or more. Where one has more rows
            of padding at the end of its vocabulary, they are left out.
        window: what to run.

    Raises:
        EngineError: as for `Engine.logit_parts`, or logits are not finite.
    """
    n_vocab, start = min(e.cfg.n_vocab for e in engines), 0
    parts = [e.logit_parts(window.ids.tolist(), window.first) for e in engines]
    for rows in zip(*parts, strict=True):
        end = start + len(rows[0])
        yield said([r[:, :n_vocab] for r in rows], window.targets[start:end])
        start = end


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure that was measured on a sample of positions.

    Attributes:
        value: the figure.
        error: its standard error; None where there is one position.
    """

    value: float
    error: float | None

    @property
    def perplexity(self) -> "Estimate":
        """Of a mean negative log-likelihood in nats: exp of it, and what its error comes to."""
        if self.value > _LARGEST:
            return Estimate(value=math.inf, error=None)
        value = math.exp(self.value)
        return Estimate(value=value, error=None if self.error is None else self.error * value)


def estimate(values: Float[np.ndarray, " n"]) -> Estimate:
    """The mean of values, one a position."""
    n = len(values)
    error = float(values.std()) / math.sqrt(n - 1) if n > 1 else None
    return Estimate(value=float(values.mean()), error=error)
