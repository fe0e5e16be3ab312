"""What environment variables ask to be told of a run, as minfer knows them.

    MINFER_TRACE=FILE       a trace as JSON, see `trace_file`
    MINFER_GRAPH_DUMP=DIR   little-endian float32, after the prompt (prefill) and the last token
                            (decode): logits_<tag>.f32 [V], of the last row; kv<layer>k_<tag>.f32
                            and kv<layer>v_<tag>.f32 [T, K, H], by position, as the cache has them
    MINFER_TIMING=1         a line about the time that decoding takes

The run itself is as ever. When it has ended, its text is run once more, with its values laid open:
so no token depends on whether anybody looks.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minfer_jax.command import say
from minfer_jax.draw_time import seconds_a_draw, timing_line
from minfer_jax.graph_dump import backend_of
from minfer_jax.graph_text import graph_json
from minfer_jax.language_model import LanguageModel
from minfer_jax.recorder import Recorder, Step
from minfer_jax.sampling import WINDOW_EXTENDED, SamplingParams
from minfer_jax.trace_file import Phase, trace_pieces
from minfer_jax.usage import UsageError
from minfer_jax.whole_file import check_writable, replacing

TRACE, DUMP, TIMING = "MINFER_TRACE", "MINFER_GRAPH_DUMP", "MINFER_TIMING"


@dataclass(frozen=True, kw_only=True)
class Dumps:
    """What is asked for.

    Attributes:
        trace: a file, or None.
        folder: for logits, keys and values, or None.
        timing: whether a line is wanted.
    """

    trace: Path | None
    folder: Path | None
    timing: bool

    @property
    def rerun(self) -> bool:
        """Whether the text has to be run once more."""
        return self.trace is not None or self.folder is not None


def asked(environ: Mapping[str, str]) -> Dumps:
    """Read the environment.

    Raises:
        UsageError: a file cannot be written there.
    """
    trace, folder = environ.get(TRACE), environ.get(DUMP)
    found = Dumps(
        trace=Path(trace).expanduser() if trace else None,
        folder=Path(folder).expanduser() if folder else None,
        timing=environ.get(TIMING) == "1",
    )
    if found.trace is not None:
        _check(TRACE, found.trace)
    if found.folder is not None:
        _check(DUMP, found.folder / "logits_prefill.f32")
    return found


def _check(name: str, path: Path) -> None:
    try:
        check_writable(path)
    except OSError as e:
        raise UsageError(f"{name}: cannot write {path}: {e.strerror or e}") from None


def tell_timing(model: LanguageModel, sampling: SamplingParams) -> None:
    """Say how much of decoding's time the sampler took, which is measured by itself."""
    stats = model.stats
    recent = model.engine.tokens[-WINDOW_EXTENDED:]
    drawing = seconds_a_draw(sampling, recent, model.cfg.n_vocab) if stats.n_generated else 0.0
    say(timing_line(stats.n_generated, stats.decode_seconds, drawing))


def write(
    model: LanguageModel, dumps: Dumps, prompt: str, ids: Sequence[int], tokens: Sequence[int]
) -> None:
    """Run a text once more and write what is asked for.

    Args:
        model: that has run it.
        dumps: what is asked for; `rerun` of it.
        prompt: as the user has written it.
        ids: the prompt's tokens.
        tokens: those that were run after them.

    Raises:
        OSError: a file could not be written; then it is not there.
        EngineError: there is no memory.
    """
    rerun = _Rerun(model, dumps, ids, tokens)
    if dumps.trace is None:
        for phase in rerun.phases():
            for _ in phase.steps:
                pass
        return
    say("[trace] running the text once more, with its values laid open ...")
    n_phases = 0

    def counted() -> Iterator[Phase]:
        nonlocal n_phases
        for phase in rerun.phases():
            n_phases += 1
            yield phase

    name = model.file.path.name
    with replacing(dumps.trace) as file:
        for piece in trace_pieces(name, prompt, counted()):
            file.write(piece.encode("utf-8", "replace"))
    say(f"[trace] wrote {dumps.trace} ({n_phases} phases)")


class _Rerun:
    """A text as phases, each a step at a time."""

    def __init__(
        self, model: LanguageModel, dumps: Dumps, ids: Sequence[int], tokens: Sequence[int]
    ) -> None:
        self._model, self._dumps = model, dumps
        self._ids, self._tokens = np.array(ids, np.int32), tokens
        self._recorder = Recorder(
            model.params,
            model.cfg,
            n_tokens=len(ids) + len(tokens),
            n_ctx=model.engine.n_ctx,
            summed=dumps.trace is not None,
        )

    def phases(self) -> Iterator[Phase]:
        """The phases of the run; each is to be used up before the next."""
        yield self._phase("prefill", len(self._ids), self._prompt())
        yield self._phase("decode", 1, self._drawn())

    def _phase(self, kind: str, t: int, steps: Iterator[tuple[Step, str]]) -> Phase:
        if self._dumps.trace is None:
            return Phase(kind=kind, graph={}, ids={}, steps=steps)
        recorder, model = self._recorder, self._model
        graph = recorder.graph(kind, t)
        shown = graph_json(graph, model.file.path.name, backend_of(model.params))
        return Phase(kind=kind, graph=shown, ids=graph.ids, steps=steps)

    def _prompt(self) -> Iterator[tuple[Step, str]]:
        step = self._recorder.prompt(self._ids)
        yield step, ""
        self._write("prefill", step, self._ids)

    def _drawn(self) -> Iterator[tuple[Step, str]]:
        tokenizer, step = self._model.tokenizer, None
        with _bar(len(self._tokens)) as advance:
            for token in self._tokens:
                step = self._recorder.token(token)
                data = b"" if tokenizer is None else tokenizer.token_bytes(token)
                yield step, data.decode("utf-8", "replace")
                advance(1)
        if step is not None:
            self._write("decode", step, self._tokens[-1:])

    def _write(self, tag: str, step: Step, ids: Sequence[int] | np.ndarray) -> None:
        if (folder := self._dumps.folder) is None:
            return
        arrays = {f"logits_{tag}.f32": step.logits}
        for layer in range(self._model.cfg.n_layer):
            k, v = self._recorder.rows(layer)
            arrays |= {f"kv{layer}k_{tag}.f32": k, f"kv{layer}v_{tag}.f32": v}
        for name, array in arrays.items():
            with replacing(folder / name, durable=False) as file:
                file.write(array.astype("<f4").tobytes())
        say(f"[graph dump] {tag} ids: {' '.join(str(i) for i in list(ids)[:8])}")
        path = folder / f"logits_{tag}.f32"
        say(f"[graph dump] wrote {path} ({step.logits.size} elems)")


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], object]]:
    """A function that takes how many tokens were run; on a terminal it draws a bar."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from tqdm import tqdm  # not needed elsewhere, and 0.02 s to import

    with tqdm(total=total, unit="tok", desc="Tracing", delay=1.0, leave=False) as bar:
        yield bar.update
