"""The trace of a run as JSON, in minfer's format, a piece at a time: no more than a step is held.

    {"format": "minfer-trace", "version": 1, "model": "m.gguf", "prompt": "Hi", "phases": [
      {"kind": "prefill", "graph": {see graph_text}, "steps": [
        {"token": null, "text": "", "logits_top": [[253, 0.31], .. 5 of them],
         "nodes": [{"id": 3, "dtype": "f32",
                    "stats": {"min": -1.0, "max": 2.0, "mean": 0.1, "absmean": 0.7},
                    "values": [0.5, ..], "stride": 324, "n": 20736}, ..]}]},
      {"kind": "decode", "graph": .., "steps": [{"token": 253, "text": " a", ..}, ..]}]}

A step of decode is a token that was run, with what the model says after it. A node's id is that of
its phase's graph; `values` are at most 64 of its numbers, each `stride`-th. What is not finite,
such as masked scores, counts in no statistic and is null.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from minfer_jax.compact_json import compact
from minfer_jax.divergence import log_softmax
from minfer_jax.graph_text import DTYPES
from minfer_jax.model.summary import Summarised
from minfer_jax.recorder import Step

TOP = 5
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run.

    Attributes:
        kind: "prefill" or "decode".
        graph: as JSON.
        ids: of the nodes of the graph, by name.
        steps: each with the text of its token; taken one after the other.
    """

    kind: str
    graph: Mapping[str, Any]
    ids: Mapping[str, int]
    steps: Iterable[tuple[Step, str]]


def trace_pieces(model: str, prompt: str, phases: Iterable[Phase]) -> Iterator[str]:
    """The file, in pieces.

    Args:
        model: the name of its file.
        prompt: as the user has written it.
        phases: in order; each is used up before the next is asked for.
    """
    head = {"format": "minfer-trace", "version": 1, "model": model, "prompt": prompt}
    yield f'{compact(head)[:-1]},"phases":['
    for number, phase in enumerate(phases):
        yield "," * bool(number)
        yield f'{{"kind":{compact(phase.kind)},"graph":{compact(phase.graph)},"steps":['
        for i, (step, text) in enumerate(phase.steps):
            yield "," * bool(i) + compact(step_json(step, text, phase.ids))
        yield "]}"
    yield "]}\n"


def step_json(step: Step, text: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """A step as JSON.

    Args:
        step: to be told.
        text: of its token.
        ids: of the nodes, by name.
    """
    return {
        "token": step.token,
        "text": text,
        "logits_top": likeliest(step.logits),
        "nodes": [_node(value, ids[value.name]) for value in step.values],
    }


def likeliest(logits: Float[np.ndarray, " V"]) -> list[list[float]]:
    """The likeliest tokens and their probabilities, in descending order."""
    probabilities = log_softmax(logits)[1]
    top = np.argsort(-logits, kind="stable")[:TOP]
    return [[int(i), round(float(probabilities[i]), _DIGITS)] for i in top]


def _node(value: Summarised, number: int) -> dict[str, Any]:
    whole = value.dtype == "int32"
    return {
        "id": number,
        "dtype": DTYPES[value.dtype],
        "stats": {name: _number(stat, False) for name, stat in value.stats.items()},
        "values": [_number(v, whole) for v in value.values.tolist()],
        "stride": value.stride,
        "n": value.n,
    }


def _number(value: float | None, whole: bool) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if whole else round(value, _DIGITS)
