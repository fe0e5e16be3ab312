"""A sample GGUF file with everything in it, and how tests check the refusal of a bad one."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from minfer_jax.gguf import GGUFError, open_gguf
from tests.helpers.gguf_builder import build_gguf, dense

RNG = np.random.default_rng(0)
METADATA = {
    "general.architecture": "llama",
    "u8": np.uint8(255),
    "i8": np.int8(-128),
    "u16": np.uint16(65535),
    "i16": np.int16(-32768),
    "u32": 4294967295,
    "i32": -2147483648,
    "f32": 0.1,
    "bool": True,
    "text": "naïve \n 東京",
    "u64": np.uint64(2**64 - 1),
    "i64": np.int64(-(2**63)),
    "f64": np.float64(0.1),
    "no strings yet": "",
    "bools": [True, False, True],
    "u8s": np.arange(7, dtype=np.uint8),
    "f32s": np.linspace(-1, 1, 5, dtype=np.float32),
    "f64s": np.linspace(-1, 1, 5),
    "i64s": np.array([-(2**63), 2**63 - 1]),
    "tokens": ["<s>", "", "▁the", "a\0b"],
    "empty": [],
    "nested": [[1, 2], ["a", "b"], [[0.5], []]],
}
# Shapes in numpy's order: Q8_0 has 34 bytes for 32 weights.
TENSORS = {
    "token_embd.weight": (8, (3, 64), RNG.bytes(3 * 2 * 34)),
    "norm": dense(np.arange(5, dtype=np.float32)),
    "experts": dense(RNG.standard_normal((2, 3, 4)).astype(np.float16)),
    "four": dense(np.arange(24, dtype=np.int8).reshape(2, 3, 1, 4)),
}
SAMPLE = build_gguf(METADATA, TENSORS)


def save(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path: Path) -> str:
    """The message with which a file is refused, less its path; form, time and memory checked."""
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable(), "one line, nothing unprintable"
    assert len(message) < 400 + len(str(path))
    assert seconds < 2
    assert peak < 10e6
    shown = str(path) if str(path).isprintable() else str(path).encode("unicode_escape").decode()
    assert message.startswith(f"{shown}: ")
    return message.removeprefix(f"{shown}: ")
