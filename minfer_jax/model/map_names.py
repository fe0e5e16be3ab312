"""The linear maps of a block by ggml's names, and where in its Linears they are."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Experts, LayerParams, Linear, Mlp

# Where in the rows of a Linear the map of a name, without "blk.0.", and a number of rows begins. A
# name may stand for two: "ffn_up" for a half, and for both in files that have them as one tensor.
Parts = dict[tuple[str, int], int]
Place = Callable[[Parts, Linear], Linear]


def with_maps(p: LayerParams, cfg: ModelConfig, place: Place) -> LayerParams:
    """Layers whose maps went through a function.

    Args:
        p: one layer, or a stack.
        cfg: the model.
        place: gives another Linear for the one that it gets, and the names of its rows.
    """
    heads, heads_kv = cfg.n_head, cfg.n_head_kv
    widths = {
        "attn_q": heads * cfg.head_dim,
        "attn_k": heads_kv * cfg.head_dim,
        "attn_v": heads_kv * cfg.value_dim,
        "attn_gate": heads * cfg.value_dim,
    }
    return dataclasses.replace(
        p,
        qkv=_with_names(p.qkv, widths, ("attn_q", "attn_k", "attn_v"), "attn_qkv", place),
        attn_output=place({("attn_output", cfg.n_embd): 0}, p.attn_output),
        mlp=_with_experts(p.mlp, place) if isinstance(p.mlp, Experts) else _with_mlp(p.mlp, place),
    )


def _with_mlp(p: Mlp, place: Place, end: str = "") -> Mlp:
    n_embd, n_ff = p.down.weight.shape
    parts = [f"ffn_{name}{end}" for name in (("gate", "up") if p.gated else ("up",))]
    return dataclasses.replace(
        p,
        up=_with_names(p.up, dict.fromkeys(parts, n_ff), parts, f"ffn_up{end}", place),
        down=place({(f"ffn_down{end}", n_embd): 0}, p.down),
    )


def _with_experts(p: Experts, place: Place) -> Experts:
    """Of experts the router and the shared one: each other has rows of its own."""
    router = place({("ffn_gate_inp", p.router.weight.shape[0]): 0}, p.router)
    shared = None if p.shared is None else _with_mlp(p.shared, place, "_shexp")
    return dataclasses.replace(p, router=router, shared=shared)


def _with_names(
    maps: tuple[Linear, ...],
    widths: Mapping[str, int],
    fused: Sequence[str],
    fused_name: str,
    place: Place,
) -> tuple[Linear, ...]:
    """Maps whose outputs lie side by side, with the names of what each holds.

    Args:
        maps: each holds one or several of the following.
        widths: rows of each, by name, in order.
        fused: the first names, which a file may have as one tensor.
        fused_name: its name.
        place: see `with_maps`.
    """
    names, placed = iter(widths), []
    for p in maps:
        parts: Parts = {}
        at = 0
        while at < p.weight.shape[0]:
            name = next(names)
            parts[name, widths[name]] = at
            at += widths[name]
        if all((name, widths[name]) in parts for name in fused):
            parts.setdefault((fused_name, sum(widths[name] for name in fused)), 0)
        placed.append(place(parts, p))
    return tuple(placed)
