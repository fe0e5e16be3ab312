"""From a GGUF file to ModelConfig and Params.

Tensors become Linear and norm arrays by ggml's names; every missing or mis-shaped one is reported
at once. Weights are packed as they are read, and the file's pages are given back, so that the peak
is one copy of the file plus the largest plane of a stack.
"""

import dataclasses
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from minfer_jax import memory
from minfer_jax.gguf import GGUFFile
from minfer_jax.model import block_tensors, kv_state, maps, registry, rope
from minfer_jax.model import precision as precisions
from minfer_jax.model.archs.base import Arch, original_context, read_config
from minfer_jax.model.config import ModelConfig, ModelError, listed
from minfer_jax.model.keys import Keys
from minfer_jax.model.params import Linear, Params
from minfer_jax.model.tensors import Tensors
from minfer_jax.quant.formats import FORMATS
from minfer_jax.quant.prologue import LayerNorm, Norm, RmsNorm

log = logging.getLogger("minfer_jax")

# In files but not in the computation: calibration of activations, a classifier's head (llama.cpp
# reads neither).
UNUSED_SUFFIXES = (".input_scale",)
UNUSED = frozenset({"cls.output.weight", "cls.output.bias"})
# What divides the frequencies of RoPE: of any context, of one as long as the original, of longer.
ROPE_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


def load_model(
    file: GGUFFile,
    *,
    precision: str = "default",
    cache_type: str | None = None,
    kernels: str = "auto",
    on_bytes: Callable[[int], None] = lambda n: None,
) -> tuple[ModelConfig, Params]:
    """Read configuration and weights.

    Args:
        file: an open GGUF file.
        precision: "highest" or "default".
        cache_type: what keys and values are rounded to, a key of `quant.cache.CACHE_TYPES`, or
            None for what the precision implies.
        kernels: which implementation of products and attention, one of `quant.kernels.CHOICES`.
        on_bytes: called with the size of each weight once it is read, for a progress bar.

    Raises:
        ModelError: the architecture is not supported, or keys or tensors are missing, mis-shaped or
            of a type that cannot be read, or heads of a size that the cache type does not take. The
            message begins with the file's path.
        ValueError: there is no such precision, cache type or choice of kernels.
    """
    cfg = read_model_config(file, precision, cache_type, kernels)
    try:
        params = _load_params(Tensors(file, on_bytes), cfg, registry.find(cfg.arch))
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    memory.trim()
    return cfg, params


def read_model_config(
    file: GGUFFile,
    precision: str = "default",
    cache_type: str | None = None,
    kernels: str = "auto",
) -> ModelConfig:
    """The configuration alone, without reading a weight. Arguments, errors as for `load_model`."""
    arithmetic = precisions.arithmetic(precision, plain=_has_plain_layers(file), choice=kernels)
    cache_dtype = precisions.cache_dtype(cache_type, precision)
    try:
        arch = registry.find(file.architecture)
        keys = Keys(file.metadata, arch.name)
        cfg = dataclasses.replace(
            _with_long_rope(file, keys, read_config(arch, keys, _n_vocab(file))),
            precision=precision,
            arithmetic=arithmetic,
            cache_dtype=cache_dtype,
            # On a GPU each turn of a loop whose number is data waits for the host.
            unrolled=jax.default_backend() != "cpu",
        )
        kv_state.row_bytes(cfg)  # refuses a cache that does not take these heads
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    return cfg


def _has_plain_layers(file: GGUFFile) -> bool:
    """Whether no weight of a layer is quantised."""
    types = {info.ggml_type for name, info in file.tensors.items() if name.startswith("blk.")}
    return not any(FORMATS[t].widths for t in types if t in FORMATS)


