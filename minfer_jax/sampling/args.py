"""The sampler's values as arrays: all traced, so that no value of any of them compiles anything."""

from dataclasses import dataclass

import jax
import numpy as np

WINDOW = 64
"""How many of the latest tokens, prompt and generated, the penalties of `sample` look at."""

WINDOW_EXTENDED = 1024
"""The same of `sample_extended`, and of DRY; parameters may ask for fewer."""

ALL = 2**31 - 1
"""As a number of tokens: all that the logits have."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerArgs:
    """The values of the usual steps, one per row.

    Attributes:
        temperature: float32 ``[B]``.
        top_k: int32 ``[B]``.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``.
        repeat_penalty: float32 ``[B]``.
        frequency_penalty: float32 ``[B]``.
        presence_penalty: float32 ``[B]``.
        n_vocab: int32 ``[B]``, tokens that are real; logits beyond are padding, never drawn.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repeat_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    n_vocab: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExtendedArgs:
    """The values of all steps, their order, and what is said of single tokens.

    Attributes:
        usual: The values of the usual steps, of B rows.
        penalty_last_n: int32 ``[B]``, how much of the window the penalties look at.
        dry_multiplier: float32 ``[B]``.
        dry_base: float32 ``[B]``.
        dry_allowed_length: int32 ``[B]``.
        dry_penalty_last_n: int32 ``[B]``, how much of the window DRY looks at.
        top_n_sigma: float32 ``[B]``.
        typical_p: float32 ``[B]``.
        xtc_probability: float32 ``[B]``.
        xtc_threshold: float32 ``[B]``.
        dynatemp_range: float32 ``[B]``.
        dynatemp_exponent: float32 ``[B]``.
        mirostat_tau: float32 ``[B]``.
        mirostat_eta: float32 ``[B]``.
        order: int32 ``[len(STEPS) + 1]``, numbers of the steps to run, then -1; shared by the rows.
        bias: float32 ``[V]``, added to the logits first; -inf forbids. Shared by the rows.
        breakers: uint32 ``[ceil(V / 32)]``, bit i of word w says whether token 32 w + i breaks a
            sequence of DRY. Shared by the rows.
    """

    usual: SamplerArgs
    penalty_last_n: jax.Array
    dry_multiplier: jax.Array
    dry_base: jax.Array
    dry_allowed_length: jax.Array
    dry_penalty_last_n: jax.Array
    top_n_sigma: jax.Array
    typical_p: jax.Array
    xtc_probability: jax.Array
    xtc_threshold: jax.Array
    dynatemp_range: jax.Array
    dynatemp_exponent: jax.Array
    mirostat_tau: jax.Array
    mirostat_eta: jax.Array
    order: jax.Array
    bias: jax.Array
    breakers: jax.Array


def n_words(n_vocab: int) -> int:
    """Words of 32 bits that hold one bit for each token."""
    return -(-n_vocab // 32)


def all_tokens(n_vocab: int) -> np.ndarray:
    """A mask that forbids nothing: uint32 ``[ceil(V / 32)]``."""
    return np.full(n_words(n_vocab), 2**32 - 1, np.uint32)


def packed(flags: np.ndarray) -> np.ndarray:
    """One bit a token: uint32 ``[ceil(V / 32)]`` of bool ``[V]``, lowest bit first."""
    bits = np.zeros(32 * n_words(flags.size), bool)
    bits[: flags.size] = flags
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
