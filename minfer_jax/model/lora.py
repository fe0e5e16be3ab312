"""LoRA adapters (Hu et al. 2021) beside packed weights: pure functions on `Params`.

A pair A [R, K], B [N, R] of rank R adds to a map W [N, K]

    y = W x + scale * (alpha / R) * B (A x)

An `Adapter` holds pairs under ggml's names of the maps. Maps that lie side by side in one `Linear`
stay so: the pairs of all of them, and of all adapters, make one A and one B, whose blocks take in
alpha / R; rows of A that differ in their adapter differ in their scale, which is data. Drawn for
one layer's qkv, with a pair for q and v by adapter 0 and for v by adapter 1:

    A  q0 | R K        B        q0  v0  v1      scale  0 0 1
       v0 |               q     ##  .   .       ranks  2 R, R
       v1 |               k     .   .   .
                          v     .   ##  ##

In a stack of layers those without a pair, and ranks below the largest, are zeros.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from minfer_jax.model.config import ModelConfig, ModelError, listed
from minfer_jax.model.map_names import Parts, with_maps
from minfer_jax.model.params import Linear, Lora, Params, rescaled

EMBEDDING = "token_embd.weight"

Shape = tuple[int, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pair:
    """a [R, K] and b [N, R] of a map [N, K]; of the embedding [V, D] they are [V, R] and [D, R]."""

    a: Array
    b: Array

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Pairs that are switched on together, to be trained as a pytree.

    Attributes:
        pairs: by the full name of a weight, such as "blk.0.attn_q.weight".
        alpha: static; what a pair adds is multiplied by alpha / R. 0 stands for R, as in llama.cpp.
    """

    pairs: dict[str, Pair]
    alpha: float = field(default=0.0, metadata={"static": True})


def fresh(shapes: Mapping[str, Shape], rank: int, key: Array, *, alpha: float = 0.0) -> Adapter:
    """An adapter to be trained: it changes nothing yet.

    Args:
        shapes: [N, K] of each map to adapt, by name: see `lora_file.map_shapes`.
        rank: R.
        key: a key of jax.random.
        alpha: see `Adapter`.

    Returns:
        Pairs in float32. A is uniform in +-1 / sqrt(K) (He et al. 2015, as peft begins), B zero.

    Raises:
        ValueError: the rank is below 1, or above the smaller side of a map.
    """
    pairs = {}
    for one, (name, (n, k)) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        if not 1 <= rank <= min(n, k):
            raise ValueError(f"rank is {rank}, expected 1 to {min(n, k)} for {name} [{n}, {k}]")
        a, out = ((n, rank), k) if name == EMBEDDING else ((rank, k), n)
        bound = k**-0.5
        pairs[name] = Pair(
            a=jax.random.uniform(one, a, jnp.float32, -bound, bound),
            b=jnp.zeros((out, rank), jnp.float32),
        )
    return Adapter(pairs=pairs, alpha=alpha)


def with_lora(
    params: Params,
    cfg: ModelConfig,
    adapters: Sequence[Adapter],
    scales: Sequence[float | Array] | None = None,
) -> Params:
    """The weights with these adapters in place of those that they had.

    It can be traced, and differentiated with respect to pairs and scales.

    Args:
        params: weights, shared with what is returned.
        cfg: their configuration.
        adapters: in the order that `with_scales` knows them by.
        scales: of each; None for 1.

    Raises:
        ModelError: there are pairs that no map of the model takes, all of them named.
        ValueError: there are more or fewer scales than adapters.
    """
    placed: list[set[str]] = [set() for _ in adapters]

    def place(prefixes: Sequence[str], parts: Parts, p: Linear) -> Linear:
        lora = _side_by_side(adapters, placed, prefixes, parts, p.weight.shape)
        return dataclasses.replace(p, lora=lora)

    def place_single(parts: Parts, p: Linear) -> Linear:
        p = place([""], parts, p)
        return dataclasses.replace(p, lora=jax.tree.map(lambda leaf: leaf[0], p.lora))

    groups = []
    for number, stack in enumerate(params.groups):
        prefixes = [f"blk.{layer}." for layer in params.layers_of(number)]
        groups.append(with_maps(stack, cfg, lambda *of, prefixes=prefixes: place(prefixes, *of)))
    output = place_single({("output", cfg.n_vocab): 0}, params.output)
    embedding = _embedding(adapters, placed, cfg)
    _check_all_placed(adapters, placed)
    params = dataclasses.replace(params, groups=tuple(groups), output=output, embd_lora=embedding)
    return with_scales(params, [1.0] * len(adapters) if scales is None else scales)


