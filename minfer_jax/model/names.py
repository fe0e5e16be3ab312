"""The names of a model's values, as traces and patches use them.

    embd, blk.0.attn_norm, blk.0.q, ..., blk.0.residual, blk.1.attn_norm, ..., output_norm, logits

Letters of the axes: B sequences, T rows of the call, S slots of the layer's cache, D model width,
N query heads, K kv heads, H and Hv sizes of a head's key and value, F feed-forward width, E
experts, U experts that a token uses, V vocabulary.

A norm that a model does not have has no value, nor have its experts. Where attention and the MLP
stand side by side and share a norm, that is `attn_norm`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Experts, LayerParams, Mlp, Params


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name.

    Attributes:
        axes: of its value.
        what: it is.
        llama_cpp: what llama.cpp calls it in its graphs; "" where it has no such value.
        there: whether a layer has it.
        dtype: of its value.
    """

    axes: str
    what: str
    llama_cpp: str
    there: Callable[[LayerParams], bool] = lambda p: True
    dtype: str = "float32"


def _gated(p: LayerParams) -> bool:
    return p.mlp.gated if isinstance(p.mlp, Mlp) else True


def _routed(p: LayerParams) -> bool:
    return isinstance(p.mlp, Experts)


def _shared(p: LayerParams) -> bool:
    return isinstance(p.mlp, Experts) and p.mlp.shared is not None


