"""How a run was asked to go on, checked: what outlives the call that began it."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from minfer_jax.context import EngineError, whole
from minfer_jax.decode_extended import N_TOP
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.args import n_words


class TokenConstraint(Protocol):
    """Says which tokens may come next, as a text goes on."""

    def mask(self) -> np.ndarray:
        """Tokens that may come next, uint32 [ceil(V / 32)]: bit i of word w is token 32 w + i.

        Those that end the text are among them where it may end.
        """
        ...

    def accept(self, token: int) -> None:
        """The next token, one that the mask allows and that does not end the text."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the text must end here."""
        ...

    def copy(self) -> "TokenConstraint":
        """Another at the same place, which goes its own way."""
        ...


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A token and how likely it was, by the model's logits as they are: before the sampler.

    Attributes:
        token: its id.
        logprob: the natural logarithm of its probability.
        top: the likeliest tokens in its place, (id, logprob) in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who wants to know how likely the tokens are.

    Attributes:
        n_top: how many of the likeliest tokens to tell beside each one drawn.
        tell: called with each token before it is yielded.
    """

    n_top: int
    tell: Callable[[Drawn], None]

    def __post_init__(self) -> None:
        if not 0 <= whole("n_logprobs", self.n_top) <= N_TOP:
            raise EngineError(f"n_logprobs is {self.n_top}, expected 0 to {N_TOP}")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """How a run was asked to go on.

    Attributes:
        sampling: how to draw.
        stop_ids: tokens that end the run.
        context_shift: whether to make room when the context is full, or to end.
        n_keep: tokens at the beginning that stay then.
        bias: token id to what is added to its logit; -inf forbids it.
        breakers: uint32 [ceil(V / 32)], the tokens that break a sequence of DRY; None for none.
        constrained: whether the run is under a TokenConstraint.
    """

    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    context_shift: bool = False
    n_keep: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    breakers: np.ndarray | None = None
    constrained: bool = False


def checked_options(
    n_vocab: int,
    n_prompt: int,
    sampling: SamplingParams,
    *,
    stop_ids: Iterable[int] = (),
    context_shift: bool = False,
    n_keep: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    dry_breakers: np.ndarray | None = None,
    constrained: bool = False,
) -> RunOptions:
    """The options of a run.

    Args:
        n_vocab: V.
        n_prompt: tokens of the prompt.
        sampling: how to draw.
        stop_ids, context_shift, n_keep, logit_bias, dry_breakers: as for
            `Engine.generate_tokens`.
        constrained: whether it has a constraint.

    Raises:
        EngineError: what should be an integer is none; a bias is no number, or of a token outside
            the vocabulary; the breakers are not of this vocabulary.
    """
    stops, n_keep = {whole("a stop id", i) for i in stop_ids}, whole("n_keep", n_keep)
    words = n_words(n_vocab)
    if dry_breakers is not None and (
        dry_breakers.dtype != np.uint32 or dry_breakers.shape != (words,)
    ):
        raise EngineError(
            f"dry_breakers is {dry_breakers.dtype} {list(dry_breakers.shape)}, "
            f"expected uint32 [{words}], a bit for each token"
        )
    return RunOptions(
        sampling=sampling,
        stop_ids=frozenset(i for i in stops if 0 <= i < n_vocab),
        context_shift=bool(context_shift),
        n_keep=n_prompt if n_keep < 0 else min(n_keep, MAX_POSITIONS),
        bias=checked_bias(n_vocab, logit_bias or {}),
        breakers=dry_breakers,
        constrained=constrained,
    )


def checked_bias(n_vocab: int, bias: Mapping[int, float]) -> dict[int, float]:
    """A bias whose ids are tokens and whose values are numbers, or -inf; else EngineError."""
    checked = {}
    for key, value in bias.items():
        token = whole("a token of logit_bias", key)
        if not 0 <= token < n_vocab:
            raise EngineError(
                f"logit_bias has token {token}, which is outside the vocabulary of {n_vocab}"
            )
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (number == -math.inf or abs(number) <= float(np.finfo(np.float32).max)):
            raise EngineError(
                f"logit_bias of token {token} is {value!r}, expected a number, or -inf to forbid it"
            )
        checked[token] = number
    return checked
