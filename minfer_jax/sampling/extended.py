"""The sampler with every step, in an order that is data.

The order begins with steps that change or judge all logits one by one; they run on the whole
vocabulary. What follows, from the first step that needs the logits sorted, runs on the few largest,
and again on all of them where the few do not tell:

    penalties, dry, top_n_sigma | top_k, typ_p, top_p, min_p, xtc, temperature
    [------ on all logits -----]|[ on 128 of them; where these do not tell, on all -----]

Steps that are off are left out of the order, on the host, and cost nothing. A token takes 0.45 ms
where `sample` takes 0.32 (49152 tokens, two cores of a Zen 4), 0.68 where it takes 0.42 (262144).
Where the few do not tell, as with typical-p and no top-k, it takes 1.8 and 7.9 ms.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from minfer_jax.sampling import (
    dry,
    min_p,
    mirostat,
    penalties,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from minfer_jax.sampling.args import ExtendedArgs, n_words
from minfer_jax.sampling.candidates import Candidates, drawable, everything, largest
from minfer_jax.sampling.chain import FEW, check
from minfer_jax.sampling.draw import draw, draw_key
from minfer_jax.sampling.order import BY_TOKEN, MIROSTAT, STEPS
from minfer_jax.sampling.state import SamplerState, advance

Step = Callable[[Candidates], Candidates]
T = TypeVar("T")

# Passes over the vocabulary without a search in it.
_WIDE = (*BY_TOKEN, "top_n_sigma", "temperature", MIROSTAT)
# Steps that say themselves what they can tell where tokens lie beyond the candidates.
_PARTIAL = ("top_k", "top_p", "min_p")


def sample_extended(
    logits: jax.Array,
    state: SamplerState,
    args: ExtendedArgs,
    mask: jax.Array | None = None,
    *,
    few: int = FEW,
) -> tuple[jax.Array, SamplerState]:
    """Chooses the next token of each row by any of the steps, in any order.

    With the steps and the order of `sample`, it chooses the same token.

    Args:
        logits: float32 ``[B, V]``. -inf and NaN are never chosen.
        state: Of B rows. Its window is what penalties and DRY can look at.
        args: Of B rows. Rows with a temperature below 1e-6 take the largest logit.
        mask: uint32 or int32 ``[B, ceil(V / 32)]``, bit i of word w set where token 32 w + i is
            allowed; None allows all.
        few: Static. How many candidates to look at first; it decides how fast a token is found,
            not which.

    Returns:
        int32 ``[B]`` and the state after it. A token of -1 says that the row holds no finite logit,
        or no allowed one.

    Raises:
        ValueError: The logits are not float32 ``[B, V]``, or another argument does not fit them.
    """
    check(logits, state, args.usual)
    _check_width(logits.shape[1], args, mask)
    steps = bound_steps(state, args)
    begin, logits = run_wide(steps, args.order, allowed(logits, args, mask))
    candidates = largest(logits, min(few, logits.shape[1]))
    likeliest = jnp.where(candidates.logits[:, 0] > -jnp.inf, candidates.ids[:, 0], -1)
    greedy = temperature.greedy(args.usual.temperature)

    def drawn() -> tuple[jax.Array, jax.Array]:
        left = run_few(steps, args.order, begin, candidates)
        sure = (left.complete & left.decided) | greedy
        return lax.cond(jnp.all(sure), lambda: choose(left), on_all)

    def on_all() -> tuple[jax.Array, jax.Array]:
        return choose(everything(run_all(steps, args.order, begin, logits)))

    def choose(left: Candidates) -> tuple[jax.Array, jax.Array]:
        tokens = draw(left, draw_key(state))
        return tokens, mirostat.surprise(left, tokens)

    def found() -> tuple[jax.Array, jax.Array]:
        return likeliest, jnp.full(likeliest.shape, jnp.inf, jnp.float32)

    tokens, surprise = lax.cond(jnp.all(greedy), found, drawn)
    tokens = jnp.where(greedy, likeliest, tokens)
    after = mirostat.follow(state.mu, surprise, args.mirostat_tau, args.mirostat_eta)
    follows = jnp.any(args.order == STEPS.index(MIROSTAT)) & ~greedy
    state = dataclasses.replace(state, mu=jnp.where(follows, after, state.mu))
    return tokens, advance(state, tokens)


def allowed(logits: jax.Array, args: ExtendedArgs, mask: jax.Array | None) -> jax.Array:
    """Adds the bias and leaves what may be drawn.

    Args:
        logits: float32 ``[B, V]``.
        args: Of B rows.
        mask: As for `sample_extended`.

    Returns:
        float32 ``[B, V]``, drawable.
    """
    logits = logits + args.bias[None, :]
    if mask is not None:
        logits = jnp.where(_unpacked(mask, logits.shape[1]), logits, -jnp.inf)
    return drawable(logits, args.usual.n_vocab)


def bound_steps(state: SamplerState, args: ExtendedArgs) -> Mapping[str, Step]:
    """Every step by name, with its values. A new step is one file and one row of this table.

    Args:
        state: Of B rows.
        args: Of B rows.

    Returns:
        Functions of candidates that are complete, for penalties and DRY the whole vocabulary in
        the order of the ids. Top-k, top-p and min-p are for incomplete ones as well.
    """
    usual, key = args.usual, draw_key(state)
    recent = penalties.within(state.recent, args.penalty_last_n)
    return {
        "penalties": lambda c: c.with_logits(
            penalties.penalties(
                c.logits,
                recent,
                usual.repeat_penalty,
                usual.frequency_penalty,
                usual.presence_penalty,
            ),
        ),
        "dry": lambda c: c.with_logits(
            dry.dry(
                c.logits,
                state.recent,
                args.dry_multiplier,
                args.dry_base,
                args.dry_allowed_length,
                args.dry_penalty_last_n,
                args.breakers,
            ),
        ),
        "top_n_sigma": lambda c: top_n_sigma.top_n_sigma(c, args.top_n_sigma),
        "top_k": lambda c: top_k.top_k(c, usual.top_k),
        "typ_p": lambda c: typical.typical(c, args.typical_p),
        "top_p": lambda c: top_p.top_p(c, usual.top_p),
        "min_p": lambda c: min_p.min_p(c, usual.min_p),
        "xtc": lambda c: xtc.xtc(c, args.xtc_probability, args.xtc_threshold, key),
        "temperature": lambda c: temperature.dynamic_temperature(
            c,
            usual.temperature,
            args.dynatemp_range,
            args.dynatemp_exponent,
            _before_by_token(args.order, "temperature"),
        ),
        MIROSTAT: lambda c: mirostat.mirostat(c, state.mu),
    }


def run_wide(
    steps: Mapping[str, Step], order: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs the wide steps that the order begins with.

    Args:
        steps: From `bound_steps`.
        order: int32, numbers of steps and a -1.
        logits: float32 ``[B, V]``, drawable.

    Returns:
        int32 ``[]``, the place of the first other step; and the logits after those before it.
    """
    branches = [partial(_on_logits, steps[name]) for name in _WIDE]
    numbers = jnp.asarray([STEPS.index(name) for name in _WIDE], jnp.int32)

    def goes_on(carry: tuple) -> jax.Array:
        return jnp.any(order[carry[0]] == numbers)

    def run(carry: tuple) -> tuple:
        place, logits = carry
        which = jnp.argmax(order[place] == numbers).astype(jnp.int32)
        return place + 1, lax.switch(which, branches, logits)

    return lax.while_loop(goes_on, run, (jnp.int32(0), logits))


