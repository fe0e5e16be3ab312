"""What the model says after each token of a text."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from minfer_jax.burst import burst
from minfer_jax.context import EngineError
from minfer_jax.programs import all_logits, decode, prefill
from minfer_jax.runner import Runner, at, padded
from minfer_jax.sampling import SamplingParams, init_state


def logit_rows(
    runner: Runner, ids: Int[np.ndarray, " T"], chunk: int | None
) -> Float[np.ndarray, "T V"]:
    """Run all of a text.

    Args:
        runner, ids, chunk: as for `logit_parts`.

    Returns:
        float32.
    """
    out, start = np.empty((len(ids), runner.n_vocab), np.float32), 0
    for rows in logit_parts(runner, ids, chunk):
        out[start : start + len(rows)] = rows
        start += len(rows)
    return out


def logit_parts(
    runner: Runner, ids: Int[np.ndarray, " T"], chunk: int | None, first: int = 0
) -> Iterator[Float[np.ndarray, "n V"]]:
    """Run all of a text, call by call: all rows of a long one may be more than memory holds.

    Args:
        runner: after `begin`.
        ids: at least one, at most n_ctx.
        chunk: tokens that one call runs, up to the largest prefill, which None stands for; 1 for
            the decode program.
        first: the position that the rows begin at. Those before it are run without the output
            layer.

    Yields:
        float32, the next rows: `chunk` of them, or what is left.

    Raises:
        EngineError: first is no position of the text; another run has begun meanwhile.
    """
    if not 0 <= first < len(ids):
        raise EngineError(f"first is {first}, expected 0 to {len(ids) - 1}")
    programs, number = runner.programs, runner.number
    chosen = SamplingParams(temperature=0.0)
    args, sampler = chosen.arrays(), init_state(chosen, [])
    size = runner.buckets[-1] if chunk is None else chunk
    bucket, before = (runner.bucket(min(size, n)) for n in (len(ids) - first, first))
    if first:
        programs.compile(prefill, runner.params, before)
    if chunk == 1:
        programs.compile(decode, runner.params, 1, sampler, args, burst(1))
    else:
        programs.compile(all_logits, runner.params, bucket)
    runner.kv.keep(0)
    for start in range(0, first, before):
        part = ids[start : min(start + before, first)]
        runner.call(prefill, *padded(part, start, before))
    lost = False
    try:
        for start in range(first, len(ids), size):
            part = ids[start : start + size]
            if chunk == 1:
                *_, logits, sampler = runner.call(
                    decode, part[None], at(start), sampler, args, burst(1)
                )
                rows = np.asarray(logits)
            else:
                (logits,) = runner.call(all_logits, *padded(part, start, bucket))
                rows = np.asarray(logits)[0, : len(part)]
            lost = lost or bool(np.isnan(rows[:, 0]).any())
            del logits
            yield rows
            del rows  # not beside those of the next call
            runner.check_current(number)
    finally:
        if lost and number == runner.number:
            runner.kv.drop()
