"""What an architecture is, and the reading of the keys that all of them have."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from minfer_jax.model.config import MAX_POSITIONS, LayerSpec, ModelConfig, ModelError, Router
from minfer_jax.model.keys import LARGEST, SMALLEST, Keys, shown
from minfer_jax.model.rope import RopeSpec, Yarn


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One row of the table of architectures.

    The norms are names of tensors of a layer, or None where the block has no norm in that place:

        x = x + post_attn_norm(attention(attn_norm(x)))
        x = x + post_ffn_norm(mlp(ffn_norm(x)))

    Without an ffn_norm but with an attn_norm, the two stand side by side (Wang & Komatsuzaki 2021):

        x = x + attention(attn_norm(x)) + mlp(attn_norm(x))

    Attributes:
        name: `general.architecture`.
        rope_interleaved: RoPE pairs are neighbours (ggml's NORM), not halves (NEOX).
        layer_norm: the norms are layer norms, not RMS norms.
        attn_norm, ffn_norm, post_attn_norm, post_ffn_norm: see above.
        post_norm_eps: epsilon of the two post norms, or None for that of all norms.
        qk_norm: norm of queries and keys before RoPE: "head" (one weight for all heads), "heads" (a
            weight for each), "width" (over all heads at once), or "" for none.
        optional: norms that a file may leave out.
        attn_gate: a gate on what attention gives.
        attn_sinks: see LayerParams.sinks.
        yarn_keys: the file's own constants of YaRN count. llama.cpp reads them for a few
            architectures and takes the usual ones for the rest, whatever the file says.
        activation: of the MLP: ModelConfig.activation.
        gated: whether the MLP has a gate.
        gating, normalize: of a mixture of experts, see Router.
        adapt: turns the common configuration into this architecture's.
    """

    name: str
    rope_interleaved: bool
    layer_norm: bool = False
    attn_norm: str | None = "attn_norm"
    ffn_norm: str | None = "ffn_norm"
    post_attn_norm: str | None = None
    post_ffn_norm: str | None = None
    post_norm_eps: float | None = None
    qk_norm: str = ""
    optional: frozenset[str] = frozenset()
    attn_gate: bool = False
    attn_sinks: bool = False
    yarn_keys: bool = False
    activation: str = "silu"
    gated: bool = True
    gating: str = "softmax"
    normalize: bool = True
    adapt: Callable[[ModelConfig, Keys], ModelConfig] = lambda cfg, keys: cfg


