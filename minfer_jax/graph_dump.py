"""`--dump-graph` and `--dump-graph-json`: the traced model for a prompt, written to files."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax

from minfer_jax.command import say
from minfer_jax.device import backend_name
from minfer_jax.dump_flags import GraphDump
from minfer_jax.graph_text import Compiled, graph_dot, graph_json
from minfer_jax.language_model import LanguageModel
from minfer_jax.model.graph import Graph, graph_of
from minfer_jax.model.graph_xla import instructions, named_function
from minfer_jax.model.names import values
from minfer_jax.model.params import Params
from minfer_jax.programs import compile_other, platform_of
from minfer_jax.tracing import of_context
from minfer_jax.whole_file import replacing


def write_graphs(model: LanguageModel, ids: Sequence[int], dump: GraphDump) -> None:
    """Trace a model for a prompt and write its graph; nothing is run.

    Args:
        model: whose.
        ids: the prompt; of one token the graph is that of decoding.
        dump: where to.

    Raises:
        OSError: a file could not be written; then it is not there.
    """
    t, cfg = len(ids), of_context(model.cfg, model.engine.n_ctx)
    known = values(model.params, cfg, batch=1, t=t, slots=(t, t))
    kind = "prefill" if t > 1 else "decode"
    graph = graph_of(model.params, cfg, known, kind=kind, t=t, n_slots=t)
    n, backend = len(graph.nodes), backend_of(model.params)
    if dump.dot is not None:
        _write(dump.dot, graph_dot(graph, backend))
        say(f"Graph DOT exported to {dump.dot} ({n} nodes)")
    if dump.json is not None:
        compiled = _compiled(model, graph) if dump.xla else None
        shown = graph_json(graph, model.file.path.name, backend, compiled)
        _write(dump.json, json.dumps(shown, indent=1, ensure_ascii=False) + "\n")
        say(f"Graph JSON exported to {dump.json} ({n} nodes, {kind})")


def backend_of(params: Params) -> str:
    """Where a model runs, in minfer's words: cpu, cuda or metal."""
    return backend_name(platform_of(params)).lower()


def _compiled(model: LanguageModel, graph: Graph) -> Compiled:
    say("Compiling the traced program, its layers one by one ...")
    weights = jax.tree.leaves(model.params)
    rest = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in graph.jaxpr.in_avals[len(weights) :]]
    program, _ = compile_other("graph", named_function(graph), (*weights, *rest))
    return instructions(program.as_text() or "", [node.name for node in graph.nodes])


def _write(path: Path, text: str) -> None:
    with replacing(path, shared=True) as file:
        file.write(text.encode("utf-8", "replace"))
