"""Where in two models of one shape the residual streams part, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from minfer_jax.engine import Engine

NAMES = ("embd", "blk.*.residual")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """How far two residual streams are apart.

    Attributes:
        names: of the values: the embeddings, then each layer's output.
        apart: float64 [1 + L, T], |b - a| / |a| at each position.
    """

    names: tuple[str, ...]
    apart: Float[np.ndarray, "R T"]

    @property
    def mean(self) -> Float[np.ndarray, " R"]:
        """Of each value, over positions."""
        return self.apart.mean(1)

    @property
    def added(self) -> Float[np.ndarray, " R"]:
        """By how much each differs more than the one before it."""
        return np.diff(self.mean, prepend=0.0)

    @property
    def parting(self) -> int:
        """The row that adds most."""
        return int(self.added.argmax())


def alike(engines: Sequence[Engine]) -> bool:
    """Whether the layers of one are those of the other, one by one."""
    return len({(engine.cfg.n_layer, engine.cfg.n_embd) for engine in engines}) == 1


def layers(engines: Sequence[Engine], ids: Sequence[int]) -> Layers:
    """Run a text in A and B, and hold their layers against each other.

    Args:
        engines: A and B, which are `alike`.
        ids: the text; the logits of all of it are in memory at once, beside the streams.

    Raises:
        EngineError: as for `Engine.trace`.
    """
    a, b = (engine.trace(ids, NAMES) for engine in engines)
    return Layers(names=tuple(a), apart=np.stack([relative(a[name], b[name]) for name in a]))


def relative(a: Float[np.ndarray, "T D"], b: Float[np.ndarray, "T D"]) -> Float[np.ndarray, " T"]:
    """|b - a| / |a| of each row, in float64; 0 where both are 0."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.linalg.norm(a, axis=-1)
    return np.linalg.norm(b - a, axis=-1) / np.where(size > 0, size, 1.0)
