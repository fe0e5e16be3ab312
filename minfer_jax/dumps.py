"""What environment variables ask to be told of a run: see `dump_flags`.

The run itself is as ever. When it has ended, its text is run once more, with its values laid open:
so no token depends on whether anybody looks.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from minfer_jax import progress
from minfer_jax.command import say
from minfer_jax.draw_time import seconds_a_draw, timing_line
from minfer_jax.dump_flags import LOGITS, TAGS, Dumps
from minfer_jax.graph_dump import backend_of
from minfer_jax.graph_text import graph_json
from minfer_jax.language_model import LanguageModel
from minfer_jax.recorder import Recorder, Step
from minfer_jax.sampling import WINDOW_EXTENDED, SamplingParams
from minfer_jax.trace_file import Phase, trace_pieces
from minfer_jax.whole_file import replacing


def tell(
    model: LanguageModel, dumps: Dumps, sampling: SamplingParams, prompt: str, ids: Sequence[int]
) -> None:
    """Write what is asked for of the latest run, one text of a context that was not shifted.

    Args:
        model: that has run it.
        dumps: what is asked for.
        sampling: how its tokens were drawn.
        prompt: as the user has written it.
        ids: the prompt's tokens.

    Raises:
        OSError: a file could not be written; then it is not there.
    """
    if dumps.timing:
        _tell_timing(model, sampling)
    if not dumps.rerun:
        return
    # The last token was not run, if no other was drawn after it.
    drawn, engine = model.engine.tokens[len(ids) :], model.engine
    drawn = drawn[:-1] if engine.stats.finish_reason == "length" else drawn
    rerun = _Rerun(model, dumps, ids, drawn[: engine.n_ctx - len(ids)])
    say("Running the text once more, with its values laid open ...")
    if dumps.trace is None:
        for phase in rerun.phases():
            for _ in phase.steps:
                pass
        return
    with replacing(dumps.trace, shared=True) as file:
        for piece in trace_pieces(model.file.path.name, prompt, rerun.phases()):
            file.write(piece.encode("utf-8", "replace"))
    say(f"[trace] wrote {dumps.trace} ({len(TAGS)} phases)")


def _tell_timing(model: LanguageModel, sampling: SamplingParams) -> None:
    """How much of decoding's time the sampler took, which is measured by itself."""
    stats, recent = model.stats, model.engine.tokens[-WINDOW_EXTENDED:]
    drawing = seconds_a_draw(sampling, recent, model.cfg.n_vocab) if stats.n_generated else 0.0
    say(timing_line(stats.n_generated, stats.decode_seconds, drawing))


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
        yield self._phase(TAGS[0], len(self._ids), self._prompt())
        yield self._phase(TAGS[1], 1, self._drawn())

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
        self._write(TAGS[0], step, self._ids)

    def _drawn(self) -> Iterator[tuple[Step, str]]:
        tokenizer, step = self._model.tokenizer, None
        with progress.bar(len(self._tokens), "tok", "Tracing") as advance:
            for token in self._tokens:
                step = self._recorder.token(token)
                data = b"" if tokenizer is None else tokenizer.token_bytes(token)
                yield step, data.decode("utf-8", "replace")
                advance(1)
        if step is not None:
            self._write(TAGS[1], step, self._tokens[-1:])

    def _write(self, tag: str, step: Step, ids: Sequence[int] | np.ndarray) -> None:
        if (folder := self._dumps.folder) is None:
            return
        logits = LOGITS.format(tag=tag)
        arrays = {logits: step.logits}
        for layer in range(self._model.cfg.n_layer):
            k, v = self._recorder.rows(layer)
            arrays |= {f"kv{layer}k_{tag}.f32": k, f"kv{layer}v_{tag}.f32": v}
        for name, array in arrays.items():
            with replacing(folder / name, durable=False, shared=True) as file:
                file.write(array.astype("<f4").tobytes())
        say(f"[graph dump] {tag} ids: {' '.join(str(i) for i in list(ids)[:8])}")
        say(f"[graph dump] wrote {folder / logits} ({step.logits.size} elems)")
