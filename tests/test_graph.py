"""The graph of the traced model: what is made of what, as JSON, in Graphviz's language, by XLA."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.graph_text import graph_dot, graph_json
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.graph import Graph, graph_of
from minfer_jax.model.graph_xla import instructions, named_function
from minfer_jax.model.names import values
from minfer_jax.model.params import Params
from tests.helpers.tiny_models import load, tiny_model

T = 5


def made(folder: Path, arch: str, t: int = T) -> tuple[ModelConfig, Params, Graph]:
    cfg, params = load(folder, tiny_model(arch))
    known = values(params, cfg, batch=1, t=t, slots=(T, T))
    return cfg, params, graph_of(params, cfg, known, kind="prefill", t=t, n_slots=T)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Params, Graph]:
    return made(tmp_path_factory.mktemp("llama"), "llama")


def sources(graph: Graph, name: str) -> list[str]:
    return [graph.nodes[i].name for i in graph.nodes[graph.ids[name]].sources]


def test_what_is_made_of_what(llama):
    _, _, graph = llama
    assert [node.id for node in graph.nodes] == list(range(len(graph.nodes)))
    assert sources(graph, "embd") == ["token_ids"]
    assert sources(graph, "blk.0.attn_norm") == ["embd"]
    assert sources(graph, "blk.1.attn_norm") == ["blk.0.residual"]
    # The cache is one array for all layers: of it a layer has its own keys alone.
    assert sources(graph, "blk.1.scores") == ["positions", "kv_state", "blk.1.k", "blk.1.q"]
    assert sources(graph, "blk.1.attn_heads") == [
        *("positions", "kv_state", "blk.1.v", "blk.1.weights")
    ]
    assert sources(graph, "blk.1.attn_residual") == ["blk.0.residual", "blk.1.attn_out"]
    assert sources(graph, "blk.1.ffn_act") == ["blk.1.gate", "blk.1.up"]
    assert sources(graph, "logits") == ["output_norm"]
    node = graph.nodes[graph.ids["blk.1.attn_out"]]
    assert (node.op, node.weights) == ("matmul", {"attn_output": "F32"})
    assert {"dot_general", "ffi_call"} & set(node.equations)
    assert graph.nodes[graph.ids["blk.0.weights"]].op == "softmax"
    assert set(graph.owners) - {None} == {node.name for node in graph.nodes[3:]}


@pytest.mark.parametrize("arch", ["gemma3", "ernie4_5-moe", "command-r", "gpt-oss"])
@pytest.mark.parametrize("t", [1, T])
def test_every_value_is_there_and_follows_from_earlier_ones(arch: str, t: int, tmp_path: Path):
    cfg, params, graph = made(tmp_path, arch, t)
    known = values(params, cfg, batch=1, t=t, slots=(T, T))
    assert [node.name for node in graph.nodes[3:]] == list(known)
    for node in graph.nodes[3:]:
        assert node.sources and max(node.sources) < node.id
        assert (node.shape, node.dtype) == (known[node.name].shape, known[node.name].dtype)
    used = {source for node in graph.nodes for source in node.sources}
    assert used == set(range(len(graph.nodes) - 1))


def test_json(llama):
    _, _, graph = llama
    told = graph_json(graph, "m.gguf", "cpu")
    assert json.loads(json.dumps(told)) == told
    assert told["inputs"] == [0, 1, 2] and told["outputs"] == [len(graph.nodes) - 1]
    assert told["nodes"][graph.ids["blk.1.scores"]] == {
        **{"id": 23, "name": "blk.1.scores", "op": "matmul", "dtype": "f32", "backend": "cpu"},
        "detail": dict(graph.nodes[23].equations),
        "shape": [5, 5, 4, 1],
        "src": [1, 2, 20, 22],
        "meta": {
            **{"layer": 1, "axes": "B N T S", "weights": {}},
            "what": told["nodes"][23]["meta"]["what"],
            "llama_cpp": "kq_scaled, kq_tanh; kq is before the scale",
        },
    }


def test_dot(llama):
    _, _, graph = llama
    lines = graph_dot(graph, "cuda").splitlines()
    assert lines[0] == "digraph model {" and lines[-1] == "}"
    label = r'"(?:[^"\\]|\\.)*"'
    grammar = re.compile(
        rf"rankdir=LR;|label={label};|subgraph cluster_\d+ \{{|\}}|(n\d+) -> (n\d+);"
        rf'|node \[style=filled, fillcolor="lightgreen"\];'
        rf"|(n\d+) \[shape=(?:record|doublecircle), label={label}\];"
    )
    found = [grammar.fullmatch(line.strip()) for line in lines[1:-1]]
    assert all(found)
    nodes = [match[3] for match in found if match is not None and match[3]]
    edges = [match.groups()[:2] for match in found if match is not None and match[1]]
    assert sorted(nodes) == sorted(f"n{node.id}" for node in graph.nodes)
    assert len(edges) == sum(len(node.sources) for node in graph.nodes)
    assert sum(line.count("{") - line.count("}") for line in lines if "label" not in line) == 0
    assert '    n23 [shape=record, label="{blk.1.scores|matmul}"];' in lines


def test_what_xla_makes_of_it(llama):
    cfg, params, graph = llama
    function = jax.jit(named_function(graph))
    at = jnp.arange(T, dtype=jnp.int32)[None]
    ids = at + 3
    leaves = jax.tree.leaves((params, ids, at, kv.init(cfg, T, chunk=T)))
    compiled = function.lower(*leaves).compile()
    logits, _ = forward(params, ids, at, kv.init(cfg, T, chunk=T), cfg=cfg, n_out=T)
    np.testing.assert_allclose(compiled(*leaves)[0], logits, atol=2e-4)
    names = [node.name for node in graph.nodes]
    found = instructions(compiled.as_text() or "", names)
    assert set(found) <= set(names)
    for name in ("embd", "blk.0.k", "blk.1.weights", "blk.1.down", "logits"):
        assert found[name], name
    every = [one for ones in found.values() for one, _ in ones]
    assert len(every) == len(set(every))
    told = graph_json(graph, "m.gguf", "cpu", found)
    assert told["nodes"][graph.ids["logits"]]["meta"]["xla"] == [list(o) for o in found["logits"]]


def test_of_a_program_s_text():
    text = """
%fused (p: f32[4]) -> f32[4] {
  ROOT %a.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(f)/blk.0.up/add"}
}

ENTRY %main (p: f32[4]) -> (f32[4]) {
  %p = f32[4]{0} parameter(0), metadata={op_name="blk.0.up"}
  %f.2 = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/blk.0.up/add"}
  %c = f32[4]{0} copy(%f.2), metadata={op_name="jit(f)/none/copy"}
  ROOT %t = (f32[4]{0}, s32[]) custom-call(%c), metadata={op_name="jit(f)/while/logits/x"}
}
"""
    assert instructions(text, ["blk.0.up", "logits"]) == {
        "blk.0.up": [("p", "parameter"), ("f.2", "fusion")],
        "logits": [("t", "custom-call")],
    }
