"""`bench --compile` over shapes: the programs of each combination of what they depend on."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled, Lowered

from minfer_jax import bench_compile
from minfer_jax.bench_table import Columns
from minfer_jax.engine import Engine
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params
from minfer_jax.model.precision import cache_dtype

LAYERS = ("looped", "unrolled")
MOST = 64  # combinations

COLUMNS: Columns = {
    "n_ctx": lambda row: str(row["n_ctx"]),
    "cache": lambda row: row["cache_type"],
    "layers": lambda row: row["layers"],
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What the programs of an engine are specialised to, besides the model.

    Attributes:
        n_ctx: positions of context; None for what the command takes.
        cache_type: of keys and values; None for what the precision implies.
        layers: one of LAYERS; None for what the model was loaded with.
    """

    n_ctx: int | None = None
    cache_type: str | None = None
    layers: str | None = None


def variants(
    n_ctx: Sequence[int], cache_types: Sequence[str], layers: Sequence[str]
) -> tuple[Variant, ...]:
    """All combinations; of an empty list, None."""
    return tuple(
        Variant(n_ctx=n, cache_type=cache, layers=form)
        for n, cache, form in itertools.product(
            n_ctx or (None,), cache_types or (None,), layers or (None,)
        )
    )


def engines(
    params: Params, cfg: ModelConfig, wanted: Sequence[Variant], *, n_ctx: int, prefill_chunk: int
) -> list[tuple[dict[str, Any], Engine]]:
    """An engine for each variant, all on the same weights, with what its rows are labelled by.

    Args:
        params, cfg: the model.
        wanted: the variants.
        n_ctx: where a variant does not say.
        prefill_chunk: as for Engine.
    """
    made = []
    for variant in wanted:
        unrolled = cfg.unrolled if variant.layers is None else variant.layers == LAYERS[1]
        held = cfg.cache_dtype
        if variant.cache_type is not None:
            held = cache_dtype(variant.cache_type, cfg.precision)
        engine = Engine(
            params,
            dataclasses.replace(cfg, cache_dtype=held, unrolled=unrolled),
            n_ctx=variant.n_ctx or n_ctx,
            prefill_chunk=prefill_chunk,
        )
        labels = {"n_ctx": engine.n_ctx, "cache_type": held, "layers": LAYERS[unrolled]}
        made.append((labels, engine))
    return made


def measure(
    made: Sequence[tuple[dict[str, Any], Engine]],
    *,
    repeat: int,
    on_turn: Callable[[], object],
    on_program: Callable[[dict[str, Any], str, Lowered, Compiled], object],
) -> list[dict[str, Any]]:
    """The rows of `bench_compile.measure` for each engine, under its labels.

    Args:
        made: from `engines`.
        repeat, on_turn: as there.
        on_program: likewise, with the labels before the name.
    """
    rows = []
    for labels, engine in made:

        def told(
            name: str, lowered: Lowered, compiled: Compiled, labels: dict[str, Any] = labels
        ) -> None:
            on_program(labels, name, lowered, compiled)

        found = bench_compile.measure(
            engine.recipes(), repeat=repeat, on_turn=on_turn, on_program=told
        )
        rows += [{**labels, **row} for row in found]
    return rows


def columns(made: Sequence[tuple[dict[str, Any], Engine]]) -> Columns:
    """Of the table: what the programs cost, behind whatever differs between the engines."""
    labels = [label for label, _ in made]
    names = zip(COLUMNS, labels[0], strict=True)
    differ = {title for title, key in names if len({label[key] for label in labels}) > 1}
    program, *others = bench_compile.COLUMNS.items()
    chosen = {title: cell for title, cell in COLUMNS.items() if title in differ}
    return dict([program, *chosen.items(), *others])
