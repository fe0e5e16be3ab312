"""Builds GGUF byte strings for tests, by plain packing and independently of the reader under test.

    data = build_gguf(
        {"general.architecture": "llama", "llama.block_count": 2, "scores": [0.0, -1.0]},
        {"token_embd.weight": dense(weights), "blk.0.attn_q.weight": (8, (64, 64), q8_0_bytes)},
    )
    (tmp_path / "tiny.gguf").write_bytes(data)

The Python type of a metadata value chooses its GGUF type: bool, int (uint32; int32 below 0, uint64
above), float (float32), str or bytes (string), a numpy scalar or array (its dtype), a list (what
its first item is; ints are int32, floats float32; of lists or arrays a nested array; empty int32).

Every field has a label, and `patches` replaces fields by label, which is how a test breaks a file:
`patches={"kv/scores/count": 1 << 60, "tensor/token_embd.weight/type": 99}`; `fields` lists them.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensor = tuple[int, Sequence[int], bytes]  # ggml type, shape in numpy's order, data

_VALUE_TYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}
_STRING, _ARRAY = 8, 9
_TENSOR_TYPES = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26}


def dense(array: np.ndarray) -> Tensor:
    """An unquantised tensor: float32, float16 or an integer type."""
    return _TENSOR_TYPES[array.dtype.name], array.shape, array.tobytes()


def build_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
    patches: Mapping[str, int | bytes] | None = None,
) -> bytes:
    """Packs a GGUF file.

    Args:
        metadata: key to value; an alignment other than 32 is added as `general.alignment`.
        tensors: name to (ggml type, shape in numpy's order, data).
        version: 2 or 3.
        alignment: of the tensor data, in bytes.
        patches: field label to what takes its place: bytes of any length, or an integer (which is
            taken modulo the field's width).
    """
    parts = fields(metadata, tensors, version=version, alignment=alignment)
    for label, value in (patches or {}).items():
        if isinstance(value, int):
            width = len(parts[label])
            value = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif label not in parts:
            raise KeyError(label)
        parts[label] = value
    return b"".join(parts.values())


def build_split(
    stem: str,
    metadata: Mapping[str, Any],
    parts: Sequence[Mapping[str, Tensor]],
    *,
    patches: Mapping[int, Mapping[str, int | bytes]] | None = None,
) -> dict[str, bytes]:
    """Packs a split model: file name to bytes, one file for each mapping of tensors in `parts`."""
    files = {}
    for no, tensors in enumerate(parts):
        split = {
            "split.no": np.uint16(no),
            "split.count": np.uint16(len(parts)),
            "split.tensors.count": np.int32(sum(map(len, parts))),
        }
        files[f"{stem}-{no + 1:05d}-of-{len(parts):05d}.gguf"] = build_gguf(
            {**metadata, **split} if no == 0 else split, tensors, patches=(patches or {}).get(no)
        )
    return files


def fields(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> dict[str, bytes]:
    """All fields of the file that `build_gguf` would pack, in order, by label."""
    if alignment != 32:
        metadata = {"general.alignment": alignment, **metadata}
    out = {
        "magic": b"GGUF",
        "version": struct.pack("<I", version),
        "n_tensors": struct.pack("<Q", len(tensors)),
        "n_keys": struct.pack("<Q", len(metadata)),
    }
    for key, value in metadata.items():
        _put_string(out, f"kv/{key}/name", key)
        _put_value(out, f"kv/{key}", value)

    offset = 0
    for name, (ggml_type, shape, data) in tensors.items():
        label = f"tensor/{name}"
        _put_string(out, f"{label}/name", name)
        out[f"{label}/n_dims"] = struct.pack("<I", len(shape))
        for i, dim in enumerate(reversed(shape)):
            out[f"{label}/dim{i}"] = struct.pack("<q", dim)
        out[f"{label}/type"] = struct.pack("<I", ggml_type)
        out[f"{label}/offset"] = struct.pack("<Q", offset)
        offset += len(data) + -len(data) % alignment
    if tensors:
        out["padding"] = bytes(-sum(map(len, out.values())) % alignment)
    for name, (_, _, data) in tensors.items():
        out[f"data/{name}"] = data
        out[f"data/{name}/padding"] = bytes(-len(data) % alignment)
    return out


def _put_string(out: dict[str, bytes], label: str, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    out[f"{label}/length"] = struct.pack("<Q", len(data))
    out[label] = data


def _put_value(out: dict[str, bytes], label: str, value: Any, *, inner: bool = False) -> None:
    """Adds type and value; of an item of an array (`inner`) only the value."""
    if not inner:
        out[f"{label}/type"] = struct.pack("<I", _value_type(value))
    if isinstance(value, str | bytes):
        _put_string(out, f"{label}/value", value)
    elif not isinstance(value, list | np.ndarray):
        out[f"{label}/value"] = _little_endian(_numbers(value))
    elif isinstance(value, np.ndarray) or not value or isinstance(value[0], int | float):
        items = _numbers(value)
        out[f"{label}/item_type"] = struct.pack("<I", _VALUE_TYPES[items.dtype.name])
        out[f"{label}/count"] = struct.pack("<Q", len(items))
        out[f"{label}/items"] = _little_endian(items)
    else:
        out[f"{label}/item_type"] = struct.pack("<I", _value_type(value[0]))
        out[f"{label}/count"] = struct.pack("<Q", len(value))
        for i, item in enumerate(value):
            _put_value(out, f"{label}/{i}", item, inner=True)


def _value_type(value: Any) -> int:
    if isinstance(value, str | bytes):
        return _STRING
    if isinstance(value, list | np.ndarray):
        return _ARRAY
    return _VALUE_TYPES[_numbers(value).dtype.name]


def _numbers(value: Any) -> np.ndarray:
    """The numpy form of a number, a list of numbers or an array."""
    if isinstance(value, np.generic | np.ndarray):
        return np.asarray(value)
    first = next(iter(value), 0) if isinstance(value, list) else value
    if isinstance(first, bool):
        return np.array(value, np.bool_)
    if isinstance(first, float):
        return np.array(value, np.float32)
    if isinstance(value, list) or value < 0:
        return np.array(value, np.int32)
    return np.array(value, np.uint32 if value < 1 << 32 else np.uint64)


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
