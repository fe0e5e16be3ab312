"""The few tokens worth looking at: the largest logits of each row, and what is known of the rest.

After top-k or min-p only a handful of a quarter million tokens can still be drawn. So the steps
work on the n largest, and each says whether what it drops includes everything beyond:

    vocabulary, descending:   l0 l1 l2 ........ l(n-1) | ..................... l(V-1)
                              [---- candidates -----]    [------- beyond -----------]

A row that ends the chain not `complete`, or not `decided`, has to be done again with the whole
vocabulary as candidates. These are left in the order of their ids: a sort takes XLA's CPU compiler
70 ms for 262,144 logits, a search for the one place to cut 2 ms.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# lax.top_k reads the whole row at about 1.5 ns a logit. Above 8 n chunks it is cheaper to find the
# n chunks with the largest maxima, at memory speed, and search only those.
_CHUNK = 32
_MIN_CHUNKS_PER_CANDIDATE = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Some or all logits of each row, as the steps leave them.

    Where a row is not complete its last candidate has not been dropped, so it bounds all beyond.

    Attributes:
        logits: float32 ``[B, n]``; -inf where dropped.
        ids: int32 ``[B, n]``, the tokens they belong to.
        top: float32 ``[B, 1]``, the largest of them; 0 in rows of -inf alone, so that it can be
            subtracted.
        vocab_logits: float32 ``[B, V]``, what the candidates were taken from.
        complete: bool ``[B]``, no token beyond the candidates can be drawn any more.
        decided: bool ``[B]``, false once a step needed to know more than the candidates show.
        descending: Static. True: by descending logit, equal ones by ascending id, apart from those
            that were dropped. False: by id.
    """

    logits: jax.Array
    ids: jax.Array
    top: jax.Array
    vocab_logits: jax.Array
    complete: jax.Array
    decided: jax.Array
    descending: bool = dataclasses.field(metadata={"static": True})

    def keep(self, mask: jax.Array, *, closes: jax.Array | None = None) -> "Candidates":
        """Drops candidates.

        Args:
            mask: bool ``[B, n]``, true for those that stay.
            closes: bool ``[B]``, true where everything beyond the candidates is dropped as well;
                None where a step is for complete rows only.

        Returns:
            The candidates left.
        """
        return dataclasses.replace(
            self,
            logits=jnp.where(mask, self.logits, -jnp.inf),
            complete=self.complete if closes is None else self.complete | closes,
        )

    def with_logits(self, logits: jax.Array) -> "Candidates":
        """Puts other logits, ``[B, n]``, in place; another of them may be the largest."""
        top = subtrahend(jnp.max(logits, axis=1, keepdims=True))
        return dataclasses.replace(self, logits=logits, top=top)


def drawable(logits: jax.Array, n_vocab: jax.Array | None = None) -> jax.Array:
    """Makes logits safe to compare and subtract.

    Args:
        logits: float32, any shape; ``[B, V]`` where `n_vocab` is given.
        n_vocab: int32 ``[B]``, tokens that are real; those beyond are padding.

    Returns:
        NaN and padding as -inf (never drawn), +inf as the largest finite number, and -0 as 0,
        because sorting tells the two zeros apart.
    """
    never = jnp.isnan(logits)
    if n_vocab is not None:
        never |= lax.broadcasted_iota(jnp.int32, logits.shape, 1) >= n_vocab[:, None]
    logits = jnp.where(never, -jnp.inf, logits)
    logits = jnp.minimum(logits, jnp.finfo(jnp.float32).max)
    return jnp.where(logits == 0, 0.0, logits)


def largest(logits: jax.Array, n: int) -> Candidates:
    """Takes the n largest logits of each row, in descending order.

    The first is the first maximum. Of the logits equal to the last any may have been taken, so
    steps must not rely on the order of these unless the row is complete.

    Args:
        logits: float32 ``[B, V]``, drawable.
        n: How many, V at most.

    Returns:
        The candidates, complete where no finite logit is left beyond them.
    """
    batch, vocab = logits.shape
    if vocab >= _MIN_CHUNKS_PER_CANDIDATE * n * _CHUNK:
        values, ids = _top_of_chunks(logits, n)
    else:
        values, ids = _top_k(logits, n)
    return Candidates(
        logits=values,
        ids=ids,
        top=subtrahend(values[:, :1]),
        vocab_logits=logits,
        complete=(values[:, -1] == -jnp.inf) | (n == vocab),
        decided=jnp.ones((batch,), bool),
        descending=True,
    )


def everything(logits: jax.Array) -> Candidates:
    """Takes the whole vocabulary as candidates, in the order of the ids.

    Args:
        logits: float32 ``[B, V]``, drawable.

    Returns:
        V candidates, complete.
    """
    yes = jnp.ones(logits.shape[:1], bool)
    return Candidates(
        logits=logits,
        ids=lax.broadcasted_iota(jnp.int32, logits.shape, 1),
        top=subtrahend(jnp.max(logits, axis=1, keepdims=True)),
        vocab_logits=logits,
        complete=yes,
        decided=yes,
        descending=False,
    )