def with_scales(params: Params, scales: Sequence[float | Array]) -> Params:
    """The weights with other scales of their adapters: data, so that nothing is compiled anew.

    Args:
        params: of `with_lora`.
        scales: one for each of its adapters, in their order.

    Raises:
        ValueError: there are more or fewer scales than adapters.
    """
    return rescaled(params, Lora, scales, "adapters")


def _side_by_side(
    adapters: Sequence[Adapter],
    placed: Sequence[set[str]],
    prefixes: Sequence[str],
    parts: Parts,
    shape: Shape,
) -> Lora | None:
    """The pairs of a Linear of each of some layers, as the head of this file draws them.

    Args:
        adapters: where they come from.
        placed: of each adapter, the names that were found a place; more are added.
        prefixes: of the names, one a layer.
        parts: what the Linear holds.
        shape: its own, of one layer.
    """
    n, k = shape
    blocks, ranks = [], []
    for adapter, names in zip(adapters, placed, strict=True):
        own = []
        for (part, rows), start in parts.items():
            of_layers = [f"{prefix}{part}.weight" for prefix in prefixes]
            found = {
                name: pair
                for name in of_layers
                if (pair := adapter.pairs.get(name)) is not None
                and _fits(pair, (r := pair.b.shape[-1], k), (rows, r))
            }
            if found:
                pairs = [found.get(name) for name in of_layers]
                own.append(_stacked(pairs, (n, k), start, adapter.alpha))
                names.update(found)
        ranks.append(sum(a.shape[1] for a, _ in own))
        blocks += own
    if not blocks:
        return None
    a = jnp.concatenate([a for a, _ in blocks], axis=1)
    b = jnp.concatenate([b for _, b in blocks], axis=2)
    return Lora(a=a, b=b, scale=jnp.ones(a.shape[:2], jnp.float32), ranks=tuple(ranks))


def _fits(pair: Pair, a: Shape, b: Shape) -> bool:
    """Whether the halves have these shapes; both have the rank, which is no less than 1."""
    return (pair.a.shape, pair.b.shape) == (a, b) and b[1] >= 1


def _stacked(
    pairs: Sequence[Pair | None], shape: Shape, start: int, alpha: float
) -> tuple[Float[Array, "L R K"], Float[Array, "L N R"]]:
    """Pairs of one name for each layer: the largest rank of them, at their rows of the Linear."""
    n, k = shape
    most = max(pair.rank for pair in pairs if pair is not None)
    a, b = [], []
    for pair in pairs:
        if pair is None:
            a.append(jnp.zeros((most, k), jnp.float32))
            b.append(jnp.zeros((n, most), jnp.float32))
            continue
        free = most - pair.rank
        a.append(jnp.pad(jnp.asarray(pair.a, jnp.float32), ((0, free), (0, 0))))
        rows = (start, n - start - pair.b.shape[0])
        b.append(jnp.pad(_times_alpha(pair, alpha), (rows, (0, free))))
    return jnp.stack(a), jnp.stack(b)


def _times_alpha(pair: Pair, alpha: float) -> Float[Array, "N R"]:
    factor = alpha / pair.rank if alpha else 1.0
    return jnp.asarray(pair.b, jnp.float32) * jnp.float32(factor)


def _embedding(
    adapters: Sequence[Adapter], placed: Sequence[set[str]], cfg: ModelConfig
) -> Lora | None:
    """The pairs of the embedding. Where the output is tied to it, they are not the output's."""
    found = [adapter.pairs.get(EMBEDDING) for adapter in adapters]
    found = [
        pair
        if pair is not None and _fits(pair, (cfg.n_vocab, r := pair.b.shape[-1]), (cfg.n_embd, r))
        else None
        for pair in found
    ]
    own = [(pair, adapter) for pair, adapter in zip(found, adapters, strict=True) if pair]
    if not own:
        return None
    for pair, names in zip(found, placed, strict=True):
        names.update(() if pair is None else (EMBEDDING,))
    a = jnp.concatenate([jnp.asarray(pair.a, jnp.float32) for pair, _ in own], axis=1)
    b = jnp.concatenate([_times_alpha(pair, adapter.alpha) for pair, adapter in own], axis=1)
    ranks = tuple(0 if pair is None else pair.rank for pair in found)
    return Lora(a=a, b=b, scale=jnp.ones(a.shape[1], jnp.float32), ranks=ranks)


def _check_all_placed(adapters: Sequence[Adapter], placed: Sequence[set[str]]) -> None:
    problems = []
    for adapter, names in zip(adapters, placed, strict=True):
        for name, pair in adapter.pairs.items():
            if name not in names:
                shapes = f"A {list(pair.a.shape)} and B {list(pair.b.shape)}"
                problems.append(f"{name}: the model has no map for {shapes}")
    if problems:
        raise ModelError(listed(problems))
