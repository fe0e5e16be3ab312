"""Programs for CUDA on a machine without it: weights of real shapes, and what is produced."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from minfer_jax.quant.formats import Format
from minfer_jax.quant.formats.base import TILE
from minfer_jax.quant.qtensor import QTensor, from_blocks
from tests.test_formats import blocks_of

CUSTOM_CALL = "stablehlo.custom_call"


def stand_in(fmt: Format, n: int, k: int, layers: int) -> QTensor:
    """One weight of a stack, as shapes: nothing of it is in memory."""
    tiles = -(-n // TILE)

    def grown(plane: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, tiles, plane.shape[1] * k // 256, TILE), plane.dtype)

    small = from_blocks(blocks_of(fmt, TILE, 256), fmt.ggml_type)
    layer = jax.ShapeDtypeStruct((), jnp.uint32)
    return dataclasses.replace(jax.tree.map(grown, small), shape=(n, k), layer=layer)


def planes(w: QTensor) -> list[tuple[int, ...]]:
    """The shapes of one weight's planes."""
    leaves = jax.tree.leaves(dataclasses.replace(w, layer=None))
    return [leaf.shape[-3:] for leaf in leaves]


def calls(lowered: jax.stages.Lowered, name: str) -> int:
    """How often a program calls the kernel of that name."""
    return lowered.as_text().count(f'name = "{name}"')


def produced(lowered: jax.stages.Lowered) -> list[tuple[str, tuple[int, ...]]]:
    """(operation, shape) of each result in a program, those within functions included."""
    found = []

    def walk(op: ir.OpView | ir.Operation) -> None:
        for block in (block for region in op.regions for block in region):
            for inner in block:
                types = [ir.ShapedType(r.type) for r in inner.operation.results]
                found.extend((inner.operation.name, tuple(t.shape)) for t in types)
                walk(inner.operation)

    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    walk(module.operation)
    return found