BEFORE = {
    "embd": Row(axes="B T D", what="the embeddings, scaled", llama_cpp="inp_embd, inp_scaled"),
}
# Of a layer, in the order in which they are computed.
OF_LAYER = {
    "attn_norm": Row(
        axes="B T D",
        what="the normed input of the layer",
        llama_cpp="attn_norm",
        there=lambda p: p.attn_norm is not None,
    ),
    "k": Row(
        axes="B T K H",
        what="keys after norm and RoPE, before they are rounded to the cache's type",
        llama_cpp="Kcur",
    ),
    "v": Row(axes="B T K Hv", what="values, likewise", llama_cpp="Vcur"),
    "q": Row(
        axes="B T N H",
        what="queries after norm, RoPE and the factor of their position",
        llama_cpp="Qcur",
    ),
    "scores": Row(
        axes="B N T S",
        what="q . k after scale and soft cap, before the softmax; -inf where masked, which a patch "
        "does not change. Position p lies in slot p % S",
        llama_cpp="kq_scaled, kq_tanh; kq is before the scale",
    ),
    "weights": Row(axes="B N T S", what="the softmax of scores", llama_cpp="kq_soft_max"),
    "attn_heads": Row(
        axes="B T N Hv",
        what="what each head gives, after attention's gate: the input of the output map",
        llama_cpp="kqv_out, attn_gated",
    ),
    "attn_out": Row(axes="B T D", what="the output map's output", llama_cpp="attn_out"),
    "attn_post_norm": Row(
        axes="B T D",
        what="attn_out normed",
        llama_cpp="attn_post_norm",
        there=lambda p: p.post_attn_norm is not None,
    ),
    "attn_residual": Row(
        axes="B T D",
        what="the residual stream after attention was added",
        llama_cpp="ffn_inp",
    ),
    "ffn_norm": Row(
        axes="B T D",
        what="the normed input of the MLP",
        llama_cpp="ffn_norm",
        there=lambda p: p.ffn_norm is not None,
    ),
    "router": Row(
        axes="B T E",
        what="the router's logits, before its gating",
        llama_cpp="ffn_moe_logits",
        there=_routed,
    ),
    "experts": Row(
        axes="B T U",
        what="the experts that are used; -1 in rows of padding",
        llama_cpp="ffn_moe_topk",
        there=_routed,
        dtype="int32",
    ),
    "expert_weights": Row(
        axes="B T U",
        what="how much each of them counts",
        llama_cpp="ffn_moe_weights, ffn_moe_weights_norm, ffn_moe_weights_scaled",
        there=_routed,
    ),
    "gate": Row(
        axes="B T F",
        what="of an MLP with a gate, what the activation is taken of; of experts B T U F",
        llama_cpp="ffn_gate, ffn_moe_gate",
        there=_gated,
    ),
    "up": Row(
        axes="B T F",
        what="what the gate opens or, without a gate, what the activation is taken of; of experts "
        "B T U F",
        llama_cpp="ffn_up, ffn_moe_up",
    ),
    "ffn_act": Row(
        axes="B T F",
        what="act(gate) * up or act(up): the input of the down map; of experts B T U F",
        llama_cpp="ffn_swiglu, ffn_geglu, ffn_silu, ffn_gelu, ffn_moe_swiglu, ...",
    ),
    "shared": Row(
        axes="B T D",
        what="what the experts that every token uses give, scaled",
        llama_cpp="ffn_shexp, ffn_shexp_out",
        there=_shared,
    ),
    "down": Row(
        axes="B T D",
        what="the down map's output; of experts their weighted sum, the shared one added",
        llama_cpp="ffn_out, ffn_moe_out",
    ),
    "ffn_post_norm": Row(
        axes="B T D",
        what="down normed",
        llama_cpp="ffn_post_norm",
        there=lambda p: p.post_ffn_norm is not None,
    ),
    "residual": Row(axes="B T D", what="the layer's output", llama_cpp="l_out"),
}
AFTER = {
    "output_norm": Row(axes="B T D", what="the last residual normed", llama_cpp="result_norm"),
    "logits": Row(axes="B T V", what="the logits, scaled and capped", llama_cpp="result_output"),
}
OF_LAYERS = frozenset(OF_LAYER)
ROWS = {**BEFORE, **OF_LAYER, **AFTER}


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a model.

    Attributes:
        name: in full, such as "blk.3.attn_out".
        short: without its layer.
        layer: its layer; None for none.
        axes: the letters of its axes, in order.
        shape: their sizes.
        dtype: of the numbers.
    """

    name: str
    short: str
    layer: int | None
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        count = 4  # both dtypes
        for size in self.shape:
            count *= size
        return count


def values(
    params: Params, cfg: ModelConfig, *, batch: int, t: int, slots: tuple[int, int]
) -> dict[str, Value]:
    """All values of a call, by name, in the order in which they are computed.

    Args:
        params: weights.
        cfg: their configuration.
        batch: B.
        t: T.
        slots: S of full and of sliding layers.
    """
    sizes = {
        "B": batch,
        "T": t,
        "D": cfg.n_embd,
        "N": cfg.n_head,
        "K": cfg.n_head_kv,
        "H": cfg.head_dim,
        "Hv": cfg.value_dim,
        "V": cfg.n_vocab,
    }
    if cfg.router is not None:
        sizes |= {"E": cfg.router.n_expert, "U": cfg.router.n_used}

    def value(short: str, row: Row, layer: int | None, own: dict[str, int], routed: bool) -> Value:
        axes = row.axes.split()
        if routed and "F" in axes:
            axes.insert(2, "U")
        return Value(
            name=short if layer is None else f"blk.{layer}.{short}",
            short=short,
            layer=layer,
            axes=tuple(axes),
            shape=tuple(own[axis] for axis in axes),
            dtype=row.dtype,
        )

    found = [value(short, row, None, sizes, False) for short, row in BEFORE.items()]
    for layer, (group, _) in enumerate(params.order):
        p = params.groups[group]
        own = sizes | {"S": slots[kv.kind(cfg.layers[layer])], "F": p.mlp.down.weight.shape[1]}
        routed = isinstance(p.mlp, Experts)
        found += [
            value(short, row, layer, own, routed) for short, row in OF_LAYER.items() if row.there(p)
        ]
    found += [value(short, row, None, sizes, False) for short, row in AFTER.items()]
    return {value.name: value for value in found}


def matching(patterns: str | Iterable[str], known: Sequence[str]) -> list[str]:
    """The names that any of the patterns matches, in the order of `known`.

    Args:
        patterns: one or several, as of fnmatch: "blk.*.attn_out", "blk.[0-3].residual".
        known: all names.

    Raises:
        ValueError: a pattern is no text, or matches nothing; then the message lists the names.
    """
    several = isinstance(patterns, Iterable) and not isinstance(patterns, str | bytes)
    wanted: tuple = tuple(patterns) if several else (patterns,)
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{pattern!r} is no name of a value: a text such as 'blk.*.attn_out' is"
            )
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"{pattern!r} is no name of a value here; there are {listed(known)}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in wanted)]


def listed(known: Iterable[str]) -> str:
    """All names in one line: those of layers once, with how many layers there are."""
    short, n_layer = dict[str, None](), 0
    for name in known:
        if name.startswith("blk."):
            _, layer, tail = name.split(".", 2)
            n_layer = max(n_layer, int(layer) + 1)
            short[f"blk.N.{tail}"] = None
        else:
            short[name] = None
    return f"{', '.join(short)}, with N from 0 to {n_layer - 1}"
