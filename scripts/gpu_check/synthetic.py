"""A model with the shapes of Mistral 7B and random Q4_K weights, made on the device."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.model import precision, registry
from minfer_jax.model.archs.base import read_config
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.keys import Keys
from minfer_jax.model.params import LayerParams, Linear, Mlp, Params
from minfer_jax.model.rope import frequencies
from minfer_jax.quant.prologue import RmsNorm
from scripts.gpu_check import made

MISTRAL_7B = {
    "block_count": 32,
    "context_length": 32768,
    "embedding_length": 4096,
    "feed_forward_length": 14336,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
}
N_VOCAB = 32000
TINY = MISTRAL_7B | {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
TINY_VOCAB = 512
LAYERS, OUTPUT = "Q4_K", "Q6_K"


def model(*, tiny: bool = False, kernels: str = "auto") -> tuple[ModelConfig, Params]:
    """Configuration and weights.

    Args:
        tiny: of a few hundred columns.
        kernels: one of `quant.kernels.CHOICES`.
    """
    values, n_vocab = (TINY, TINY_VOCAB) if tiny else (MISTRAL_7B, N_VOCAB)
    keys = Keys({f"llama.{name}": value for name, value in values.items()}, "llama")
    cfg = dataclasses.replace(
        read_config(registry.find("llama"), keys, n_vocab),
        precision="default",
        arithmetic=precision.arithmetic("default", choice=kernels),
        cache_dtype=precision.cache_dtype(None, "default"),
        unrolled=jax.default_backend() != "cpu",  # as in load.py
    )
    return cfg, _params(cfg)


def _params(cfg: ModelConfig) -> Params:
    heads = cfg.n_head + 2 * cfg.n_head_kv

    def linear(seed: int, n: int, k: int) -> Linear:
        return Linear(weight=made.weight(seed, LAYERS, (n, k), cfg.n_layer))

    def norm(*layers: int) -> RmsNorm:
        return RmsNorm(weight=jnp.ones((*layers, cfg.n_embd), jnp.float32), eps=cfg.norm_eps)

    layers = LayerParams(
        attn_norm=norm(cfg.n_layer),
        qkv=(linear(0, heads * cfg.head_dim, cfg.n_embd),),
        q_norm=None,
        k_norm=None,
        sinks=None,
        attn_output=linear(1, cfg.n_embd, cfg.n_head * cfg.head_dim),
        post_attn_norm=None,
        ffn_norm=norm(cfg.n_layer),
        mlp=Mlp(
            up=(linear(2, 2 * cfg.n_ff, cfg.n_embd),),
            down=linear(3, cfg.n_embd, cfg.n_ff),
            gated=True,
        ),
        post_ffn_norm=None,
        gated=False,
    )
    shape = (cfg.n_vocab, cfg.n_embd)
    return Params(
        token_embd=made.weight(4, LAYERS, shape, std=1.0),
        groups=(layers,),
        output_norm=norm(),
        output=Linear(weight=made.weight(5, OUTPUT, shape)),
        rope=tuple(jnp.asarray(frequencies(spec)) for spec in cfg.ropes),
        order=tuple((0, i) for i in range(cfg.n_layer)),
    )
