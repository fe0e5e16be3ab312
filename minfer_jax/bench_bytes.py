"""What one decode step reads from memory: the weights, and the keys and values of the context."""

import jax
import numpy as np

from minfer_jax.model import kv_state
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Experts, Params


def weight_bytes(params: Params, cfg: ModelConfig) -> int:
    """Bytes of weights that one token reads.

    All of them, but for the experts that it does not use, and for an embedding table that is not
    the output layer too: of that one row.
    """
    output = {id(leaf) for leaf in jax.tree.leaves(params.output)}
    table = [leaf for leaf in jax.tree.leaves(params.token_embd) if id(leaf) not in output]
    idle = 0
    if cfg.router is not None:
        unused = 1 - cfg.router.n_used / cfg.router.n_expert
        sparse = [group.mlp for group in params.groups if isinstance(group.mlp, Experts)]
        idle = unused * sum(
            leaf.nbytes for mlp in sparse for leaf in jax.tree.leaves((mlp.up, mlp.down))
        )
    return round(params.nbytes - sum(leaf.nbytes for leaf in table) - idle)


def kv_bytes(cfg: ModelConfig, depth: int, n_gen: int) -> float:
    """Bytes of keys and values that a token reads, on average over a decode test.

    Args:
        cfg: the model; its sliding layers see `window` positions at most.
        depth: tokens in the context before.
        n_gen: tokens generated. The first is drawn by the last token of that context, or by a
            first token where there is none, which sees itself and what is before it.
    """
    row = kv_state.row_bytes(cfg)
    seen = max(depth, 1) + np.arange(n_gen)
    n_sliding = sum(spec.sliding for spec in cfg.layers)
    full = (cfg.n_layer - n_sliding) * seen.mean()
    return row * float(full + n_sliding * np.minimum(seen, cfg.window).mean())
