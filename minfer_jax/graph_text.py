"""A graph as JSON, and in Graphviz's language; the JSON is that of minfer.

    {"format": "minfer-graph", "version": 1, "model": "m.gguf", "kind": "prefill",
     "inputs": [0, 1, 2], "outputs": [455], "nodes": [
      {"id": 4, "name": "blk.0.attn_norm", "op": "norm", "detail": {"mul": 2, ..},
       "shape": [576, 36, 1, 1], "dtype": "f32", "backend": "cpu", "src": [3],
       "meta": {"layer": 0, "axes": "B T D", "what": "..", "llama_cpp": "attn_norm",
                "weights": {"attn_norm": "float32"}}}, ..]}

`detail` counts the primitives, `shape` begins with the axis whose numbers lie side by side, as in
ggml, and `axes` ends with it. With the compiled program, `meta` has "xla": [[instruction, opcode]].
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from minfer_jax.model.graph import Graph, Node
from minfer_jax.model.names import ROWS

DTYPES = {"float32": "f32", "int32": "i32"}
_COLOURS = {"cpu": "lightyellow", "cuda": "lightgreen", "metal": "lightblue"}
_ESCAPED = {ord(c): f"\\{c}" for c in '\\"{}|<> '}

# Of each value, the instructions of the compiled program: name and opcode.
Compiled = Mapping[str, Sequence[tuple[str, str]]]


def graph_json(
    graph: Graph, model: str, backend: str, compiled: Compiled | None = None
) -> dict[str, Any]:
    """A graph as JSON.

    Args:
        graph: to be told.
        model: the name of its file.
        backend: where it runs: cpu, cuda or metal.
        compiled: the instructions of the compiled program, or None.
    """
    return {
        "format": "minfer-graph",
        "version": 1,
        "model": model,
        "kind": graph.kind,
        "inputs": [node.id for node in graph.nodes if node.value is None],
        "outputs": [graph.nodes[-1].id],
        "nodes": [_node(node, backend, compiled) for node in graph.nodes],
    }


def _node(node: Node, backend: str, compiled: Compiled | None) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if node.value is not None:
        row = ROWS[node.value.short]
        meta = {
            "layer": node.value.layer,
            "axes": " ".join(node.value.axes),
            "what": row.what,
            "llama_cpp": row.llama_cpp,
            "weights": dict(node.weights),
        }
        if compiled is not None:
            meta["xla"] = [list(one) for one in compiled.get(node.name, ())]
    shape = list(reversed(node.shape)) + [1] * max(0, 4 - len(node.shape))
    return {
        "id": node.id,
        "name": node.name,
        "op": node.op,
        "detail": dict(node.equations),
        "shape": shape,
        "dtype": DTYPES[node.dtype],
        "backend": None if node.value is None else backend,
        "src": list(node.sources),
        "meta": meta,
    }


def graph_dot(graph: Graph, backend: str) -> str:
    """A graph in Graphviz's language, a box around each layer. Arguments: as of `graph_json`."""
    ends = {node.id for node in graph.nodes if node.value is None} | {graph.nodes[-1].id}
    colour = _COLOURS.get(backend, "white")
    lines = ["digraph model {", "  rankdir=LR;", f'  node [style=filled, fillcolor="{colour}"];']
    for layer, nodes in groupby(graph.nodes, _layer):
        if layer is None:
            lines += [f"  {_box(node, node.id in ends)}" for node in nodes]
            continue
        lines += [f"  subgraph cluster_{layer} {{", f'    label="layer {layer}";']
        lines += [f"    {_box(node, False)}" for node in nodes]
        lines.append("  }")
    lines += [f"  n{source} -> n{node.id};" for node in graph.nodes for source in node.sources]
    return "\n".join([*lines, "}"]) + "\n"


def _layer(node: Node) -> int | None:
    return None if node.value is None else node.value.layer


def _box(node: Node, end: bool) -> str:
    name, op = node.name.translate(_ESCAPED), node.op.translate(_ESCAPED)
    if end:
        return f'n{node.id} [shape=doublecircle, label="{name}"];'
    return f'n{node.id} [shape=record, label="{{{name}|{op}}}"];'
