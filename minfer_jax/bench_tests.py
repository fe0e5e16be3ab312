"""The tests of the bench, and their measuring: ours and the peers', strictly in turn.

    ppP        the prefill of P tokens into an empty context
    tgN        N tokens generated one by one after a first one
    tgN @ dD   the same after D tokens that are not timed

A rate is P or N over wall seconds. Here a prefill ends when the token after it is drawn, as
`RunStats.prefill_seconds` says: P - 1 tokens through the prefill program and the last through
decode, sampler included; a generated token includes its draw. The peers are timed without drawing,
as llama-bench times them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minfer_jax.bench_peer import Job, Peer, Settings
from minfer_jax.engine import Engine

_REST = 0.02  # seconds between two engines' turns: idle threads of the one may still spin


@dataclass(frozen=True, kw_only=True)
class BenchTest:
    """One test.

    Attributes:
        n_prompt: tokens to prefill and time; 0 in a decode test.
        n_gen: tokens to generate and time; 0 in a prefill test.
        depth: tokens in the context before those.
    """

    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench writes it."""
        name = f"tg{self.n_gen}" if self.n_gen else f"pp{self.n_prompt}"
        return name + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_positions(self) -> int:
        """Positions of context that it takes, the first token of a decode test at depth 0 too."""
        return self.n_prompt + max(self.depth, 1) + self.n_gen if self.n_gen else self.n_prompt


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens a second of each repetition, at least one."""

    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.samples)

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.samples)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """What a peer did in a test."""

    name: str
    version: str
    settings: Settings
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a test.

    Attributes:
        test: which.
        rates: ours.
        compile_seconds: spent on programs that this test needed first.
        cached: whether the compile cache had all of those; None if there were none.
        peers: the others' rates.
    """

    test: BenchTest
    rates: Rates
    compile_seconds: float
    cached: bool | None
    peers: tuple[PeerResult, ...]


def all_tests(
    n_prompt: Sequence[int], n_gen: Sequence[int], depths: Sequence[int]
) -> tuple[BenchTest, ...]:
    """Prefills, and then decodes at each depth."""
    prefills = (BenchTest(n_prompt=n) for n in n_prompt)
    return *prefills, *(BenchTest(n_gen=n, depth=d) for d in depths for n in n_gen)


def synthetic_ids(n: int, n_vocab: int) -> list[int]:
    """n token ids spread over the vocabulary, the same in every run."""
    return [(i * 7919 + 13) % n_vocab for i in range(n)]


def measure(
    engine: Engine,
    test: BenchTest,
    peers: Sequence[Peer],
    *,
    model: Path,
    threads: int,
    repeat: int,
    on_turn: Callable[[], object] = lambda: None,
) -> Result:
    """Run one test, after a repetition that does not count: it compiles and warms up.

    Args:
        engine: with room for the test.
        test: which.
        peers: to be run in turn with the engine.
        model: the file, for them.
        threads: that the engine has, for them.
        repeat: repetitions that count, at least 1.
        on_turn: called after each repetition, the first one included.

    Raises:
        PeerError: a peer cannot run the test.
    """
    n_before = test.depth if test.n_gen else test.n_prompt
    ids = synthetic_ids(max(n_before, 1), engine.cfg.n_vocab)
    job = Job(model=model, n_ctx=engine.n_ctx, threads=threads, n_prompt=n_before, n_gen=test.n_gen)
    compiled = len(engine.compiles)
    our_rate(engine, ids, test.n_gen)
    new = engine.compiles[compiled:]
    ours: list[float] = []
    theirs: list[list[float]] = [[] for _ in peers]
    try:
        for peer in peers:
            peer.begin(job)
        on_turn()
        for _ in range(repeat):
            ours.append(our_rate(engine, ids, test.n_gen))
            for peer, rates in zip(peers, theirs, strict=True):
                time.sleep(_REST)
                rates.append(peer.rate())
            if peers:
                time.sleep(_REST)
            on_turn()
        return Result(
            test=test,
            rates=Rates(samples=tuple(ours)),
            compile_seconds=sum((c.seconds for c in new), 0.0),
            cached=all(c.cached for c in new) if new else None,
            peers=tuple(
                PeerResult(
                    name=peer.name,
                    version=peer.version,
                    settings=peer.settings,
                    rates=Rates(samples=tuple(rates)),
                )
                for peer, rates in zip(peers, theirs, strict=True)
            ),
        )
    finally:
        for peer in peers:
            peer.end()


def our_rate(engine: Engine, ids: Sequence[int], n_gen: int) -> float:
    """Tokens a second of the prefill of `ids` if n_gen is 0, else of n_gen tokens after it."""
    n_drawn = sum(1 for _ in engine.generate_tokens(ids, n_gen or 1, reuse=False, temperature=0.0))
    assert n_drawn == (n_gen or 1), "the context has room for the test"
    return engine.stats.decode_rate if n_gen else engine.stats.prefill_rate
