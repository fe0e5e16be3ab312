"""One level below a graph: the instructions of the compiled program, by the value they are for.

The equations of the graph's jaxpr are run again under the names of their owners, so that XLA notes
them with what it makes of them:

    %fusion.12 = f32[..] fusion(..), .., metadata={op_name="jit(f)/blk.0.attn_norm/mul" ..}

A fusion has the name of the operation at its end. What it has absorbed is not listed.
"""

import re
from collections.abc import Callable, Sequence

import jax
from jax.core import eval_jaxpr
from jax.extend import core
from jaxtyping import Array

from minfer_jax.model.graph import Graph

_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?:\([^=]*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_INSIDE = re.compile(r"(?:calls|to_apply)=%?(?P<name>[\w.\-]+)")


def named_function(graph: Graph) -> Callable[..., Sequence[Array]]:
    """The function of a graph's jaxpr, of its leaves, each equation under its owner's name."""

    def run(*leaves: Array) -> Sequence[Array]:
        jaxpr, values = graph.jaxpr.jaxpr, dict[core.Var, Array]()
        values |= zip(jaxpr.constvars, graph.jaxpr.consts, strict=True)
        values |= zip(jaxpr.invars, leaves, strict=True)

        def read(atom: core.Var | core.Literal) -> Array:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for eqn, owner in zip(jaxpr.eqns, graph.owners, strict=True):
            of = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
            alone = jaxpr.replace(constvars=[], invars=of, outvars=eqn.outvars, eqns=[eqn])
            with jax.named_scope(owner or "none"):
                out = eval_jaxpr(alone, (), *map(read, of))
            values |= zip(eqn.outvars, out, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    return run


def instructions(text: str, names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """The instructions of a compiled program by value.

    Args:
        text: of the program, as XLA writes it.
        names: of the values.

    Returns:
        Of each value that has any, names and opcodes, without those inside of fusions.
    """
    known, inside = set(names), set(_INSIDE.findall(text))
    found: dict[str, list[tuple[str, str]]] = {}
    within = False
    for line in text.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            within = head["name"] in inside
            continue
        if within or (match := _INSTRUCTION.match(line)) is None:
            continue
        words = re.search(r'op_name="([^"]*)"', line)
        scope = next((w for w in words[1].split("/") if w in known), None) if words else None
        if scope is not None:
            found.setdefault(scope, []).append((match["name"], match["opcode"]))
    return found
