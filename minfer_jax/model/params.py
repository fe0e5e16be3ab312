"""The weights of a model as pytrees: frozen, replaced and never changed."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minfer_jax.quant.prologue import RmsNorm
from minfer_jax.quant.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Linear:
    """weight [N, K]; optional scale [1] or [N], applied before the optional bias [N]."""

    weight: QTensor
    scale: Array | None = None
    bias: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """One block, or a stack of blocks of one kind: every array then has a leading axis.

    Norms are of D values (H for q_norm and k_norm); None where the model has none.

    `qkv` and `gate_up` are one Linear where the maps are of one format, else several; side by side
    their outputs are q | k | v and gate | up.
    """

    attn_norm: RmsNorm
    qkv: tuple[Linear, ...]
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    attn_output: Linear
    post_attn_norm: RmsNorm | None
    ffn_norm: RmsNorm
    gate_up: tuple[Linear, ...]
    ffn_down: Linear
    post_ffn_norm: RmsNorm | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All weights.

    Layers that are alike (formats, optional tensors, LayerSpec) are stacked, in the order of the
    model, so that one compiled body serves them all. A GGUF file mixes formats, so there may be
    several such groups:

        Q4_K_M, 6 layers        0   1   2   3   4   5
        ffn_down                Q6  Q4  Q4  Q6  Q4  Q4
        order                   0,0 1,0 1,1 0,1 1,2 1,3      (group, index in the group)

    Attributes:
        token_embd: [V, D].
        groups: one stack of LayerParams a group.
        output_norm: of D values.
        output: [V, D]; its weight is `token_embd` itself where the file ties them.
        rope: frequencies, float32 [pairs] each; LayerSpec.rope picks one.
        order: static; (group, index) of every layer.
    """

    token_embd: QTensor
    groups: tuple[LayerParams, ...]
    output_norm: RmsNorm
    output: Linear
    rope: tuple[Array, ...]
    order: tuple[tuple[int, int], ...] = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied output counts once."""
        return sum({id(a): a.nbytes for a in jax.tree.leaves(self)}.values())


def pick(stack: LayerParams, index: int | Array) -> LayerParams:
    """One block of a stack; the index may be traced.

    Packed weights and norms keep the index, for a kernel to find its row by; the rest is sliced.
    """
    index = jnp.asarray(index, jnp.uint32)

    def one(leaf: Array | QTensor | RmsNorm) -> Array | QTensor | RmsNorm:
        if isinstance(leaf, QTensor | RmsNorm):
            return dataclasses.replace(leaf, layer=index)
        return jax.lax.dynamic_index_in_dim(leaf, index, axis=0, keepdims=False)

    return jax.tree.map(one, stack, is_leaf=lambda leaf: isinstance(leaf, QTensor | RmsNorm))
