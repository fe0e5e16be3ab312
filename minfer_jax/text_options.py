"""What a caller says of a run in words, as the engine takes it: in token ids."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax.sampling.dry import BREAKERS, breaker_tokens
from minfer_jax.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from minfer_jax.constraint import Constraint, Matcher


def token_options(
    tokenizer: Tokenizer,
    n_vocab: int,
    matcher: "Callable[[Constraint], Matcher]",
    breaking: Callable[[tuple[str, ...]], np.ndarray],
    *,
    logit_bias: Mapping[int | str, float] | None = None,
    ignore_eos: bool = False,
    constraint: "Constraint | None" = None,
    dry_breakers: Sequence[str] | str = BREAKERS,
    dry_multiplier: float = 0.0,
    **others: Any,
) -> dict[str, Any]:
    """The options of `Engine.generate_tokens` that stand for those of `LanguageModel.stream`.

    Args:
        tokenizer: of the model.
        n_vocab: rows of its logits; a token beyond is never drawn.
        matcher: follows a constraint from the beginning of a text.
        breaking: as `breaking_tokens`, of that model.
        logit_bias: by id, or by the text of a single token.
        ignore_eos: forbid the tokens that end an answer.
        constraint: what the answer must look like.
        dry_breakers: texts that break a sequence of DRY, or one.
        dry_multiplier: as in SamplingParams.
        **others: as they are.

    Raises:
        TokenizerError: a text of logit_bias is more than one token.
        ConstraintError: the constraint takes too much.
    """
    bias = {_token(tokenizer, key): value for key, value in (logit_bias or {}).items()}
    if ignore_eos:
        bias |= dict.fromkeys((i for i in tokenizer.eog_ids if i < n_vocab), -math.inf)
    options = {**others, "dry_multiplier": dry_multiplier, "logit_bias": bias}
    if constraint is not None:
        options["constraint"] = matcher(constraint)
    if dry_multiplier:
        several = (dry_breakers,) if isinstance(dry_breakers, str) else tuple(dry_breakers)
        options["dry_breakers"] = breaking(several)
    return options


def breaking_tokens(tokenizer: Tokenizer, n_vocab: int, breakers: tuple[str, ...]) -> np.ndarray:
    """The tokens that break a sequence of DRY; it reads all, in up to a second.

    Args:
        tokenizer: of the model.
        n_vocab: rows of its logits, V; those that no token has break nothing.
        breakers: texts.

    Returns:
        uint32 [ceil(V / 32)], as `dry.breaker_tokens`.
    """
    pieces = [tokenizer.token_bytes(i) for i in range(min(tokenizer.n_vocab, n_vocab))]
    return breaker_tokens([*pieces, *[b""] * (n_vocab - len(pieces))], breakers)


def _token(tokenizer: Tokenizer, key: int | str) -> int:
    if not isinstance(key, str):
        return key
    special = [token.token_id for token in tokenizer.special if token.text == key]
    ids = special[:1] or tokenizer.encoder.encode(key)
    if len(ids) != 1:
        raise TokenizerError(
            f"logit_bias has {key!r}, which is {len(ids)} tokens, expected one: give ids {ids}"
        )
    return ids[0]
