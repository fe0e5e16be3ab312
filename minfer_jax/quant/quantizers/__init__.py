"""Floats to GGUF blocks and back, in numpy. A new type is a function and a row here."""

from collections.abc import Callable
from functools import partial

import gguf
import ml_dtypes
import numpy as np

from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.quant.quantizers import code_book, signed, with_minimum

__all__ = ["QUANTIZERS", "can_dequantize", "dequantize", "largest", "quantize"]


def _by_gguf_py(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return partial(gguf.quants.quantize, qtype=gguf.GGMLQuantizationType[name])


# float32 [blocks, weights of a block] -> uint8 [blocks, bytes of a block]
QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda x: x.view(np.uint8),
    "F16": lambda x: x.astype("<f2").view(np.uint8),
    "BF16": lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint8),
    "Q4_0": _by_gguf_py("Q4_0"),
    "Q4_1": _by_gguf_py("Q4_1"),
    "Q5_0": _by_gguf_py("Q5_0"),
    "Q5_1": _by_gguf_py("Q5_1"),
    "Q8_0": _by_gguf_py("Q8_0"),
    "Q2_K": with_minimum.q2_k,
    "Q3_K": signed.q3_k,
    "Q4_K": with_minimum.q4_k,
    "Q5_K": with_minimum.q5_k,
    "Q6_K": signed.q6_k,
    "IQ4_NL": code_book.iq4_nl,
    "IQ4_XS": code_book.iq4_xs,
    "MXFP4": _by_gguf_py("MXFP4"),
    "TQ1_0": _by_gguf_py("TQ1_0"),
    "TQ2_0": _by_gguf_py("TQ2_0"),
}


def quantize(x: np.ndarray, name: str) -> np.ndarray:
    """Quantises weights to the blocks of a GGUF type.

    Args:
        x: float32, of any shape, none beyond `largest(name)`; its size is a multiple of the block.
        name: a key of QUANTIZERS.

    Returns:
        uint8, flat: the blocks as they lie in a file.
    """
    with np.errstate(all="ignore"):  # of gguf-py, in blocks whose scale is 0 in f16
        blocks = QUANTIZERS[name](x.reshape(-1, GGML_TYPES[TYPE_IDS[name]].block_size))
    return blocks.reshape(-1)


def largest(name: str) -> float:
    """The largest weight that a type holds: scales are f16 where it has any."""
    return {"F32": 3.4028235e38, "BF16": 3.3895314e38}.get(name, 65504.0)


def can_dequantize(ggml_type: int) -> bool:
    """Whether `dequantize` reads a type."""
    return GGML_TYPES[ggml_type].name in ("F32", "F16", "BF16") or (
        ggml_type in gguf.GGMLQuantizationType.__members__.values()
        and gguf.GGMLQuantizationType(ggml_type) in gguf.quants._type_traits
    )


def dequantize(raw: np.ndarray, ggml_type: int) -> np.ndarray:
    """The weights of blocks.

    Args:
        raw: uint8, flat: whole blocks, as they lie in a file.
        ggml_type: a type for which `can_dequantize` holds.

    Returns:
        float32, flat.
    """
    if GGML_TYPES[ggml_type].name == "BF16":
        return raw.view(ml_dtypes.bfloat16).astype(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type))
