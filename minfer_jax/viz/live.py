"""One model, whose runs are told event by event as they go.

    {"type": "hello", "model": .., "prompt_tokens": 3, "tokens": [[9906, "Hello"], ..]}
    {"type": "phase", "kind": "prefill", "index": 0}
    {"type": "node", "step": 0, "id": 3, "name": "embd", "op": .., "dtype": .., "stats": {..},
     "values": [..], "stride": 18, "n": 1152}            one for each value of the step
    {"type": "step", "phase": 0, "step": 0, "token": null, "text": "", "logits_top": [[11, 0.3],
     ..], "top_text": [",", ..], "entropy": 4.2}         in bits, over the vocabulary
    {"type": "finish", "reason": "stop", "tokens": 17, "text": ..}
    {"type": "error", "error": ..}                       where the run could not go on

Tokens are drawn by the engine as in any run; each is then run once more with its values laid open.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from minfer_jax.context import EngineError
from minfer_jax.divergence import log_softmax
from minfer_jax.graph_dump import backend_of
from minfer_jax.graph_text import graph_json
from minfer_jax.language_model import LanguageModel
from minfer_jax.model.graph import Graph
from minfer_jax.recorder import Recorder, Step
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.trace_file import step_json
from minfer_jax.viz.inspector import Inspector
from minfer_jax.viz.request import Busy, Request

_SHOWN = 16  # tokens of the graph of a prefill

Publish = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class _Told:
    """What was told of a run so far."""

    texts: list[str] = field(default_factory=list)
    step: int = 0


class Live:
    """Runs prompts, one at a time.

    Attributes:
        name: of the model's file.
        tokens: the text of the latest run.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, publish: Publish) -> None:
        """Compiles nothing yet.

        Args:
            model: runs them.
            tokenizer: its own.
            publish: takes each event.
        """
        self.name = model.file.path.name
        self.tokens: list[int] = []
        self._model, self._tokenizer, self._publish = model, tokenizer, publish
        self._inspector = Inspector(model.engine)
        self._recorder: Recorder | None = None
        self._graphs: dict[str, Graph] = {}
        # A run holds both. Others wait for what computes, but not for a run.
        self._run_lock, self._computing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        """Whether a run is going."""
        return self._run_lock.locked()

    def stop(self) -> None:
        """End the run that is going, after its next token."""
        self._stop.set()

    def graph(self) -> dict[str, Any]:
        """The model's graph, of a prompt and of a token, as minfer's live graph."""
        phases = [
            {"kind": kind, "graph": graph_json(graph, self.name, backend_of(self._model.params))}
            for kind, graph in self._known_graphs().items()
        ]
        return {
            "format": "minfer-live",
            "version": 1,
            "model": self.name,
            "n_layer": self._model.cfg.n_layer,
            "phases": [{**phase, "steps": []} for phase in phases],
        }

    def run(self, request: Request) -> dict[str, Any]:
        """Answer a prompt; what is told at the end.

        Raises:
            Busy: a run is going.
            ValueError: the prompt or a value cannot be run.
        """
        if not self._run_lock.acquire(blocking=False):
            raise Busy
        end: dict[str, Any] = {"type": "error", "error": "the run has failed"}
        try:
            self._stop.clear()
            with self._computing:
                told = self._run(request)
            reason, n = told["finish_reason"], told["completion_tokens"]
            end = {"type": "finish", "reason": reason, "tokens": n, "text": told["text"]}
        except ValueError as e:
            end["error"] = str(e)
            raise
        finally:
            self._run_lock.release()
            self._publish(end)  # now that whoever hears it may ask for more
        return told

    def attention(self, layer: int, head: int) -> bytes:
        """A head's attention in the latest run's text, [T, T] bytes, row by row.

        Raises:
            Busy: a run is going.
            EngineError: there was no run, or as `Inspector.attention`.
        """
        return self._inspected(lambda ids: self._inspector.attention(ids, layer, head).tobytes())

    def lens(self) -> dict[str, Any]:
        """The logit lens over the latest run's text, by layer and position; raises likewise."""
        ids, probabilities = self._inspected(self._inspector.lens)
        return {
            "ids": ids.tolist(),
            "text": {str(i): self._shown(i) for i in np.unique(ids).tolist()},
            "probabilities": np.round(probabilities.astype(np.float64), 4).tolist(),
        }

    def _inspected(self, look: Callable[[list[int]], Any]) -> Any:
        if self.running:
            raise Busy
        with self._computing:
            if not self.tokens:
                raise EngineError("nothing was run yet: run a prompt first")
            return look(self.tokens)

    def _run(self, request: Request) -> dict[str, Any]:
        model, told = self._model, _Told()
        ids = model.encode_prompt(request.prompt)
        pieces = model.stream_ids(
            ids,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
        )
        recorder = self._recorder_for(len(ids) + request.max_tokens)
        self.tokens = list(ids)
        self._publish(
            {
                "type": "hello",
                "model": self.name,
                "prompt": request.prompt,
                "prompt_tokens": len(ids),
                "tokens": [[i, self._shown(i)] for i in ids],
            }
        )
        self._tell_phase("prefill", 0)
        self._tell_step("prefill", recorder.prompt(np.array(ids, np.int32)), told)
        self._tell_phase("decode", 1)
        for token in self._drawn(pieces, len(ids), told):
            self.tokens.append(token)
            self._tell_step("decode", recorder.token(token), told)
            if self._stop.is_set():
                break
        reason = "stopped" if self._stop.is_set() else model.stats.finish_reason
        text, n = "".join(told.texts), len(self.tokens) - len(ids)
        return {"ok": True, "text": text, "finish_reason": reason, "completion_tokens": n}

    def _drawn(self, pieces: Iterator[str], n_prompt: int, told: _Told) -> Iterator[int]:
        """Tokens as they are drawn: a piece may have several, and a token need have none."""
        engine, n = self._model.engine, n_prompt
        for piece in pieces:
            told.texts.append(piece)
            for token in engine.tokens[n:]:
                n += 1
                yield token
        yield from engine.tokens[n:]

    def _recorder_for(self, n_tokens: int) -> Recorder:
        engine = self._model.engine
        n_tokens = min(n_tokens, engine.n_ctx)
        if self._recorder is None or self._recorder.n_slots < n_tokens:
            self._recorder = None  # its memory first
            self._recorder = Recorder(
                engine.params, engine.cfg, n_tokens=n_tokens, n_ctx=engine.n_ctx
            )
        self._recorder.reset()
        return self._recorder

    def _known_graphs(self) -> dict[str, Graph]:
        if not self._graphs:
            engine = self._model.engine
            small = Recorder(engine.params, engine.cfg, n_tokens=_SHOWN, n_ctx=engine.n_ctx)
            shown = min(_SHOWN, engine.n_ctx)
            self._graphs = {
                kind: small.graph(kind, t) for kind, t in (("prefill", shown), ("decode", 1))
            }
        return self._graphs

    def _tell_phase(self, kind: str, index: int) -> None:
        self._publish({"type": "phase", "kind": kind, "index": index})

    def _tell_step(self, kind: str, step: Step, told: _Told) -> None:
        graph = self._known_graphs()[kind]
        text = "" if step.token is None else self._text(step.token)
        shown = step_json(step, text, graph.ids)
        for node, value in zip(shown.pop("nodes"), step.values, strict=True):
            op = graph.nodes[node["id"]].op
            self._publish({"type": "node", "step": told.step, "name": value.name, "op": op, **node})
        self._publish(
            {
                "type": "step",
                "phase": 0 if kind == "prefill" else 1,
                "step": told.step,
                **shown,
                "top_text": [self._shown(int(i)) for i, _ in shown["logits_top"]],
                "entropy": entropy(step.logits),
            }
        )
        told.step += 1

    def _text(self, token: int) -> str:
        """What a token adds to a text: nothing, if it is a control token."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _shown(self, token: int) -> str:
        """The same to look at: a control token by its name."""
        return self._text(token) or self._tokenizer.vocab.tokens[token]


def entropy(logits: Float[np.ndarray, " V"]) -> float:
    """Of the softmax of logits, in bits."""
    logs, probabilities = log_softmax(logits)
    surprise = -np.maximum(logs, -700.0)  # of -inf, whose probability is 0
    return round(float((probabilities * surprise).sum() / np.log(2.0)), 4)
