"""The usual sampler: which steps run, in which order, on how many candidates."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from minfer_jax.sampling import min_p, penalties, temperature, top_k, top_p
from minfer_jax.sampling.args import SamplerArgs
from minfer_jax.sampling.candidates import Candidates, drawable, everything, largest
from minfer_jax.sampling.draw import draw, draw_key
from minfer_jax.sampling.state import SamplerState, advance


@dataclass(frozen=True, kw_only=True)
class LogitStep:
    """A step that changes logits by token, before candidates are chosen.

    Attributes:
        apply: ``(logits [B, V], recent [B, W], *values) -> logits [B, V]``, drawable.
        values: The fields of `SamplerArgs` it takes.
    """

    apply: Callable[..., jax.Array]
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CandidateStep:
    """A step that drops or rescales candidates.

    Attributes:
        apply: ``(candidates, *values) -> candidates``.
        values: The fields of `SamplerArgs` it takes.
    """

    apply: Callable[..., Candidates]
    values: tuple[str, ...]


# Both tables run from top to bottom. A new step is one file and one row.
LOGIT_STEPS = (
    LogitStep(
        apply=penalties.penalties,
        values=("repeat_penalty", "frequency_penalty", "presence_penalty"),
    ),
)
CANDIDATE_STEPS = (
    CandidateStep(apply=top_k.top_k, values=("top_k",)),
    CandidateStep(apply=top_p.top_p, values=("top_p",)),
    CandidateStep(apply=min_p.min_p, values=("min_p",)),
    CandidateStep(apply=temperature.temperature, values=("temperature",)),
)

FEW = 128
"""How many candidates to look at before resorting to the whole vocabulary."""


def sample(
    logits: jax.Array, state: SamplerState, args: SamplerArgs, *, few: int = FEW
) -> tuple[jax.Array, SamplerState]:
    """Chooses the next token of each row.

    Pure, and meant to be traced into the program that makes the logits. Batched already: under
    vmap every branch would run.

    Args:
        logits: float32 ``[B, V]``. -inf and NaN are never chosen.
        state: Of B rows.
        args: Of B rows. Rows with a temperature below 1e-6 take the largest logit.
        few: Static. How many candidates to look at first; it decides how fast a token is found,
            not which.

    Returns:
        int32 ``[B]`` and the state after it. A token of -1 says that the row holds no finite logit.

    Raises:
        ValueError: The logits are not float32 ``[B, V]``, or B differs among the arguments.
    """
    check(logits, state, args)
    logits = adjust(logits, state, args)
    vocab = logits.shape[1]
    candidates = largest(logits, min(few, vocab))
    likeliest = jnp.where(candidates.logits[:, 0] > -jnp.inf, candidates.ids[:, 0], -1)
    greedy = temperature.greedy(args.temperature)

    def drawn() -> jax.Array:
        key = draw_key(state)
        left = survivors(candidates, args)
        if few >= vocab:
            return draw(left, key)
        return lax.cond(
            jnp.all((left.complete & left.decided) | greedy),
            lambda: draw(left, key),
            lambda: draw(survivors(everything(logits), args), key),
        )

    tokens = lax.cond(jnp.all(greedy), lambda: likeliest, drawn)
    tokens = jnp.where(greedy, likeliest, tokens)
    return tokens, advance(state, tokens)


def adjust(logits: jax.Array, state: SamplerState, args: SamplerArgs) -> jax.Array:
    """Runs the logit steps.

    Args:
        logits: float32 ``[B, V]``.
        state: Of B rows.
        args: Of B rows.

    Returns:
        float32 ``[B, V]``, drawable.
    """
    logits = drawable(logits, args.n_vocab)
    for step in LOGIT_STEPS:
        logits = step.apply(logits, state.recent, *_values(args, step.values))
    return logits


def survivors(candidates: Candidates, args: SamplerArgs) -> Candidates:
    """Runs the candidate steps.

    Args:
        candidates: As chosen from the logits.
        args: Of B rows.

    Returns:
        What is left; to be trusted in rows that are both complete and decided.
    """
    for step in CANDIDATE_STEPS:
        candidates = step.apply(candidates, *_values(args, step.values))
    return candidates


def _values(args: SamplerArgs, names: tuple[str, ...]) -> list[jax.Array]:
    return [getattr(args, name) for name in names]


def check(logits: jax.Array, state: SamplerState, args: SamplerArgs) -> None:
    """Refuses logits that are not float32 ``[B, V]`` and arguments of another B, when traced.

    Raises:
        ValueError: They are.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits must be float32 [batch, vocab], got {logits.dtype} {list(logits.shape)}"
        )
    rows = {"state": state.step.shape, "args": args.temperature.shape}
    for name, shape in rows.items():
        if shape != logits.shape[:1]:
            raise ValueError(
                f"{name} is of shape {list(shape)} for logits of {logits.shape[0]} rows: "
                f"make {name} for as many rows as the logits"
            )
