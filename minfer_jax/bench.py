"""`python -m minfer_jax.bench [MODEL]`: prefill and decode speed, with compile and load time apart.

The table goes to standard output, all else to standard error. `bench_tests` says what the tests
are, `bench_rows` what a row says, `bench_memory` what the ceiling is, `bench_compile` what
`--compile` shows, and `bench_drafts` what `--draft-ngram` and `--draft` do.
"""

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import resource

import jax
from jax.stages import Compiled, Lowered
from tqdm import tqdm

from minfer_jax import (
    bench_drafts,
    bench_memory,
    bench_plot,
    bench_reports,
    bench_sweep,
    device,
    host,
    metadata_report,
    plotting,
    sources,
)
from minfer_jax.bench_flags import Options, help_text, parse
from minfer_jax.bench_peer import LlamaBenchPeer, PackagePeer, Peer
from minfer_jax.bench_rows import Run, backend, kernels, row, run_columns
from minfer_jax.bench_table import Columns, render
from minfer_jax.bench_tests import BenchTest, all_tests, measure
from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.context import N_CTX, EngineError
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.gguf_header import one_line
from minfer_jax.language_model import LanguageModel, from_file
from minfer_jax.model.load import read_model_config
from minfer_jax.whole_file import check_apart

_SPARE = 16  # positions of context beyond what the tests need


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and at most one model.

    Returns:
        The exit status: 0, 1 for what cannot be run, 2 for wrong usage, 130 for Ctrl-C.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    threads = host.use_threads(options.threads)
    allowed = host.processors()
    device.use(options.device, options.kernels)
    say(f"Threads: {threads} of {len(allowed)} processors ({_ranges(allowed)})")
    file = open_gguf(sources.resolve(options.model))
    tests = all_tests(options.n_prompt, options.n_gen, options.depths)
    cfg = read_model_config(file, options.precision, options.cache_type, options.kernels)
    n_ctx = _n_ctx(options, tests, cfg.n_ctx_train)
    if options.compiling:
        rows, columns = _compile_rows(file, options, n_ctx)
    elif options.drafting:
        rows, columns = _draft_rows(file, options, n_ctx, threads), bench_drafts.COLUMNS
    else:
        peers = _peers(options)
        rows = _rows(file, options, tests, peers, n_ctx=n_ctx, threads=threads)
        columns = run_columns(options.peers)
    sys.stdout.write(render(rows, columns, options.output))
    sys.stdout.flush()
    if options.plot is not None:
        title = "{model}, {backend}, kernels: {kernels}".format(**rows[0])
        bench_plot.draw(rows, options.plot, title=title)
        say(f"Plot: {options.plot}")
    return 0


def _n_ctx(options: Options, tests: Sequence[BenchTest], most: int) -> int:
    """Positions of context, enough for every test.

    Raises:
        EngineError: the model has not so many.
    """
    if options.compiling or options.drafting:
        return min(options.n_ctx or N_CTX, most)  # what generate compiles for
    need = max(test.n_positions for test in tests)
    if need > most:
        raise EngineError(
            f"the tests take {need} positions, and the model has {most}: lower -p, -d or -n"
        )
    longest = max((*options.n_prompt, *options.depths))
    wanted = longest + max(options.n_gen, default=0) + _SPARE
    return min(max(options.n_ctx or wanted, need), most)


def _peers(options: Options) -> list[Peer]:
    """The peers, each of which is there; said before anything long begins."""
    peers: list[Peer] = []
    for name in options.peers:
        if name == "llama.cpp" and options.llama_bench is not None:
            peers.append(LlamaBenchPeer(options.llama_bench))
        else:
            peers.append(PackagePeer(name, python=options.peer_python))
        say(f"Peer: {name} ({peers[-1].version})")
    return peers


def _load(file: GGUFFile, options: Options, n_ctx: int) -> tuple[LanguageModel, float]:
    """The model, and the seconds that loading it took."""
    say(f"Loading model: {one_line(str(file.path))} ...")
    begin = time.perf_counter()
    with metadata_report.loading_bar(file) as bar:
        model = from_file(
            file,
            n_ctx=n_ctx,
            precision=options.precision,
            cache_type=options.cache_type,
            prefill_chunk=options.prefill_chunk,
            kernels=options.kernels,
            steps_per_dispatch=options.steps_per_dispatch,
            on_bytes=bar,
        )
    jax.block_until_ready(model.params)
    seconds = time.perf_counter() - begin
    say(f"Loaded in {seconds:.2f}s; kernels: {kernels(options.kernels)}")
    return model, seconds


