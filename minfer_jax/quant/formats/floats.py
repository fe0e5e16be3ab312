"""F32, F16, BF16: plain floats, kept as they are."""

import ml_dtypes
import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes


def _unpack(dtype: np.dtype):
    def unpack(blocks: np.ndarray) -> HostPlanes:
        """uint8 [rows, K, bytes a value] -> dense [rows, K]."""
        return HostPlanes(dense=np.ascontiguousarray(blocks).view(dtype)[..., 0])

    return unpack


F32 = Format(name="F32", ggml_type=0, block=1, block_bytes=4, unpack=_unpack(np.dtype("<f4")))
F16 = Format(name="F16", ggml_type=1, block=1, block_bytes=2, unpack=_unpack(np.dtype("<f2")))
BF16 = Format(
    name="BF16", ggml_type=30, block=1, block_bytes=2, unpack=_unpack(np.dtype(ml_dtypes.bfloat16))
)
