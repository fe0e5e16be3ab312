"""GGUF types that stay packed in memory, one file each. A new type is a file and a row here."""

from minfer_jax.quant.formats import (
    floats,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
)
from minfer_jax.quant.formats.base import Format, HostPlanes

FORMATS: dict[int, Format] = {
    0: floats.F32,
    1: floats.F16,
    2: q4_0.FORMAT,
    3: q4_1.FORMAT,
    6: q5_0.FORMAT,
    7: q5_1.FORMAT,
    8: q8_0.FORMAT,
    10: q2_k.FORMAT,
    11: q3_k.FORMAT,
    12: q4_k.FORMAT,
    13: q5_k.FORMAT,
    14: q6_k.FORMAT,
    30: floats.BF16,
}

__all__ = ["FORMATS", "Format", "HostPlanes"]
