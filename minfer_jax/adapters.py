"""What is added to a model's weights from files: LoRA adapters and control vectors, with scales."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from minfer_jax import sources
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import read_model_config
from minfer_jax.model.lora import with_lora, with_scales
from minfer_jax.model.lora_file import read_lora
from minfer_jax.model.params import Params
from minfer_jax.model.steering import with_control_scales, with_control_vectors
from minfer_jax.model.steering_file import read_control_vector

Scales = Mapping[str, float] | Mapping[Path, float] | Mapping[str | Path, float]
"""A scale for each file, by its path or another reference."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A file, its sha256, and how much it counts."""

    file: GGUFFile
    digest: str
    scale: float


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What was asked for, in its order.

    Attributes:
        lora, control_vectors: by the names that they were asked for with.
        control_layers: the first and the last layer that control vectors count in; None for all.
    """

    lora: dict[str, Scaled]
    control_vectors: dict[str, Scaled]
    control_layers: tuple[int, int] | None = None


NONE = Adapters(lora={}, control_vectors={})


def opened(
    lora: Scales, control_vectors: Scales, control_layers: tuple[int, int] | None
) -> Adapters:
    """Open the files.

    Args:
        lora, control_vectors, control_layers: as for `language_model.load`.

    Raises:
        ValueError: a scale is no finite number; a range without vectors; a reference leads nowhere
            (SourceError), or a file is broken (GGUFError).
    """
    if control_layers is not None and not control_vectors:
        raise ValueError("a range of layers is given, but no control vector")

    def files(scales: Scales) -> dict[str, Scaled]:
        _check(scales)
        found = {}
        for name, scale in scales.items():
            file = open_gguf(sources.resolve(name))
            found[str(name)] = Scaled(file=file, digest=file.sha256(), scale=float(scale))
        return found

    return Adapters(
        lora=files(lora), control_vectors=files(control_vectors), control_layers=control_layers
    )


def checked(added: Adapters, base: GGUFFile) -> Callable[[Params, ModelConfig], Params]:
    """Read the files, before the model's weights, which take longer.

    Args:
        added: the files.
        base: of the model.

    Returns:
        What adds them to the weights of a configuration. Without any it changes nothing.

    Raises:
        ValueError: a file does not fit the model (ModelError); a range is none of its layers.
    """
    adapters = [read_lora(a.file, base) for a in added.lora.values()]
    vectors, layers = [], added.control_layers
    if added.control_vectors:
        cfg = read_model_config(base)
        found = [read_control_vector(a.file, cfg) for a in added.control_vectors.values()]
        vectors = [jnp.asarray(vector) for vector in found]
        last = cfg.n_layer - 1
        if layers is not None and not 1 <= layers[0] <= layers[1] <= last:
            raise ValueError(
                f"layers {layers[0]} to {layers[1]} are asked for, expected some of 1-{last}: "
                "a control vector has nothing for layer 0"
            )

    def add(params: Params, cfg: ModelConfig) -> Params:
        if not adapters and not vectors:
            return params
        if adapters:
            params = with_lora(params, cfg, adapters)
        if vectors:
            params = with_control_vectors(params, vectors, layers=layers)
        return with_own_scales(added, params)

    return add


def with_own_scales(added: Adapters, params: Params) -> Params:
    """Weights that these were added to, with the scales as they are now."""
    params = with_scales(params, [a.scale for a in added.lora.values()])
    return with_control_scales(params, [a.scale for a in added.control_vectors.values()])


def rescaled(added: Adapters, lora: Scales, control_vectors: Scales) -> Adapters:
    """The same with other scales, by name; those that are not named stay.

    Raises:
        ValueError: there is no such adapter, or a scale is no finite number.
    """

    def new(files: dict[str, Scaled], scales: Scales, kind: str) -> dict[str, Scaled]:
        _check(scales)
        by_name = {str(name): float(scale) for name, scale in scales.items()}
        if unknown := [name for name in by_name if name not in files]:
            known = ", ".join(files) or "none"
            raise ValueError(f"{unknown[0]} is no {kind} of this model, which has: {known}")
        return {
            name: dataclasses.replace(of, scale=by_name.get(name, of.scale))
            for name, of in files.items()
        }

    return dataclasses.replace(
        added,
        lora=new(added.lora, lora, "LoRA adapter"),
        control_vectors=new(added.control_vectors, control_vectors, "control vector"),
    )


def identity(added: Adapters) -> str:
    """What tells weights with these from those of the model alone, which have an empty one."""
    layers = "" if added.control_layers is None else " layers {}-{}".format(*added.control_layers)
    parts = [f" + lora {a.digest} x {a.scale!r}" for a in added.lora.values()]
    parts += [
        f" + control vector {a.digest} x {a.scale!r}{layers}"
        for a in added.control_vectors.values()
    ]
    return "".join(parts)


def _check(scales: Scales) -> None:
    for name, scale in scales.items():
        if (
            isinstance(scale, bool)
            or not isinstance(scale, int | float)
            or not math.isfinite(scale)
        ):
            raise ValueError(f"{name}: the scale is {scale!r}, expected a finite number")
