"""F32, F16, BF16: plain floats, kept as they are."""

import ml_dtypes
import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes


def _unpack(dtype: np.dtype):
    def unpack(blocks: np.ndarray) -> HostPlanes:
        """uint8 [rows, K, bytes a value] -> dense [rows, K, 1]."""
        return HostPlanes(dense=blocks.view(dtype))

    return unpack


F32 = Format(ggml_type=0, unpack=_unpack(np.dtype("<f4")))
F16 = Format(ggml_type=1, unpack=_unpack(np.dtype("<f2")))
BF16 = Format(ggml_type=30, unpack=_unpack(np.dtype(ml_dtypes.bfloat16)))
