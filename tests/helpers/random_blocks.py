"""Random blocks of every quantised type, and what they stand for by another implementation."""

import gguf
import numpy as np

from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS

# Where the float16 scales of a block lie, and what to make them, so that random blocks give weights
# around zero: weight = d q + m, or d scale q - dmin minimum. (Layouts: ggml-common.h.)
BLOCK_SCALES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q8_0": {0: 1.0},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "Q1_0": {0: 1.0},
    "Q2_0": {0: 1.0},
    "TQ1_0": {52: 1.0},
    "TQ2_0": {64: 1.0},
    "IQ1_S": {0: 1.0},
    "IQ2_XXS": {0: 1.0},
    "IQ2_XS": {0: 1.0},
    "IQ2_S": {0: 1.0},
    "IQ3_XXS": {0: 1.0},
    "IQ3_S": {0: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
}
OTHER_SCALES = ("IQ1_M", "MXFP4", "NVFP4")  # not float16 in one place


def put_scales(blocks: np.ndarray, kind: str, scales: np.ndarray) -> None:
    """Write the scales of blocks, uint8 [n, block_bytes], in place; as near as the type allows."""
    if kind == "MXFP4":  # 2**(e - 128)
        blocks[:, 0] = np.clip(np.round(np.log2(np.abs(scales))) + 128, 2, 254)
    elif kind == "NVFP4":  # with all fractions: 2**(e - 8) (1 + f / 8)
        exponents = np.clip(np.round(np.log2(np.abs(scales))) + 8, 0, 14).astype(np.uint8)
        blocks[:, :4] = exponents[:, None] << np.uint8(3) | blocks[:, :4] & np.uint8(7)
    elif kind == "IQ1_M":  # four bits of the float16 in each of four words
        bits = scales.astype(np.float16).view(np.uint16)
        for i in range(4):
            part = (bits >> (4 * i) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & np.uint8(15) | part << np.uint8(4)
    else:
        for at, factor in BLOCK_SCALES[kind].items():
            values = (scales * factor).astype(np.float16)
            blocks[:, at : at + 2] = values[:, None].view(np.uint8)


def random_blocks(
    kind: str, shape: tuple[int, int], rng: np.random.Generator, std: float = 1.0
) -> np.ndarray:
    """Random blocks of a quantised type, with finite scales.

    Args:
        kind: ggml's name of the type.
        shape: of the weight.
        rng: source of the blocks.
        std: standard deviation of the weights, roughly.

    Returns:
        uint8 [rows, bytes a row], as in a file.
    """
    _, block, size = GGML_TYPES[TYPE_IDS[kind]]
    n = shape[0] * shape[1] // block
    blocks = np.frombuffer(rng.bytes(n * size), np.uint8).reshape(n, size).copy()
    put_scales(blocks, kind, np.full(n, 1.0))
    unit = dequantized(blocks, kind).std()
    put_scales(blocks, kind, std / unit * rng.uniform(0.8, 1.2, n))
    return blocks.reshape(shape[0], -1)


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """Float32 [rows, K] of uint8 [rows, bytes a row], as gguf-py has it.

    Two types it does not know. They are written out, and checked against llama.cpp in test_formats.
    """
    if kind not in ("Q1_0", "Q2_0"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    blocks = raw.reshape(len(raw), -1, 18)
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    width = int(kind[1])
    fields = blocks[..., 2:, None] >> np.arange(0, 8, width, dtype=np.uint8)
    q = (fields & np.uint8(2**width - 1)).astype(np.float32).reshape(*blocks.shape[:2], -1)
    values = 2 * q - 1 if kind == "Q1_0" else q - 1
    return (d * values).reshape(len(raw), -1)
