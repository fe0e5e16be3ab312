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
from minfer_jax.bench_peer import LlamaCpp
from minfer_jax.engine import Engine, check_prompt_fits
from minfer_jax.model.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Result:
    """One test: its name, and tokens a second of each repetition, ours and the peer's (or none)."""

    test: str
    rates: tuple[float, ...]
    peer: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median of the rates."""
        return statistics.median(self.rates)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def synthetic_ids(n: int, n_vocab: int) -> list[int]:
    """n token ids spread over the vocabulary, the same in every run."""
    return [(i * 7919 + 13) % n_vocab for i in range(n)]


def our_rate(engine: Engine, ids: Sequence[int], n_gen: int) -> float:
    """Tokens a second of the prefill of `ids` if n_gen is 0, else of n_gen tokens after it."""
    list(engine.generate_tokens(ids, n_gen or 1, temperature=0.0))
    return engine.stats.decode_rate if n_gen else engine.stats.prefill_rate


def peer_rate(peer: LlamaCpp, ids: Sequence[int], n_gen: int) -> float:
    """The same, by llama.cpp."""
    if n_gen:
        return n_gen / peer.decode_seconds(ids, n_gen)
    return len(ids) / peer.prefill_seconds(ids)


def measure(
    engine: Engine, peer: LlamaCpp | None, *, n_prompt: int, n_gen: int, depth: int, repeat: int
) -> list[Result]:
    """Time the two tests, engine and peer in turn; the first round warms up and compiles.

    Args:
        engine: with room for n_prompt, and for depth + n_gen tokens.
        peer: llama.cpp on the same file, or None.
        n_prompt: tokens of the prefill test; 0 leaves it out.
        n_gen: tokens of the decode test; 0 leaves it out.
        depth: tokens before those, at least 1.
        repeat: repetitions that count.
    """
    tests = []  # name, prompt length, generated tokens
    if n_prompt:
        tests.append((f"pp{n_prompt}", n_prompt, 0))
    if n_gen:
        tests.append((f"tg{n_gen}" + (f"@{depth}" if depth > 1 else ""), depth, n_gen))
    results = []
    for name, length, generated in tests:
        ids = synthetic_ids(length, engine.cfg.n_vocab)
        ours, theirs = [], []
        for _ in range(repeat + 1):
            ours.append(our_rate(engine, ids, generated))
            if peer is not None:
                theirs.append(peer_rate(peer, ids, generated))
        results.append(Result(test=name, rates=tuple(ours[1:]), peer=tuple(theirs[1:])))
    return results


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 0, or 1 for a model that cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m minfer_jax.bench", description=__doc__)
    parser.add_argument("model", nargs="?", default=sources.DEFAULT_MODEL)
    parser.add_argument("-p", type=int, default=512, help="prompt tokens, 0 for none (512)")
    parser.add_argument("-n", type=int, default=128, help="generated tokens, 0 for none (128)")
    parser.add_argument("-d", type=int, default=0, help="tokens before the generated ones (0)")
    parser.add_argument("-r", type=int, default=5, help="repetitions (5)")
    parser.add_argument("--vs", choices=("llama.cpp",), help="run a peer in turn, print ratios")
    parser.add_argument("--precision", choices=PRECISIONS, default="default")
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
        check_prompt_fits(max(args.p, depth + args.n), model.engine.n_ctx)
        peer = LlamaCpp(model.file.path, n_ctx=model.engine.n_ctx) if args.vs else None
        results = measure(
            model.engine, peer, n_prompt=args.p, n_gen=args.n, depth=depth, repeat=args.r
        )
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    compiles = ", ".join(f"{c.name} {c.seconds:.2f}s" for c in model.engine.compiles)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    print(f"load {load_seconds:.2f}s; compile {compiles}; peak {peak:.0f} MB", file=sys.stderr)
    heads = ["model", "precision", "test", "tok/s"] + ["llama.cpp", "ratio"] * bool(args.vs)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for r in results:
        cells = [args.model, args.precision, r.test, f"{r.median:.1f} ± {r.deviation:.1f}"]
        if r.peer:
            theirs = statistics.median(r.peer)
            cells += [f"{theirs:.1f}", f"{r.median / theirs:.2f}"]
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
