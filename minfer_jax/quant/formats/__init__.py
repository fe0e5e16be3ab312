"""GGUF types that stay packed in memory, one file each. A new type is a file and a row here."""

from minfer_jax.quant.formats import (
    floats,
    iq1_m,
    iq1_s,
    iq2_s,
    iq2_xs,
    iq2_xxs,
    iq3_s,
    iq3_xxs,
    iq4_nl,
    iq4_xs,
    mxfp4,
    nvfp4,
    q1_0,
    q2_0,
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
    tq1_0,
    tq2_0,
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
        q1_0.FORMAT,
        q2_0.FORMAT,
        tq1_0.FORMAT,
        tq2_0.FORMAT,
        iq1_s.FORMAT,
        iq1_m.FORMAT,
        iq2_xxs.FORMAT,
        iq2_xs.FORMAT,
        iq2_s.FORMAT,
        iq3_xxs.FORMAT,
        iq3_s.FORMAT,
        iq4_nl.FORMAT,
        iq4_xs.FORMAT,
        mxfp4.FORMAT,
        nvfp4.FORMAT,
    )
}

__all__ = ["FORMATS", "Format", "HostPlanes"]
