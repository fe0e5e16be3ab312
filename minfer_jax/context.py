"""How a text is fitted into a context: what is refused, the chunks it is run in, and what is
dropped when it is full.
"""

import operator
from collections.abc import Sequence

import numpy as np

N_CTX = 4096  # positions of context, unless told
MAX_TOKENS = 512  # tokens of an answer, unless told
CHUNK = 512  # tokens that one prefill call takes at most, unless told
BUCKETS = (32, 128, 512)  # lengths that a prefill is compiled for, as far as the chunk allows
_FREE_AT_LEAST = 4  # positions of a context that a shift can always use, as in llama.cpp


class EngineError(ValueError):
    """What was asked cannot be run. One line."""


def whole(name: str, value: object, least: int | None = None) -> int:
    """An integer as Python's own, which numpy's are not: a saved state takes no others.

    Args:
        name: of the argument, for the message.
        value: what was given.
        least: what it must not be below.

    Raises:
        EngineError: it is no integer, or too small.
    """
    try:
        number = operator.index(value)  # pyright: ignore
    except TypeError:
        raise EngineError(f"{name} is {value!r}, expected an integer") from None
    if least is not None and number < least:
        raise EngineError(f"{name} is {number}, expected at least {least}")
    return number


def smallest_of(sizes: Sequence[int], n: int) -> int:
    """The smallest of ascending sizes that holds n, or the largest."""
    return next((size for size in sizes if size >= n), sizes[-1])


def power_of_two(n: int, least: int, most: int) -> int:
    """The next power of two that holds n, from `least` to `most`."""
    return min(max(least, 1 << (n - 1).bit_length()), most)


def buckets(n_ctx: int, chunk: int) -> tuple[int, ...]:
    """The numbers of tokens that a prefill is compiled for; the last is the chunk.

    Raises:
        EngineError: the chunk is no integer, or below 1.
    """
    chunk = whole("prefill_chunk", chunk, 1)
    longest = min(n_ctx, chunk)
    return *(b for b in BUCKETS if b < longest), longest


def check_prompt_fits(n_prompt: int, n_ctx: int, n_ctx_train: int | None = None) -> None:
    """Refuse a prompt longer than the context.

    Raises:
        EngineError: says both lengths, and to raise n_ctx where the model's maximum allows it.
    """
    if n_prompt <= n_ctx:
        return
    hint = "shorten it"
    if n_ctx_train is not None and n_ctx < n_ctx_train:
        hint += f", or raise n_ctx (this model allows {n_ctx_train})"
    raise EngineError(f"the prompt has {n_prompt} tokens, but the context holds {n_ctx}: {hint}")


def checked_ids(token_ids: Sequence[int], n_vocab: int) -> np.ndarray:
    """Token ids as int32 [T].

    Raises:
        EngineError: there are none, they are no integers, or one is outside the vocabulary.
    """
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # nested, and of several lengths
        ids = np.asarray(token_ids, object)
    if ids.size == 0:
        raise EngineError("the prompt holds no tokens; give at least one")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise EngineError(
            f"token_ids is {ids.dtype} {list(ids.shape)}, expected a list of integers"
        )
    wrong = ids[(ids < 0) | (ids >= n_vocab)]
    if wrong.size:
        raise EngineError(f"token id {wrong[0]} is outside the vocabulary of {n_vocab}")
    return ids.astype(np.int32)


def shifted(tokens: Sequence[int], n_ctx: int, n_keep: int) -> list[int]:
    """What stays of a text that has outgrown its context, as llama.cpp's server chooses it.

        n_ctx = 8, n_keep = 2:    0 1 2 3 4 5 6 7 8   the last one drawn, not yet run
                                  0 1       5 6 7 8   half of what is not kept is dropped

    Args:
        tokens: n_ctx + 1 of them.
        n_ctx: positions of the context.
        n_keep: how many to keep at the beginning, as long as some positions are left to use.
    """
    n_keep = max(0, min(n_keep, n_ctx - _FREE_AT_LEAST))
    n_drop = max(1, (n_ctx - n_keep) // 2)
    return [*tokens[:n_keep], *tokens[n_keep + n_drop :]]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32))
    return int(differ[0]) if differ.size else n
