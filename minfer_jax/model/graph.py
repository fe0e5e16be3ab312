"""The traced model as a graph: a node for each named value, made of the equations of its jaxpr.

The model is traced with its layers one by one, and every named value passes through `name`, a
primitive that does nothing. What lies between two of them is the later one's:

    a = name[embd] x          a node
    b = square a                                     |
    c = dot_general b w                              |  equations of blk.0.attn_norm; it has the
    d = name[blk.0.attn_norm] c                      |  source embd and the weight w

An equation that several values need belongs to the first of them, such as the one product of
queries, keys and values. What no value needs, as writing into the cache does after the last layer,
belongs to none. The program that runs without a trace is another: it fuses what it can.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Array

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward_tapped
from minfer_jax.model.names import OF_LAYERS, Value
from minfer_jax.model.params import Params
from minfer_jax.model.tap import Tap
from minfer_jax.quant.qtensor import QTensor

INPUTS = ("token_ids", "positions", "kv_state")
# What a value is called by, if any of its equations is this; else by its last one.
_OPS = {
    "ffi_call": "matmul",
    "dot_general": "matmul",
    "exp": "softmax",
    "rsqrt": "norm",
    "top_k": "top_k",
    "cos": "rope",
    "gather": "get_rows",
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A named value, or an input.

    Attributes:
        id: its place in `Graph.nodes`.
        name: in full.
        op: what makes it, in one word; "input" of an input.
        shape: of the value.
        dtype: of the value.
        sources: ids of the values that it is made of, ascending.
        weights: those that are read for it, with their formats.
        equations: how often each primitive is used for it, those inside of others too.
        value: what is known of it; None of an input.
    """

    id: int
    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[int, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    equations: Mapping[str, int] = field(default_factory=dict)
    value: Value | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The traced model for a number of tokens.

    Attributes:
        kind: "prefill" or, of one token, "decode".
        nodes: inputs, then values in the order in which they are computed.
        jaxpr: that it was made from.
        owners: of each equation, the name of the value that it belongs to, or None.
    """

    kind: str
    nodes: tuple[Node, ...]
    jaxpr: core.ClosedJaxpr
    owners: tuple[str | None, ...]

    @property
    def ids(self) -> dict[str, int]:
        """The id of each name."""
        return {node.name: node.id for node in self.nodes}


def graph_of(
    params: Params, cfg: ModelConfig, known: Mapping[str, Value], *, kind: str, t: int, n_slots: int
) -> Graph:
    """Trace the model; nothing is compiled or run.

    Args:
        params: weights.
        cfg: their configuration.
        known: the values to show, of one sequence, for these t and n_slots.
        kind: what it is called.
        t: tokens of the call.
        n_slots: of the KV state.
    """
    cfg = dataclasses.replace(cfg, unrolled=True)

    def traced(params: Params, ids: Array, positions: Array, state: kv.KVState) -> tuple:
        passed = [0]
        edits = {
            (value.short, value.shape): (_Mark(short=value.short, passed=passed),)
            for value in known.values()
        }
        tap = Tap(kept={}, edits=edits)
        logits, state, _ = forward_tapped(params, ids, positions, state, tap, cfg=cfg)
        return logits, state

    ids = jax.ShapeDtypeStruct((1, t), jnp.int32)
    state = jax.eval_shape(partial(kv.init, cfg, n_slots, chunk=n_slots))
    jaxpr = jax.make_jaxpr(traced)(params, ids, ids, state)
    n_state = len(jax.tree.leaves(state))
    given = [*_weights(params), *INPUTS[:2], *[INPUTS[2]] * n_state]
    nodes, owners = _read(jaxpr, given, known)
    return Graph(kind=kind, nodes=nodes, jaxpr=jaxpr, owners=owners)


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """An edit that only names a value. A layer's last one is its residual: so layers are counted.

    Attributes:
        short: the name without its layer.
        passed: a list of one, shared by all: the layers before this one.
    """

    short: str
    passed: list[int]

    def applied(self, value: Array, layer: Array) -> Array:
        """The value, named."""
        full = f"blk.{self.passed[0]}.{self.short}" if self.short in OF_LAYERS else self.short
        self.passed[0] += self.short == "residual"
        return checkpoint_name(value, full)


def _read(
    jaxpr: core.ClosedJaxpr, given: Sequence[str | tuple[str, str]], known: Mapping[str, Value]
) -> tuple[tuple[Node, ...], tuple[str | None, ...]]:
    """The nodes of a jaxpr, and the owner of each of its equations.

    Args:
        jaxpr: whose named values are `known`.
        given: of each argument, the name of the input, or a weight and its format.
        known: the values.
    """
    eqns = jaxpr.jaxpr.eqns
    ids = {name: i for i, name in enumerate((*INPUTS, *known))}
    # Of each variable: the values that it is made of, its weights, and the equation that makes it.
    sources: dict[core.Var, frozenset[str]] = {}
    weights: dict[core.Var, frozenset[tuple[str, str]]] = {}
    made: dict[core.Var, int] = {}
    for var, origin in zip(jaxpr.jaxpr.invars, given, strict=True):
        plain = isinstance(origin, str)
        sources[var] = frozenset([origin] if plain else [])
        weights[var] = frozenset([] if plain else [origin])
    owners: list[str | None] = [None] * len(eqns)
    nodes = {
        name: Node(id=ids[name], name=name, op="input", shape=(), dtype="int32") for name in INPUTS
    }
    for i, eqn in enumerate(eqns):
        of = [var for var in eqn.invars if isinstance(var, core.Var)]
        found = frozenset().union(*(sources.get(var, ()) for var in of))
        read = frozenset().union(*(weights.get(var, ()) for var in of))
        if eqn.primitive.name == "name":
            name = eqn.params["name"]
            value = known[name]
            own = _own(of, made, eqns, owners)
            for j in (*own, i):
                owners[j] = name
            if name not in nodes:
                counts = Counter(p for j in own for p in _primitives(eqns[j]))
                nodes[name] = Node(
                    id=ids[name],
                    name=name,
                    op=_op(counts, eqns[own[-1]].primitive.name if own else "view"),
                    shape=value.shape,
                    dtype=value.dtype,
                    sources=tuple(sorted(ids[s] for s in found if not _by_cache(s, value, known))),
                    weights=dict(sorted(read)),
                    equations=dict(counts.most_common()),
                    value=value,
                )
            found, read = frozenset([name]), frozenset()
        for var in eqn.outvars:
            sources[var], weights[var], made[var] = found, read, i
    return tuple(nodes.values()), tuple(owners)


def _own(
    of: Sequence[core.Var],
    made: Mapping[core.Var, int],
    eqns: Sequence[core.JaxprEqn],
    owners: Sequence[str | None],
) -> list[int]:
    """The equations that variables are made by and that belong to nobody yet, in order."""
    own, look = set[int](), list(of)
    while look:
        i = made.get(look.pop())
        if i is not None and i not in own and owners[i] is None:
            own.add(i)
            look += [var for var in eqns[i].invars if isinstance(var, core.Var)]
    return sorted(own)


def _by_cache(source: str, value: Value, known: Mapping[str, Value]) -> bool:
    """Whether a source is only another layer's part of the cache, of which nothing is read."""
    origin = known.get(source)
    return origin is not None and origin.short in ("k", "v") and origin.layer != value.layer


def _primitives(eqn: core.JaxprEqn) -> Iterator[str]:
    """The primitives of an equation: its own, or those inside."""
    inner = list(core.jaxprs_in_params(eqn.params))
    if not inner:
        yield eqn.primitive.name
    for jaxpr in inner:
        for one in jaxpr.eqns:
            yield from _primitives(one)


def _op(counts: Mapping[str, int], last: str) -> str:
    return next((op for primitive, op in _OPS.items() if primitive in counts), last)


def _weights(params: Params) -> list[tuple[str, str]]:
    """Of each leaf of the weights, its name and format: ("mlp.up", "Q4_1")."""
    whole = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QTensor))
    found = []
    for path, leaf in whole[0]:
        words = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        name = ".".join(word for word in words if word not in ("groups", "weight"))
        form = leaf.fmt.name if isinstance(leaf, QTensor) else str(leaf.dtype)
        found += [(name, form)] * len(jax.tree.leaves(leaf))
    return found
