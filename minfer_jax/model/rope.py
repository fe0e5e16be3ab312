"""Rotary position embedding: frequencies on the host, the rotation in jnp.

Su et al. 2021 (RoFormer); scaling: linear (Chen et al. 2023), YaRN (Peng et al. 2023, as ggml's
rope_yarn computes it), and per-dimension factors that the file carries (Llama 3.1's `rope_freqs`).
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's constants.

    Attributes:
        beta_fast, beta_slow: rotations over the original context beyond which a dimension keeps its
            frequency, and below which it is fully interpolated.
        n_ctx_orig: the original context, tokens.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One kind of rotation.

    Attributes:
        base: RoPE's theta.
        dims: rotated dimensions of a head, even.
        freq_scale: 1 / the factor by which the context was stretched.
        yarn: mix scaled and unscaled frequencies as YaRN does, or None.
        magnitude: factor on the cosines and sines (YaRN).
    """

    base: float
    dims: int
    freq_scale: float = 1.0
    yarn: Yarn | None = None
    magnitude: float = 1.0


def frequencies(spec: RopeSpec, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians a position for each rotated pair.

    Args:
        spec: the rotation.
        factors: float [dims / 2] that divide the frequencies, or None.

    Returns:
        float32 [dims / 2].
    """
    pairs = np.arange(spec.dims // 2, dtype=np.float64)
    freq = spec.base ** (-2.0 * pairs / spec.dims)
    if factors is not None:
        freq = freq / factors.astype(np.float64)
    scaled = freq * spec.freq_scale
    if spec.yarn is not None:
        keep = _yarn_ramp(pairs, spec.base, spec.dims, spec.yarn)
        scaled = scaled * (1.0 - keep) + freq * keep
    return scaled.astype(np.float32)


def _yarn_ramp(pairs: np.ndarray, base: float, dims: int, yarn: Yarn) -> np.ndarray:
    """1 for pairs fast enough to keep their frequency, 0 for slow ones, a ramp between."""

    def pair_with(rotations: float) -> float:
        turn = yarn.n_ctx_orig / (rotations * 2.0 * math.pi)
        return dims * math.log(turn) / (2.0 * math.log(base))

    low = max(0.0, math.floor(pair_with(yarn.beta_fast)))
    high = min(dims - 1.0, math.ceil(pair_with(yarn.beta_slow)))
    return 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)


def angles(
    positions: Int[Array, "B T"], freq: Float[Array, " pairs"], magnitude: float
) -> tuple[Float[Array, "B T pairs"], Float[Array, "B T pairs"]]:
    """Cosines and sines, times the magnitude. In float32: bfloat16 would round 257 to 256."""
    angle = positions.astype(jnp.float32)[:, :, None] * freq[None, None, :]
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def rotate(
    x: Float[Array, "B T heads H"],
    positions: Int[Array, "B T"],
    freq: Float[Array, " pairs"],
    *,
    interleaved: bool,
    magnitude: float,
) -> Float[Array, "B T heads H"]:
    """Rotate the first 2 * pairs values of every head by its position; the rest pass through."""
    dims = 2 * freq.shape[0]
    cos, sin = (x[:, :, None, :] for x in angles(positions, freq, magnitude))
    turned, rest = x[..., :dims], x[..., dims:]
    if interleaved:
        pairs = turned.reshape(*turned.shape[:-1], dims // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., : dims // 2], turned[..., dims // 2 :]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned if not rest.shape[-1] else jnp.concatenate([turned, rest], axis=-1)
