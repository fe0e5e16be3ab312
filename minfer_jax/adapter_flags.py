"""The flags that add LoRA adapters and control vectors to a model."""

import os
import re
from collections.abc import Sequence

from minfer_jax.flag_table import Flag
from minfer_jax.usage import UsageError

ADAPTER_FLAGS = (
    Flag(name="lora", kind=list, text="FILE or FILE:SCALE; may be repeated"),
    Flag(
        name="control-vector",
        kind=list,
        text="FILE or FILE:SCALE; may be repeated",
    ),
    Flag(
        name="control-vector-layer-range",
        kind=str,
        text="A-B, where those count; the first layer is 0",
    ),
)


def scales(flag: str, values: Sequence[str]) -> dict[str, float]:
    """What was asked for with FILE or FILE:SCALE: the scale of each file, 1 where none is given.

    Args:
        flag: its name.
        values: as given. A file that is there with its colon is meant as a whole.

    Raises:
        UsageError: a file is given twice, or without its name; the scale is no finite number.
    """
    found: dict[str, float] = {}
    for value in values:
        name, scale = _split(value)
        if not name or scale in (float("inf"), float("-inf")) or scale != scale:
            raise UsageError(f"--{flag} is {value!r}, expected FILE or FILE:SCALE")
        if name in found:
            raise UsageError(f"--{flag} is given twice for {name}: add the scales up")
        found[name] = scale
    return found


def _split(value: str) -> tuple[str, float]:
    name, colon, scale = value.rpartition(":")
    if not colon or os.path.exists(value):
        return value, 1.0
    try:
        return name, float(scale)
    except ValueError:
        return value, 1.0  # a reference such as hf:ORG/REPO


def control_layers(value: str | None) -> tuple[int, int] | None:
    """A range of layers, such as "8-20": the first and the last.

    Raises:
        UsageError: it is none.
    """
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", value)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(f"--control-vector-layer-range is {value!r}, expected such as 8-20")
    return int(match[1]), int(match[2])
