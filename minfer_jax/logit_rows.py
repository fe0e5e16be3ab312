"""What the model says after each token of a text."""

import numpy as np
from jaxtyping import Float, Int

from minfer_jax.burst import burst
from minfer_jax.programs import all_logits, decode
from minfer_jax.runner import Runner, at, padded
from minfer_jax.sampling import SamplingParams, init_state


def logit_rows(
    runner: Runner, ids: Int[np.ndarray, " T"], chunk: int | None
) -> Float[np.ndarray, "T V"]:
    """Run all of a text.

    Args:
        runner: after `begin`.
        ids: at least one, at most n_ctx.
        chunk: tokens that one call runs, up to the largest prefill, which None stands for; 1 for
            the decode program.

    Returns:
        float32.
    """
    programs = runner.programs
    out = np.empty((len(ids), runner.n_vocab), np.float32)
    chosen = SamplingParams(temperature=0.0)
    args, sampler = chosen.arrays(), init_state(chosen, [])
    size = runner.buckets[-1] if chunk is None else chunk
    bucket = runner.bucket(min(size, len(ids)))
    if chunk == 1:
        programs.compile(decode, runner.params, 1, sampler, args, burst(1))
    else:
        programs.compile(all_logits, runner.params, bucket)
    runner.kv.keep(0)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        if chunk == 1:
            *_, logits, sampler = runner.call(
                decode, part[None], at(start), sampler, args, burst(1)
            )
            out[start] = np.asarray(logits)[0]
        else:
            (logits,) = runner.call(all_logits, *padded(part, start, bucket))
            out[start : start + len(part)] = np.asarray(logits)[0, : len(part)]
    if np.isnan(out[:, 0]).any():
        runner.kv.drop()
    return out