def read_config(arch: Arch, keys: Keys, n_vocab: int) -> ModelConfig:
    """The configuration that the metadata describes.

    Raises:
        ModelError: a key is missing, of the wrong type, or out of range.
    """
    n_embd = keys.integer("embedding_length", minimum=1)
    n_head = keys.integer("attention.head_count", minimum=1)
    n_head_kv = keys.integer("attention.head_count_kv", n_head, minimum=1)
    if n_head % n_head_kv:
        raise ModelError(
            f"{arch.name}.attention.head_count {n_head} is not a multiple of "
            f"head_count_kv {n_head_kv}"
        )
    head_dim = keys.integer("attention.key_length", n_embd // n_head, minimum=1)
    n_layer = _n_layer(keys)
    n_ctx_train = min(keys.integer("context_length", minimum=1), MAX_POSITIONS)
    cfg = ModelConfig(
        arch=arch.name,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=keys.integer("feed_forward_length", minimum=1),
        n_vocab=n_vocab,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        value_dim=keys.integer("attention.value_length", n_embd // n_head, minimum=1),
        n_ctx_train=n_ctx_train,
        layers=(LayerSpec(),) * n_layer,
        norm_eps=keys.number(
            "attention.layer_norm_epsilon"
            if arch.layer_norm
            else "attention.layer_norm_rms_epsilon",
            minimum=0.0,
        ),
        ropes=(_rope(arch, keys, head_dim, n_ctx_train),),
        rope_interleaved=arch.rope_interleaved,
        activation=arch.activation,
        router=_router(arch, keys),
        attention_scale=1.0 / math.sqrt(head_dim),
    )
    return arch.adapt(cfg, keys)


def _n_layer(keys: Keys) -> int:
    """Layers that run; those after them, which predict further tokens, are left out."""
    count = keys.integer("block_count", minimum=1)
    if count > 4096:
        raise ModelError(f"{keys.arch}.block_count is {count}, expected at most 4096")
    extra = keys.integer("nextn_predict_layers", 0)
    if extra >= count:
        raise ModelError(
            f"{keys.arch}.nextn_predict_layers is {extra}, expected less than block_count {count}"
        )
    return count - extra


def _router(arch: Arch, keys: Keys) -> Router | None:
    """The choice of experts. Its kind is the architecture's: llama.cpp reads no key for these."""
    n_expert = keys.integer("expert_count", 0)
    if not n_expert:
        return None
    n_used = keys.integer("expert_used_count", minimum=1)
    if n_used > n_expert:
        raise ModelError(
            f"{arch.name}.expert_used_count is {n_used}, but there are {n_expert} experts"
        )
    if keys.integer("expert_group_count", 0) > 1:
        raise ModelError(f"{arch.name}.expert_group_count: groups of experts are not supported")
    return Router(n_expert=n_expert, n_used=n_used, gating=arch.gating, normalize=arch.normalize)


SCALINGS = ("none", "linear", "yarn", "longrope")


def _rope(arch: Arch, keys: Keys, head_dim: int, n_ctx_train: int) -> RopeSpec:
    """RoPE of the full-attention layers.

    As llama.cpp: a factor of 0 means no scaling. YaRN multiplies cosines and sines by the m-scale
    of its paper, 1 + 0.1 ln(factor); `yarn_log_multiplier` divides that by a second such term.
    """
    dims = keys.integer("rope.dimension_count", head_dim, minimum=2)
    if dims % 2 or dims > head_dim:
        raise ModelError(
            f"{keys.arch}.rope.dimension_count is {dims}, expected an even number up to {head_dim}"
        )
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in SCALINGS:
        raise ModelError(
            f"{keys.arch}.rope.scaling.type is {shown(kind)}, expected one of {', '.join(SCALINGS)}"
        )
    old = keys.number("rope.scale_linear", 0.0, minimum=0.0)
    factor = keys.number("rope.scaling.factor", old, minimum=0.0)
    factor = 1.0 if factor < 1e-6 or kind == "none" else factor
    magnitude = keys.number("rope.scaling.attn_factor", 1.0, minimum=0.0, above=True)
    yarn = None
    if kind == "yarn":
        betas, multiplier = {}, 0.0
        if arch.yarn_keys:
            betas = {
                f"beta_{name}": keys.number(
                    f"rope.scaling.yarn_beta_{name}", default, minimum=0.0, above=True
                )
                for name, default in (("fast", Yarn.beta_fast), ("slow", Yarn.beta_slow))
            }
            multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0)
        yarn = Yarn(n_ctx_orig=original_context(keys, n_ctx_train), **betas)
        stretch = math.log(max(factor, 1.0))
        magnitude *= (1.0 + 0.1 * stretch) / (1.0 + 0.1 * multiplier * stretch)
        if not SMALLEST <= magnitude <= LARGEST:
            raise ModelError(
                f"{keys.arch}.rope.scaling.attn_factor and yarn_log_multiplier make a factor of "
                f"{magnitude:.4g} on cosines and sines, expected one that float32 holds"
            )
    return RopeSpec(
        # YaRN divides by the logarithm of the base.
        base=keys.number("rope.freq_base", 10000.0, minimum=1.0 if yarn else 0.0, above=True),
        dims=dims,
        freq_scale=1.0 / factor,
        yarn=yarn,
        magnitude=magnitude,
    )


def original_context(keys: Keys, n_ctx_train: int) -> int:
    """The context that the model had before it was stretched; 0 in the file means n_ctx_train."""
    length = keys.integer("rope.scaling.original_context_length", 0)
    return min(length, MAX_POSITIONS) or n_ctx_train
