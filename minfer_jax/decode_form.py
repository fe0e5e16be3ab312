"""Which form of decode a run takes, and what goes in and comes out beside tokens."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from minfer_jax.decode_extended import Asked, decode_extended
from minfer_jax.programs import decode
from minfer_jax.run_options import Drawn
from minfer_jax.sampling import WINDOW_EXTENDED, SamplerArgs, SamplerState, init_state
from minfer_jax.sampling.args import all_tokens
from minfer_jax.sampling.seed import following
from minfer_jax.session import Session


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of decode with its arguments.

    Attributes:
        function: `decode` or `decode_extended`.
        sampler: the sampler's state to begin with.
        args: its values; what else is asked of the extended form.
        n_top: of the likeliest tokens, how many are to be told; None where nothing is.
    """

    function: Callable[..., tuple]
    sampler: SamplerState
    args: SamplerArgs | Asked
    n_top: int | None

    def read(
        self, tokens: Array, extra: Any, steps: int
    ) -> list[tuple[int, float | None, Drawn | None]]:
        """What a call of one row drew: each token, the sampler's mu after it, and what is told.

        Args:
            tokens, extra: results of the call; this waits for them.
            steps: tokens that were asked for.
        """
        ids = np.asarray(tokens)[0, :steps].tolist()
        if self.function is decode:
            return [(token, None, None) for token in ids]
        mus = np.asarray(extra.mu)[0].tolist()
        if self.n_top is None:
            return [(token, mus[i], None) for i, token in enumerate(ids)]
        n = self.n_top
        logprob, top, likely = (
            np.asarray(a)[0].tolist() for a in (extra.logprob, extra.top_ids, extra.top_logprobs)
        )
        return [
            (
                token,
                mus[i],
                Drawn(
                    token=token,
                    logprob=logprob[i],
                    top=tuple(zip(top[i][:n], likely[i][:n], strict=True)),
                ),
            )
            for i, token in enumerate(ids)
        ]

    def after(self, session: Session) -> "Form":
        """The same, to go on with a session of which more was drawn; of the form `decode`."""
        state = init_state(session.options.sampling, list(session.recent), session.n_drawn)
        return dataclasses.replace(self, sampler=state)

    def masked(self, *masks: np.ndarray) -> SamplerArgs | Asked:
        """The arguments under masks, one of each row."""
        assert isinstance(self.args, Asked)
        return dataclasses.replace(self.args, mask=np.stack(masks))


def form_of(session: Session, n_vocab: int, n_known: int, batch: int = 1) -> Form:
    """How to go on with a session.

    Args:
        session: the text and its options.
        n_vocab: V, of the logits.
        n_known: tokens that may be drawn; those from there on are padding.
        batch: rows that go on from it; each has a seed of its own, the next number.
    """
    options, watch, recent = session.options, session.watch, list(session.recent)
    sampling = options.sampling
    extended = sampling.extended or options.bias or options.constrained or watch is not None
    rows = [dataclasses.replace(sampling, seed=following(sampling.seed, i)) for i in range(batch)]
    if not extended:
        states = [init_state(row, recent, session.n_drawn) for row in rows]
        args = sampling.arrays(batch, n_vocab=n_known)
        return Form(function=decode, sampler=_joined(states), args=args, n_top=None)
    states = [
        init_state(row, recent, session.n_drawn, window=WINDOW_EXTENDED, mu=session.mu)
        for row in rows
    ]
    bias = np.zeros(n_vocab, np.float32)
    bias[list(options.bias)] = list(options.bias.values())
    asked = Asked(
        sampling=sampling.extended_arrays(
            batch, n_vocab=n_known, bias=bias, breakers=options.breakers
        ),
        mask=jax.device_put(np.tile(all_tokens(n_vocab), (batch, 1))),
        logprobs=jax.device_put(np.bool_(watch is not None)),
    )
    return Form(
        function=decode_extended,
        sampler=_joined(states),
        args=asked,
        n_top=None if watch is None else watch.n_top,
    )


def _joined(states: list[SamplerState]) -> SamplerState:
    """The rows of several states in one, on the host and copied over: this compiles nothing."""
    if len(states) == 1:
        return states[0]
    rows = [jax.tree.map(np.asarray, state) for state in states]
    return jax.device_put(jax.tree.map(lambda *a: np.concatenate(a), *rows))
