"""The weights of a model as pytrees: frozen, replaced and never changed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array

from minfer_jax.quant.prologue import LayerNorm, Norm, RmsNorm
from minfer_jax.quant.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Lora:
    """What adapters add to a map W x: B (scale * A x) (Hu et al. 2021). See `lora.with_lora`.

    Attributes:
        a: A, float32 [R, K]; of the embedding [V, R], one row a token.
        b: B, float32 [N, R].
        scale: float32 [R], of the adapter that each of the R ranks belongs to.
        ranks: how many ranks each adapter has, in their order; R in all.
    """

    a: Array
    b: Array
    scale: Array
    ranks: tuple[int, ...] = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Steering:
    """What control vectors add to the residual after a layer: scale @ directions.

    Attributes:
        directions: float32 [vectors, D].
        scale: float32 [vectors].
    """

    directions: Array
    scale: Array

    @property
    def ranks(self) -> tuple[int, ...]:
        """As of Lora: a vector has one."""
        return (1,) * self.scale.shape[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Linear:
    """weight [N, K]; optional scale [1] or [N], lora and bias [N], which come in this order."""

    weight: QTensor
    scale: Array | None = None
    bias: Array | None = None
    lora: Lora | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertLinear:
    """A Linear for each of E experts; of L layers, the weights are one stack of L * E."""

    weight: QTensor
    n_expert: int = field(metadata={"static": True})
    scale: Array | None = None  # [E]
    bias: Array | None = None  # [E, N]

    @property
    def extras(self) -> dict[str, Array | None]:
        """What is beside the weight, by name."""
        return {"scale": self.scale, "bias": self.bias}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Two maps with an activation between them.

    Attributes:
        up: to F values or, with a gate, to gate | up of 2 F: one Linear where the two are of one
            format, else one for each.
        down: back to D values.
        gated: which of these it is.
    """

    up: tuple[Linear, ...]
    down: Linear
    gated: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Experts:
    """Many gated MLPs, of which each token uses a few.

    Attributes:
        router: [E, D], gives each expert's logit.
        choice_bias: [E], added for the choice alone; or None.
        up, down: as in an Mlp.
        shared: an MLP that every token uses beside them, or None.
        shared_gate: [D], the sigmoid of its product with x scales the shared one; or None.
    """

    router: Linear
    choice_bias: Array | None
    up: tuple[ExpertLinear, ...]
    down: ExpertLinear
    shared: Mlp | None
    shared_gate: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """One block, or a stack of blocks of one kind: every array then has a leading axis.

    Norms are of D values, q_norm and k_norm of a head's or of all heads'; None where the model has
    none. Which norm stands where, `Arch` draws.

    Attributes:
        qkv: one Linear where the maps are of one format, else several; side by side their outputs
            are q | k | v or, where attention has a gate, q | k | v | gate.
        gated: whether it has.
        sinks: [N], a logit of each head that takes part in the softmax and has no value; or None.
        steering: what control vectors add after the block, or None.
    """

    attn_norm: Norm | None
    qkv: tuple[Linear, ...]
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Array | None
    attn_output: Linear
    post_attn_norm: Norm | None
    ffn_norm: Norm | None
    mlp: Mlp | Experts
    post_ffn_norm: Norm | None
    gated: bool = field(metadata={"static": True})
    steering: Steering | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All weights.

    Layers that are alike (formats, shapes, optional tensors, LayerSpec) are stacked, in the order
    of the model, so that one compiled body serves them all. A GGUF file mixes formats, so there may
    be several such groups:

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
        embd_lora: what adapters add to the embeddings, or None.
    """

    token_embd: QTensor
    groups: tuple[LayerParams, ...]
    output_norm: Norm
    output: Linear
    rope: tuple[Array, ...]
    order: tuple[tuple[int, int], ...] = field(metadata={"static": True})
    embd_lora: Lora | None = None

    def layers_of(self, group: int) -> list[int]:
        """The layers of a group, in the order of its stack."""
        return [layer for layer, (own, _) in enumerate(self.order) if own == group]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied output counts once."""
        return sum({id(a): a.nbytes for a in jax.tree.leaves(self)}.values())


def rescaled(
    params: Params,
    kind: type[Lora] | type[Steering],
    scales: Sequence[float | Array],
    called: str,
) -> Params:
    """The weights with other scales of what was added to them: data, nothing is compiled anew.

    Args:
        params: weights.
        kind: of what was added.
        scales: one for each.
        called: what they are, for the message.

    Raises:
        ValueError: there are more or fewer scales than were added.
    """

    def scaled(leaf: object) -> object:
        if not isinstance(leaf, kind):
            return leaf
        if len(scales) != len(leaf.ranks):
            raise ValueError(f"{len(scales)} scales for {len(leaf.ranks)} {called}")
        rows = leaf.scale.shape[:-1]
        own = [
            jnp.full((*rows, n), scale, jnp.float32)
            for n, scale in zip(leaf.ranks, scales, strict=True)
        ]
        return dataclasses.replace(leaf, scale=jnp.concatenate(own, axis=-1))

    return jax.tree.map(scaled, params, is_leaf=lambda leaf: isinstance(leaf, kind))


def pick(stack: LayerParams, index: int | Array) -> LayerParams:
    """One block of a stack; the index may be traced.

    Packed weights and norms keep the index, for a kernel to find its row by; the rest is sliced.
    """
    index = jnp.asarray(index, jnp.uint32)
    kept = QTensor | RmsNorm | LayerNorm | ExpertLinear

    def sliced(leaf: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(leaf, index, axis=0, keepdims=False)

    def one(leaf: Array | QTensor | Norm | ExpertLinear) -> object:
        if isinstance(leaf, ExpertLinear):
            first = index * jnp.uint32(leaf.n_expert)
            rest = {e: None if v is None else sliced(v) for e, v in leaf.extras.items()}
            weight = dataclasses.replace(leaf.weight, layer=first)
            return dataclasses.replace(leaf, weight=weight, **rest)
        if isinstance(leaf, QTensor | RmsNorm | LayerNorm):
            return dataclasses.replace(leaf, layer=index)
        return sliced(leaf)

    return jax.tree.map(one, stack, is_leaf=lambda leaf: isinstance(leaf, kept))