def _bar(total: int) -> tqdm:
    return tqdm(total=total, leave=False, disable=not sys.stderr.isatty())


def _compile_rows(
    file: GGUFFile, options: Options, n_ctx: int
) -> tuple[list[dict[str, Any]], Columns]:
    if options.plot is not None:
        plotting.check(options.plot)
        check_apart([options.plot], file.parts)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
    model, _ = _load(file, options, n_ctx)
    engines = bench_sweep.engines(
        model.params, model.cfg, options.variants, n_ctx=n_ctx, prefill_chunk=options.prefill_chunk
    )
    n_programs = sum(len(engine.recipes()) for _, engine in engines)
    say(f"Compiling {n_programs} programs, of {len(engines)} combinations of shapes")
    shared = {
        "model": file.path.stem,
        "backend": backend(),
        "precision": model.cfg.precision,
        "kernels": kernels(options.kernels),
    }

    def written(labels: dict[str, Any], name: str, lowered: Lowered, compiled: Compiled) -> None:
        if options.write is not None:
            names = {"model": shared["model"], **labels}
            bench_reports.write(options.write, names, name, lowered, compiled)

    with _bar(n_programs * options.repeat) as bar:
        rows = bench_sweep.measure(
            engines, repeat=options.repeat, on_turn=bar.update, on_program=written
        )
    return [{**shared, **row} for row in rows], bench_sweep.columns(engines)


def _draft_rows(file: GGUFFile, options: Options, n_ctx: int, threads: int) -> list[dict[str, Any]]:
    model, _ = _load(file, options, n_ctx)
    if options.draft is None:
        drafts: dict[str, Any] = {"draft_ngram": options.draft_max or True}
    else:
        small, _ = _load(open_gguf(sources.resolve(options.draft)), options, n_ctx)
        most = {} if options.draft_max is None else {"most": options.draft_max}
        drafts = {"draft": model.drafter(small, **most)}
    n_turns = len(bench_drafts.DRAWS) * len(bench_drafts.PROMPTS) * (options.repeat + 1)
    with _bar(n_turns) as bar:
        rows = bench_drafts.measure(
            model, drafts, n_gen=max(options.n_gen), repeat=options.repeat, on_turn=bar.update
        )
    shared = {
        "model": file.path.stem,
        "backend": backend(),
        "threads": threads,
        "kernels": kernels(options.kernels),
        "precision": model.cfg.precision,
        "n_ctx": model.engine.n_ctx,
    }
    return [{**shared, **row} for row in rows]


def _rows(
    file: GGUFFile,
    options: Options,
    tests: Sequence[BenchTest],
    peers: Sequence[Peer],
    *,
    n_ctx: int,
    threads: int,
) -> list[dict[str, Any]]:
    ceilings = _ceilings(threads)
    model, load_seconds = _load(file, options, n_ctx)
    engine = model.engine
    results = []
    with _bar(len(tests) * (options.repeat + 1)) as bar:
        for test in tests:
            bar.set_description(test.name)
            result = measure(
                engine,
                test,
                peers,
                model=file.path,
                threads=threads,
                repeat=options.repeat,
                on_turn=bar.update,
            )
            results.append(result)
    peak = peak_rss_bytes()
    ceilings += _ceilings(threads)
    cached = " from the cache" if all(c.cached for c in engine.compiles) else ""
    say(f"Compiled: {len(engine.compiles)} programs in {engine.compile_seconds:.2f}s{cached}")
    ceiling = max(ceilings, default=None)
    fast = "" if ceiling is None else f"{ceiling / 1e9:.1f} GB/s at most; "
    say(f"Memory: {fast}this process took {peak / 1e6:.0f} MB at most")
    for result in results:
        for peer in result.peers:
            chosen = " ".join(f"{key}={int(value)}" for key, value in peer.settings.items())
            say(f"{result.test.name}: {peer.name} ({peer.version}) {chosen}".rstrip())
    about = Run(
        file=file,
        engine=engine,
        threads=threads,
        ceiling=ceiling,
        load_seconds=load_seconds,
        peak_rss_bytes=peak,
    )
    return [row(result, about) for result in results]


def _ceilings(threads: int) -> list[float]:
    """The memory's speed, bytes a second, if the model is in that memory."""
    return [bench_memory.ceiling(threads)] if backend() == "CPU" else []


def peak_rss_bytes() -> int:
    """The most memory that this process had resident so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(lambda: main(sys.argv))
