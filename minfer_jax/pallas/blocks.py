"""Block sizes of the kernels: what was measured on a kind of device, or else a default.

blocks.json holds what `scripts/gpu_check.sh --tune` found:

    {"NVIDIA H200": {"matvec": {"Q4_K 4096x4096 rows 1": {"tiles": 2, "split": 8}}}}
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any, TypeVar

import jax

Config = TypeVar("Config")


@functools.cache
def table() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Device kind -> kernel -> case -> fields of its Config that differ from the default."""
    return json.loads(
        resources.files("minfer_jax.pallas").joinpath("blocks.json").read_text("utf-8")
    )


def chosen(kernel: str, case: str, default: Config) -> Config:
    """A kernel's Config on this process's device.

    Args:
        kernel: its file's name.
        case: what the best sizes depend on, as the kernel words it.
        default: by a rule of thumb; what the table says of the case replaces its fields.
    """
    known: dict[str, Any] = table().get(device_kind(), {}).get(kernel, {}).get(case, {})
    return dataclasses.replace(default, **known)  # pyright: ignore


def device_kind() -> str:
    """Such as "NVIDIA H200"; "" where there is no such device."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else ""
