"""What is asked of a text after its run: attention maps, and the logit lens of each layer.

Each is a program that keeps nothing else. Which layer's attention it is is data, and texts are
padded to powers of two, so that few programs serve all.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from minfer_jax.context import EngineError, power_of_two
from minfer_jax.engine import Engine
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.lens import logit_lens
from minfer_jax.model.names import values
from minfer_jax.model.params import Params
from minfer_jax.model.patches import tap_of
from minfer_jax.model.tap import Tap
from minfer_jax.programs import compile_other
from minfer_jax.runner import padded
from minfer_jax.tracing import of_context, run_alone

SHORTEST = 32  # tokens that a program is compiled for, at least
MAX_BYTES = 2**28  # of one layer's attention


class Inspector:
    """Looks into texts of one engine's model."""

    def __init__(self, engine: Engine) -> None:
        """Compiles nothing yet."""
        self._engine = engine
        self._cfg = of_context(engine.cfg, engine.n_ctx)
        self._programs: dict[tuple[Callable, int], Callable] = {}
        # Of one text and layer at most: its heads are asked for one by one.
        self._latest: dict[tuple[tuple[int, ...], int], np.ndarray] = {}

    def attention(self, ids: Sequence[int], layer: int, head: int) -> UInt8[np.ndarray, "T T"]:
        """How much each token looks at each, of one head: 255 for all of its attention.

        Args:
            ids: the text.
            layer: counted from 0.
            head: likewise.

        Raises:
            EngineError: there is no such layer or head, or the text is too long.
        """
        self._check_layer(layer)
        wanted = tuple(ids), layer
        if wanted not in self._latest:
            self._latest = {wanted: np.asarray(self._run(_weights, ids, [f"blk.{layer}.weights"]))}
        stack = self._latest[wanted]
        if not 0 <= head < len(stack):
            raise EngineError(f"head is {head}, expected 0 to {len(stack) - 1}")
        return stack[head, : len(ids), : len(ids)]

    def lens(self, ids: Sequence[int]) -> tuple[Int[np.ndarray, "L T"], Float[np.ndarray, "L T"]]:
        """The likeliest token after each layer at each position, and its probability."""
        names = [f"blk.{layer}.residual" for layer in range(self._cfg.n_layer)]
        found, probabilities = map(np.asarray, self._run(_lens, ids, names))
        return found[:, : len(ids)], probabilities[:, : len(ids)]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self._cfg.n_layer:
            raise EngineError(f"layer is {layer}, expected 0 to {self._cfg.n_layer - 1}")

    def _run(self, function: Callable, ids: Sequence[int], names: Sequence[str]) -> Any:
        bucket = power_of_two(len(ids), SHORTEST, self._engine.n_ctx)
        params = self._engine.params
        known = values(params, self._cfg, batch=1, t=bucket, slots=(bucket, bucket))
        if function is _weights and (size := known[names[0]].nbytes) > MAX_BYTES:
            raise EngineError(
                f"attention among {len(ids)} tokens takes {size / 1e6:.0f} MB, expected at most "
                f"{MAX_BYTES / 1e6:.0f}: give a shorter text"
            )
        tap, _ = tap_of(known, self._cfg.n_layer, names)
        arguments = params, *padded(np.array(ids, np.int32), 0, bucket), tap
        key = function, bucket
        if key not in self._programs:
            whole = partial(function, cfg=self._cfg, n_slots=bucket)
            self._programs[key], _ = compile_other(f"inspect {bucket}", whole, arguments)
        return self._programs[key](*arguments)


def _weights(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    tap: Tap,
    *,
    cfg: ModelConfig,
    n_slots: int,
) -> UInt8[Array, "N T T"]:
    """The one layer's attention that the tap keeps."""
    _, kept = run_alone(params, token_ids, positions, tap, cfg=cfg, n_slots=n_slots)
    (stack,) = kept.values()
    return jnp.round(stack[0, 0] * 255.0).astype(jnp.uint8)


def _lens(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    tap: Tap,
    *,
    cfg: ModelConfig,
    n_slots: int,
) -> tuple[Int[Array, "L T"], Float[Array, "L T"]]:
    """Of the residuals that the tap keeps, in the order of the layers."""
    _, kept = run_alone(params, token_ids, positions, tap, cfg=cfg, n_slots=n_slots)
    (stack,) = kept.values()
    return logit_lens(stack[:, 0], params, cfg)
