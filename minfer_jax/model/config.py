"""The static description of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax.model.rope import RopeSpec
from minfer_jax.quant.matmul import EXACT, Arithmetic

MAX_POSITIONS = 2**31 - 1  # positions are int32


class ModelError(ValueError):
    """The file cannot be run: a key or tensor is missing, wrong or unsupported. One line."""


def listed(problems: Sequence[str]) -> str:
    """All that is wrong, in the line of a ModelError; of many the first ones."""
    more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
    return "; ".join(problems[:8]) + more


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a mixture of experts chooses (llama.cpp: build_moe_ffn).

    Attributes:
        n_expert: E, experts of a layer.
        n_used: U, of them for each token.
        gating: what turns the router's logits into weights: "softmax" over all experts, "sigmoid",
            or "softmax_weight", a softmax over the chosen ones.
        normalize: the weights of the chosen are divided by their sum.
        scale: factor on the weights.
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer.

    Attributes:
        sliding: attends to the last `window` positions only, and caches no more than it needs.
        rope: index into ModelConfig.ropes and Params.rope, or None where the layer does not rotate.
    """

    sliding: bool = False
    rope: int | None = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model that a compiled program depends on; hashable.

    Attributes:
        arch: `general.architecture`.
        n_layer, n_embd, n_ff, n_vocab: layers L, model width D, feed-forward width F, vocabulary V.
        n_head, n_head_kv: query heads N and kv heads K.
        head_dim: H, of queries and keys.
        value_dim: Hv, of values.
        n_ctx_train: the longest context the model was made for, tokens.
        layers: one LayerSpec a layer.
        window: positions that a sliding layer sees, itself included; 0 where no layer slides.
        norm_eps: epsilon of the norms.
        ropes: the rotations that LayerSpec.rope picks from.
        rope_interleaved: RoPE pairs are (2i, 2i + 1); otherwise (i, i + dims / 2).
        long_rope: (n_ctx, i): where the context is longer than n_ctx tokens, rotation i stands in
            for rotation 0; or None.
        activation: of the MLP, a key of GATES or ACTIVATIONS in quant/prologue.py.
        router: of layers with experts, or None.
        embedding_scale: factor on the token embeddings.
        embedding_norm: they are normed first, by an RMS norm without a weight.
        residual_scale: factor on what a sub-layer adds to the residual stream.
        logit_scale: factor on the logits.
        attention_scale: factor on q . k.
        attention_softcap: c in c * tanh(score / c), or 0 for none.
        attention_temperature: (scale, floor): queries are multiplied by
            1 + scale * ln(1 + position // floor); (0, 1) leaves them alone (Llama 4, Ministral 3).
        final_softcap: c in c * tanh(logits / c), after the logits' scale, or 0 for none.
        precision: "highest" or "default", as asked for at load.
        arithmetic: of products with weights; `many` and `kernels` are those of attention too.
        cache_dtype: what keys and values are rounded to, one of `quant.cache.TYPES`.
        unrolled: every layer stands in the program by itself; otherwise alike ones share a loop's
            body, which compiles faster, but has turns whose number the device decides.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_ctx_train: int
    layers: tuple[LayerSpec, ...]
    window: int = 0
    norm_eps: float
    ropes: tuple[RopeSpec, ...]
    rope_interleaved: bool
    long_rope: tuple[int, int] | None = None
    activation: str = "silu"
    router: Router | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float
    attention_softcap: float = 0.0
    attention_temperature: tuple[float, int] = (0.0, 1)
    final_softcap: float = 0.0
    precision: str = "highest"
    arithmetic: Arithmetic = EXACT
    cache_dtype: str = "float32"
    unrolled: bool = False

    def rope_of(self, spec: LayerSpec, n_ctx: int) -> int | None:
        """Which of `ropes` a layer rotates by, in a context of n_ctx positions."""
        if spec.rope == 0 and self.long_rope is not None and n_ctx > self.long_rope[0]:
            return self.long_rope[1]
        return spec.rope