def run_few(
    steps: Mapping[str, Step], order: jax.Array, begin: jax.Array, candidates: Candidates
) -> Candidates:
    """Runs the steps from a place on, on candidates that may not be all.

    Args:
        steps: From `bound_steps`.
        order: int32, numbers of steps and a -1.
        begin: int32 ``[]``, the place.
        candidates: From `largest`.

    Returns:
        What is left; to be trusted in rows that are both complete and decided.
    """

    def step(name: str, c: Candidates) -> Candidates:
        if name in BY_TOKEN:
            return dataclasses.replace(c, decided=jnp.zeros_like(c.decided))
        left = steps[name](c)
        if name in _PARTIAL:
            return left
        return dataclasses.replace(left, decided=c.decided & c.complete)

    def branch(name: str, changing: tuple) -> tuple:
        logits, complete, decided = changing
        now = candidates.with_logits(logits)
        left = step(name, dataclasses.replace(now, complete=complete, decided=decided))
        return left.logits, left.complete, left.decided

    first = (candidates.logits, candidates.complete, candidates.decided)
    logits, complete, decided = _run([partial(branch, n) for n in STEPS], order, begin, first)
    left = candidates.with_logits(logits)
    return dataclasses.replace(left, complete=complete, decided=decided)


def run_all(
    steps: Mapping[str, Step], order: jax.Array, begin: jax.Array, logits: jax.Array
) -> jax.Array:
    """Runs the steps from a place on, on the whole vocabulary.

    Args:
        steps: From `bound_steps`.
        order: int32, numbers of steps and a -1.
        begin: int32 ``[]``, the place.
        logits: float32 ``[B, V]``, drawable.

    Returns:
        float32 ``[B, V]``, -inf where a token was dropped.
    """
    return _run([partial(_on_logits, steps[name]) for name in STEPS], order, begin, logits)


def _run(branches: list[Callable[[T], T]], order: jax.Array, begin: jax.Array, first: T) -> T:
    """Runs the branches that the order names, up to its first -1."""

    def run(carry: tuple) -> tuple:
        place, values = carry
        return place + 1, lax.switch(order[place], branches, values)

    return lax.while_loop(lambda carry: order[carry[0]] >= 0, run, (begin, first))[1]


def _on_logits(step: Step, logits: jax.Array) -> jax.Array:
    return step(everything(logits)).logits


def _before_by_token(order: jax.Array, name: str) -> jax.Array:
    """Whether a step that changes logits by token follows a step: bool ``[]``."""
    places = jnp.arange(order.size)
    later = places > jnp.argmax(order == STEPS.index(name))
    by_token = jnp.zeros(order.shape, bool)
    for step in BY_TOKEN:
        by_token |= order == STEPS.index(step)
    return jnp.any(later & by_token)


def _unpacked(mask: jax.Array, n: int) -> jax.Array:
    """The first n bits of each row: bool ``[B, n]``."""
    words = mask if mask.dtype == jnp.uint32 else lax.bitcast_convert_type(mask, jnp.uint32)
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return (bits & 1 != 0).reshape(mask.shape[0], -1)[:, :n]


def _check_width(vocab: int, args: ExtendedArgs, mask: jax.Array | None) -> None:
    """Refuses arrays for another vocabulary, when traced."""
    words = n_words(vocab)
    expected = {"bias": (args.bias.size, vocab), "breakers": (args.breakers.size, words)}
    if mask is not None:
        expected["mask"] = (mask.shape[-1], words)
    for name, (got, wanted) in expected.items():
        if got != wanted:
            raise ValueError(f"{name} has {got} entries; logits of {vocab} tokens want {wanted}")
