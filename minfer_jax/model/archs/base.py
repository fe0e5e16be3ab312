"""What an architecture is, and the reading of the keys that all of them share."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from minfer_jax.model.config import LayerSpec, ModelConfig, ModelError
from minfer_jax.model.keys import Keys
from minfer_jax.model.rope import RopeSpec, Yarn


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One row of the table of architectures.

    Attributes:
        name: `general.architecture`.
        rope_interleaved: RoPE pairs are neighbours (ggml's NORM), not halves (NEOX).
        norms: names of the layer norms beyond attn_norm and ffn_norm that the block has.
        adapt: turns the common configuration into this architecture's.
    """

    name: str
    rope_interleaved: bool
    norms: frozenset[str] = frozenset()
    adapt: Callable[[ModelConfig, Keys], ModelConfig] = lambda cfg, keys: cfg


def read_config(arch: Arch, keys: Keys, n_vocab: int) -> ModelConfig:
    """The configuration that the metadata describes.

    Raises:
        ModelError: a key is missing, of the wrong type, or out of range.
    """
    if experts := keys.integer("expert_count", 0):
        raise ModelError(
            f"{arch.name}.expert_count is {experts}, expected 0: mixtures of experts do not run yet"
        )
    n_embd = keys.integer("embedding_length", minimum=1)
    n_head = keys.integer("attention.head_count", minimum=1)
    n_head_kv = keys.integer("attention.head_count_kv", n_head, minimum=1)
    if n_head % n_head_kv:
        raise ModelError(
            f"{arch.name}.attention.head_count {n_head} is not a multiple of "
            f"head_count_kv {n_head_kv}"
        )
    head_dim = keys.integer("attention.key_length", n_embd // n_head, minimum=1)
    value_dim = keys.integer("attention.value_length", head_dim, minimum=1)
    if value_dim != head_dim:
        raise ModelError(
            f"{arch.name}.attention.value_length {value_dim} differs from key_length {head_dim}, "
            "which is not supported"
        )
    n_layer = keys.integer("block_count", minimum=1)
    if n_layer > 4096:
        raise ModelError(f"{arch.name}.block_count is {n_layer}, expected at most 4096")
    n_ctx_train = keys.integer("context_length", minimum=1)
    cfg = ModelConfig(
        arch=arch.name,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=keys.integer("feed_forward_length", minimum=1),
        n_vocab=n_vocab,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ctx_train=n_ctx_train,
        layers=(LayerSpec(),) * n_layer,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", minimum=0.0),
        ropes=(_rope(keys, head_dim, n_ctx_train),),
        rope_interleaved=arch.rope_interleaved,
        attention_scale=1.0 / math.sqrt(head_dim),
    )
    return arch.adapt(cfg, keys)


def _rope(keys: Keys, head_dim: int, n_ctx_train: int) -> RopeSpec:
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
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{keys.arch}.rope.scaling.type is {kind!r}, expected one of none, linear, yarn"
        )
    old = keys.number("rope.scale_linear", 0.0, minimum=0.0)
    factor = keys.number("rope.scaling.factor", old, minimum=0.0)
    factor = 1.0 if factor < 1e-6 or kind == "none" else factor
    magnitude = keys.number("rope.scaling.attn_factor", 1.0, minimum=0.0, above=True)
    yarn = None
    if kind == "yarn":
        yarn = Yarn(
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, minimum=0.0, above=True),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, minimum=0.0, above=True),
            n_ctx_orig=original_context(keys, n_ctx_train),
        )
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0)
        stretch = math.log(max(factor, 1.0))
        magnitude *= (1.0 + 0.1 * stretch) / (1.0 + 0.1 * multiplier * stretch)
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
    return min(keys.integer("rope.scaling.original_context_length", 0), 2**31 - 1) or n_ctx_train


def without_rope_every(cfg: ModelConfig, step: int) -> ModelConfig:
    """Every step-th layer does not rotate (NoPE)."""
    layers = tuple(
        dataclasses.replace(spec, rope=None) if (i + 1) % step == 0 else spec
        for i, spec in enumerate(cfg.layers)
    )
    return dataclasses.replace(cfg, layers=layers)


def sliding_layers(cfg: ModelConfig, keys: Keys, period: int) -> tuple[bool, ...]:
    """Which layers slide: the file's own list, or all but every period-th.

    `attention.sliding_window_pattern` holds either one flag a layer, or a period that replaces the
    default.
    """
    pattern = keys.array("attention.sliding_window_pattern")
    if pattern is not None:
        if len(pattern) < cfg.n_layer:
            raise ModelError(
                f"{keys.arch}.attention.sliding_window_pattern has {len(pattern)} entries, "
                f"expected {cfg.n_layer}, one a layer"
            )
        return tuple(bool(flag) for flag in pattern[: cfg.n_layer])
    period = keys.integer("attention.sliding_window_pattern", period)
    return tuple(period == 0 or i % period < period - 1 for i in range(cfg.n_layer))
