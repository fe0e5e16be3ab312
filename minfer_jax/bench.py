"""`python -m minfer_jax.bench MODEL`: prefill and decode speed, with compile and load time apart.

Tests are named as llama-bench names them: pp512 is a prefill of 512 tokens, tg128 the generation of
128, tg128@2048 that after a prompt of 2048. The table goes to standard output, the rest to standard
error.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax import language_model, sources
from minfer_jax.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Result:
    """One test: its name and tokens a second of each repetition."""

    test: str
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the rates."""
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def synthetic_ids(n: int, n_vocab: int) -> list[int]:
    """n token ids spread over the vocabulary, the same in every run."""
    return [(i * 7919 + 13) % n_vocab for i in range(n)]


def measure(engine: Engine, *, n_prompt: int, n_gen: int, depth: int, repeat: int) -> list[Result]:
    """Time the two tests; one repetition before the first warms up and compiles.

    Args:
        engine: with room for n_prompt, and for depth + n_gen tokens.
        n_prompt: tokens of the prefill test; 0 leaves it out.
        n_gen: tokens of the decode test; 0 leaves it out.
        depth: tokens before those, at least 1.
        repeat: repetitions that count.
    """
    results = []
    n_vocab = engine.cfg.n_vocab
    if n_prompt:
        ids, rates = synthetic_ids(n_prompt, n_vocab), []
        for _ in range(repeat + 1):
            list(engine.generate_tokens(ids, 1, temperature=0.0))
            rates.append(n_prompt / engine.stats.prefill_seconds)
        results.append(Result(test=f"pp{n_prompt}", rates=tuple(rates[1:])))
    if n_gen:
        ids, rates = synthetic_ids(depth, n_vocab), []
        for _ in range(repeat + 1):
            list(engine.generate_tokens(ids, n_gen + 1, temperature=0.0))
            rates.append(n_gen / engine.stats.decode_seconds)
        name = f"tg{n_gen}" + (f"@{depth}" if depth > 1 else "")
        results.append(Result(test=name, rates=tuple(rates[1:])))
    return results


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 0, or 1 for a model that cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m minfer_jax.bench", description=__doc__)
    parser.add_argument("model", nargs="?", default=sources.DEFAULT_MODEL)
    parser.add_argument("-p", type=int, default=512, help="prompt tokens, 0 for none (512)")
    parser.add_argument("-n", type=int, default=128, help="generated tokens, 0 for none (128)")
    parser.add_argument("-d", type=int, default=0, help="tokens before the generated ones (0)")
    parser.add_argument("-r", type=int, default=5, help="repetitions (5)")
    parser.add_argument("--precision", choices=("default", "highest"), default="default")
    args = parser.parse_args(argv[1:])
    if min(args.p, args.n, args.d) < 0 or args.r < 1 or not args.p + args.n:
        parser.error("-p, -n and -d take 0 or more, -r 1 or more, and -p or -n must be above 0")
    depth = max(args.d, 1)
    begin = time.perf_counter()
    try:
        model = language_model.load(
            args.model, n_ctx=max(args.p, depth + args.n) + 1, precision=args.precision
        )
        load_seconds = time.perf_counter() - begin
        results = measure(model.engine, n_prompt=args.p, n_gen=args.n, depth=depth, repeat=args.r)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    compiles = ", ".join(f"{c.name} {c.seconds:.2f}s" for c in model.engine.compiles)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"load {load_seconds:.2f}s; compile {compiles}; peak {peak:.0f} MB", file=sys.stderr)
    print(f"| model | precision | {'test':>12} | {'tok/s':>16} |\n| --- | --- | ---: | ---: |")
    for r in results:
        rate = f"{r.mean:.1f} ± {r.deviation:.1f}"
        print(f"| {args.model} | {args.precision} | {r.test:>12} | {rate:>16} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