def _n_vocab(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        found = "no such tensor" if info is None else f"shape {list(info.shape)}"
        raise ModelError(f"token_embd.weight: found {found}, expected [vocabulary, width]")
    return info.shape[0]


def _load_params(t: Tensors, cfg: ModelConfig, arch: Arch) -> Params:
    tied = not t.has("output.weight")
    pairs = cfg.ropes[0].dims // 2

    # First everything is checked, so that a broken file is refused at once and with all that is
    # wrong.
    t.check("token_embd.weight", (cfg.n_vocab, cfg.n_embd))
    block_tensors.check_norm(t, "output_norm", (cfg.n_embd,), arch)
    if tied:
        maps.check_extras(t, "output", bias=(cfg.n_vocab,))
    else:
        maps.check(t, "output", cfg.n_vocab, cfg.n_embd)
    for factors in ROPE_FACTORS:
        if t.has(f"{factors}.weight"):
            t.check(f"{factors}.weight", (pairs,))
    for i in range(cfg.n_layer):
        block_tensors.check(t, f"blk.{i}.", cfg, arch)
    if t.problems:
        raise ModelError(listed(t.problems))
    _warn_of_unused(t)

    frequencies = _rope_frequencies(t, cfg)
    groups = _groups(t, cfg)
    token_embd = t.weights([["token_embd.weight"]], stacked=False)
    head = token_embd if tied else t.weights([["output.weight"]], stacked=False)
    extras = {e: jnp.asarray(t.vector(f"output.{e}")) for e in maps.EXTRAS if t.has(f"output.{e}")}
    return Params(
        token_embd=token_embd,
        groups=tuple(block_tensors.load(t, layers, cfg, arch) for layers in groups),
        output_norm=_output_norm(t, cfg, arch),
        output=Linear(weight=head, scale=extras.get("scale"), bias=extras.get("bias")),
        rope=frequencies,
        order=_order(groups),
    )


def _with_long_rope(file: GGUFFile, keys: Keys, cfg: ModelConfig) -> ModelConfig:
    """Where RoPE has factors for two lengths, one more rotation for the longer.

    As llama.cpp (get_rope_factors): the context as a whole decides, not how full it is.
    """
    if "rope_freqs.weight" in file.tensors or "rope_factors_long.weight" not in file.tensors:
        return cfg
    longer = (original_context(keys, cfg.n_ctx_train), len(cfg.ropes))
    return dataclasses.replace(cfg, ropes=(*cfg.ropes, cfg.ropes[0]), long_rope=longer)


def _rope_frequencies(t: Tensors, cfg: ModelConfig) -> tuple[Array, ...]:
    """The frequencies of each of cfg.ropes.

    Raises:
        ModelError: factors that divide them are not above 0, or they are none that float32 holds.
    """
    any_length, short, long = (
        t.vector(f"{name}.weight") if t.has(f"{name}.weight") else None for name in ROPE_FACTORS
    )
    for name, own in zip(ROPE_FACTORS, (any_length, short, long), strict=True):
        if own is not None and not np.all(np.isfinite(own) & (own > 0)):
            raise ModelError(
                f"{name}.weight holds {own.min():.4g}, expected finite factors above 0"
            )
    factors = [short if any_length is None else any_length] * len(cfg.ropes)
    if cfg.long_rope is not None:
        factors[cfg.long_rope[1]] = long
    with np.errstate(over="ignore"):
        found = [rope.frequencies(s, own) for s, own in zip(cfg.ropes, factors, strict=True)]
    for spec, values in zip(cfg.ropes, found, strict=True):
        if not np.isfinite(values).all():
            raise ModelError(
                f"RoPE with base {spec.base:.4g}, {spec.dims} dimensions and a stretch of "
                f"{1.0 / spec.freq_scale:.4g} turns by more than float32 holds"
            )
    return tuple(map(jnp.asarray, found))


def _output_norm(t: Tensors, cfg: ModelConfig, arch: Arch) -> Norm:
    weight = jnp.asarray(t.vector("output_norm.weight"))
    if not arch.layer_norm:
        return RmsNorm(weight=weight, eps=cfg.norm_eps)
    bias = jnp.asarray(t.vector("output_norm.bias")) if t.has("output_norm.bias") else None
    return LayerNorm(weight=weight, bias=bias, eps=cfg.norm_eps)


def _groups(t: Tensors, cfg: ModelConfig) -> list[list[int]]:
    """Layers that are alike, in the order in which the first of each group appears.

    Shapes may differ: the width of experts is whatever the layer's own tensors have.
    """
    groups: dict[object, list[int]] = {}
    for i, spec in enumerate(cfg.layers):
        prefix = f"blk.{i}."
        tensors = {
            (name.removeprefix(prefix), info.ggml_type, info.shape)
            for name, info in t.by_layer.get(prefix, ())
            if name in t.used
        }
        groups.setdefault((spec, frozenset(tensors)), []).append(i)
    return list(groups.values())


def _order(groups: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """(group, index in the group) of every layer."""
    places = {i: (g, j) for g, layers in enumerate(groups) for j, i in enumerate(layers)}
    return tuple(places[i] for i in range(len(places)))


def _warn_of_unused(t: Tensors) -> None:
    unused = [
        name
        for name in t.file.tensors
        if name not in t.used and name not in UNUSED and not name.endswith(UNUSED_SUFFIXES)
    ]
    if unused:
        log.warning(
            "%s: %d tensors are not used by architecture %s: %s%s",
            t.file.path,
            len(unused),
            t.file.architecture,
            ", ".join(unused[:5]),
            ", ..." if len(unused) > 5 else "",
        )
