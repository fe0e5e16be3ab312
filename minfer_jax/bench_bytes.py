"""What one decode step reads from memory: the weights, and the keys and values of the context."""

import jax
import numpy as np

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params

# Of a value in the cache; q8_0 has 2 bytes of scale to 32 values.
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "q8_0": 1.0 + 2 / 32}


def weight_bytes(params: Params) -> int:
    """Bytes of weights that one token reads.

    All of them, but for an embedding table that is not the output layer too: of that one row.
    """
    output = {id(leaf) for leaf in jax.tree.leaves(params.output)}
    table = [leaf for leaf in jax.tree.leaves(params.token_embd) if id(leaf) not in output]
    return params.nbytes - sum(leaf.nbytes for leaf in table)


def kv_bytes(cfg: ModelConfig, depth: int, n_gen: int) -> float:
    """Bytes of keys and values that a token reads, on average over a decode test.

    Args:
        cfg: the model; its sliding layers see `window` positions at most.
        depth: tokens in the context before.
        n_gen: tokens generated. The first is drawn by the last token of that context, or by a
            first token where there is none, which sees itself and what is before it.
    """
    row = 2 * cfg.n_head_kv * cfg.head_dim * _BYTES[cfg.cache_dtype]
    seen = max(depth, 1) + np.arange(n_gen)
    n_sliding = sum(spec.sliding for spec in cfg.layers)
    full = (cfg.n_layer - n_sliding) * seen.mean()
    return row * float(full + n_sliding * np.minimum(seen, cfg.window).mean())
