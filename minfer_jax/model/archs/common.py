"""What several architectures do to the common configuration."""

import dataclasses
import math

from minfer_jax.model.config import LayerSpec, ModelConfig, ModelError
from minfer_jax.model.keys import Keys
from minfer_jax.model.rope import RopeSpec


def with_multipliers(cfg: ModelConfig, keys: Keys) -> ModelConfig:
    """Granite's four multipliers; 0 stands for the usual one."""
    return dataclasses.replace(
        cfg,
        attention_scale=keys.number("attention.scale", 0.0, minimum=0.0) or cfg.attention_scale,
        embedding_scale=keys.number("embedding_scale", 0.0) or 1.0,
        residual_scale=keys.number("residual_scale", 0.0) or 1.0,
        logit_scale=1.0 / keys.number("logit_scale", minimum=0.0, above=True),
    )


def with_gemma_scales(cfg: ModelConfig, n_layer_27b: int) -> ModelConfig:
    """Gemma's scales. The 27B, known by its layers, takes that of attention from the width."""
    head = max(cfg.n_embd // cfg.n_head, 1) if cfg.n_layer == n_layer_27b else cfg.head_dim
    return dataclasses.replace(
        cfg, embedding_scale=math.sqrt(cfg.n_embd), attention_scale=1.0 / math.sqrt(head)
    )


def without_rope_every(cfg: ModelConfig, step: int) -> ModelConfig:
    """Every step-th layer does not rotate (NoPE)."""
    layers = tuple(
        dataclasses.replace(spec, rope=None) if (i + 1) % step == 0 else spec
        for i, spec in enumerate(cfg.layers)
    )
    return dataclasses.replace(cfg, layers=layers)


def with_window(
    cfg: ModelConfig,
    keys: Keys,
    *,
    period: int,
    window: int | None = None,
    local: RopeSpec | None,
    full: int | None = 0,
) -> ModelConfig:
    """Some layers see only a window of positions, and those rotate in a way of their own.

    Args:
        cfg: the model, all of whose layers are alike.
        keys: the file's: the window, and which layers slide (see `sliding_layers`).
        period: of layers that slide, where the file does not say.
        window: positions, where the file does not say; 0 for no window at all, None if it must.
        local: the rotation of sliding layers, or None for that of all.
        full: the rotation of the other layers, or None for none.
    """
    name = "attention.sliding_window"
    found = keys.integer(name, minimum=1) if window is None else keys.integer(name, window)
    if not found:
        return cfg
    ropes = cfg.ropes if local is None else (*cfg.ropes, local)
    slides = LayerSpec(sliding=True, rope=len(ropes) - 1)
    return dataclasses.replace(
        cfg,
        window=min(found, cfg.n_ctx_train),
        ropes=ropes,
        layers=tuple(
            slides if sliding else LayerSpec(rope=full)
            for sliding in sliding_layers(cfg, keys, period)
        ),
    )


def local_rope(cfg: ModelConfig, keys: Keys) -> RopeSpec:
    """The rotation of all layers, but with the base that sliding ones have."""
    full = cfg.ropes[0]
    least = 1.0 if full.yarn else 0.0  # YaRN divides by the base's logarithm
    base = keys.number("rope.freq_base_swa", full.base, minimum=least, above=True)
    return dataclasses.replace(full, base=base)


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