def cut(
    candidates: Candidates, weights: jax.Array | None, target: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds the candidate that makes the sum of weights, largest logit first, pass a target.

    Args:
        candidates: In either order.
        weights: float32 ``[B, n]``, not negative; None counts instead, as with weights of 1.
        target: float32 ``[B]``.
        wanted: bool ``[B]``, the rows whose answer is used.

    Returns:
        Its logit, float32 ``[B, 1]``, -inf where the sum stays below; and int32 ``[B, 1]``: of the
        candidates with this logit, those with ids up to this one make the sum pass the target.
    """
    target = target[:, None]
    logits, ids = candidates.logits, candidates.ids
    if candidates.descending:
        if weights is None:
            weights = (logits > -jnp.inf).astype(jnp.float32)
        sums = jnp.cumsum(weights, axis=1)
        place = jnp.sum(sums <= target, axis=1, dtype=jnp.int32, keepdims=True)
        logit = jnp.take_along_axis(logits, place, axis=1, mode="fill", fill_value=-jnp.inf)
        return logit, jnp.take_along_axis(ids, place, axis=1, mode="clip")

    def search() -> tuple[jax.Array, jax.Array]:
        each = jnp.ones_like(logits) if weights is None else weights
        logit = _from_key(_search(_to_key(logits), each, target, bits=32))
        equal = logits == logit
        tied = jnp.any(jnp.sum(equal, axis=1, dtype=jnp.int32) > 1)
        # Of equals the lowest id comes first, so it has to be the largest key. A single one is its
        # own cut, whatever the id.
        bits = candidates.vocab_logits.shape[1].bit_length()
        last = np.uint32(2**bits - 1)

        def among_equals() -> jax.Array:
            above = jnp.sum(jnp.where(logits > logit, each, 0.0), axis=1, keepdims=True)
            keys = last - ids.astype(jnp.uint32)
            return last - _search(keys, jnp.where(equal, each, 0.0), target - above, bits=bits)

        token = lax.cond(tied, among_equals, lambda: jnp.full(target.shape, last))
        return logit, token.astype(jnp.int32)

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.full(target.shape, -jnp.inf, jnp.float32), jnp.zeros(target.shape, jnp.int32)

    return lax.cond(jnp.any(wanted), search, skip)


def _search(keys: jax.Array, weights: jax.Array, target: jax.Array, *, bits: int) -> jax.Array:
    """The largest key c such that the weights of keys >= c sum to more than the target; 0 if none.

    One bit of c a pass, from the highest down.
    """

    def settle(i: jax.Array, c: jax.Array) -> jax.Array:
        higher = c | (np.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        total = jnp.sum(jnp.where(keys >= higher, weights, 0.0), axis=1, keepdims=True)
        return jnp.where(total > target, higher, c)

    return lax.fori_loop(0, bits, settle, jnp.zeros(target.shape, jnp.uint32))


_SIGN = np.uint32(0x80000000)


def _to_key(logits: jax.Array) -> jax.Array:
    """float32 as uint32 in the same order, all above 0: the sign bit flipped, or every bit."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits < _SIGN, bits | _SIGN, ~bits)


def _from_key(key: jax.Array) -> jax.Array:
    """Undoes `_to_key`; 0, which no logit maps to, becomes -inf."""
    bits = jnp.where(key < _SIGN, ~key, key & ~_SIGN)
    return jnp.where(key == 0, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def subtrahend(top: jax.Array) -> jax.Array:
    """A largest logit, made safe to subtract: -inf less itself would be NaN."""
    return jnp.where(top > -jnp.inf, top, 0.0)


def _top_of_chunks(logits: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n largest, found in the n chunks with the largest maxima.

    A logit above the smallest value found lies in one of these chunks: its own chunk's maximum is
    as large, and were n other chunks ahead of it, n logits would be as large as well.
    """
    batch, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _CHUNK)), constant_values=-jnp.inf)
    chunks = padded.reshape(batch, -1, _CHUNK)
    _, chosen = _top_k(jnp.max(chunks, axis=2), n)
    chosen = jnp.sort(chosen, axis=1)  # ascending ids, so that top_k's ties are by id
    pool = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(batch, n * _CHUNK)
    values, place = _top_k(pool, n)
    ids = jnp.take_along_axis(chosen, place // _CHUNK, axis=1) * _CHUNK + place % _CHUNK
    return values, ids


def _top_k(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k, kept whole.

    XLA's CPU compiler first writes it as a sort and a slice, and puts the fast form back only
    if the slice still looks the same; a consumer's own slice, such as the last value, would melt
    into it and leave the sort, ten times as slow.
    """
    return lax.optimization_barrier(tuple(lax.top_k(x, n)))
