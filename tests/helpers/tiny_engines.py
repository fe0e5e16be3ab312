"""Engines of tiny models, whose rings and buckets are short enough to be passed."""

from typing import Any

import pytest

from minfer_jax import context
from minfer_jax.engine import Engine
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params

N_CTX = 40


def short_engine(model: tuple[ModelConfig, Params], **options: Any) -> Engine:
    """An engine that runs prompts in buckets of 4 and 8 tokens; a ring of it has 8 + 8 slots.

    Args:
        model: as `tiny_models.load` gives it.
        **options: of `Engine`; n_ctx is 40 and prefill_chunk 8 unless given.
    """
    cfg, params = model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "BUCKETS", (4, 8))
        return Engine(params, cfg, **{"n_ctx": N_CTX, "prefill_chunk": 8, **options})
