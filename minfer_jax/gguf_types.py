"""The literal tables behind the GGUF reader: tensor types, metadata value types, foreign formats.

Block sizes and bytes are those of `ggml/src/ggml-common.h`, type ids those of `ggml/include/ggml.h`
in llama.cpp.
"""

from typing import NamedTuple

import numpy as np


class GGMLType(NamedTuple):
    """How one tensor type is stored: rows of blocks, each block a fixed number of bytes.

    Attributes:
        name: ggml's name, in capitals: "Q4_K".
        block_size: weights in a block; the length of a row is a multiple of it.
        block_bytes: bytes in a block.
    """

    name: str
    block_size: int
    block_bytes: int

    def nbytes(self, weights: int) -> int:
        """Bytes of so many weights, which are whole blocks."""
        return weights // self.block_size * self.block_bytes


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}

TYPE_IDS = {kind.name: number for number, kind in GGML_TYPES.items()}

# Ids that files once used and that ggml no longer reads: name, and what replaces it.
REMOVED_TYPES: dict[int, tuple[str, str]] = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}

# Ids of the metadata value types; 8 and 9 have no fixed size, so they are not in NUMBER_DTYPES.
UINT32, STRING, ARRAY = 4, 8, 9

NUMBER_DTYPES: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# What people hand to a GGUF reader by mistake: first bytes, and what they tell.
_PICKLE = "a pickle (a PyTorch checkpoint): convert it to GGUF"
_BEFORE_GGUF = "in a ggml format from before GGUF: convert the original model again"
_WEB_PAGE = "a web page (a failed download?): fetch the file again"
FOREIGN_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (a wheel? a PyTorch checkpoint?): unpack or convert it"),
    (b"\x80\x02", _PICKLE),
    (b"\x80\x03", _PICKLE),
    (b"\x80\x04", _PICKLE),
    (b"\x80\x05", _PICKLE),
    (b"lmgg", _BEFORE_GGUF),
    (b"fmgg", _BEFORE_GGUF),
    (b"tjgg", _BEFORE_GGUF),
    (b"\x89HDF", "an HDF5 file (Keras): convert it to GGUF"),
    (b"\x1f\x8b", "gzip data: unpack it"),
    (b"BZh", "bzip2 data: unpack it"),
    (b"\xfd7zXZ", "xz data: unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd data: unpack it"),
    (b"<!", _WEB_PAGE),
    (b"<html", _WEB_PAGE),
    (b"{", "JSON text: a configuration, or the error message of a failed download"),
)


def foreign_format(head: bytes, size: int) -> str | None:
    """Says what a file that is not GGUF seems to be.

    Args:
        head: the first bytes of the file; 32 are enough.
        size: bytes in the whole file.

    Returns:
        What it seems to be and what to do about it, or None if nothing is recognised.
    """
    for first_bytes, meaning in FOREIGN_FORMATS:
        if head.startswith(first_bytes):
            return meaning
    # safetensors: [length of the JSON header, u64][the JSON header: {...}][data]
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        return "a safetensors file: convert it to GGUF"
    return None
