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
    fmt.ggml_type: fmt
    for fmt in (
        floats.F32,
        floats.F16,
        floats.BF16,
        q4_0.FORMAT,
        q4_1.FORMAT,
        q5_0.FORMAT,
        q5_1.FORMAT,
        q8_0.FORMAT,
        q2_k.FORMAT,
        q3_k.FORMAT,
        q4_k.FORMAT,
        q5_k.FORMAT,
        q6_k.FORMAT,
    )
}

__all__ = ["FORMATS", "Format", "HostPlanes"]
