"""What the GGUF reader refuses: files that are not GGUF, damaged or hostile ones."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax import gguf_header
from minfer_jax.gguf import GGUFError, open_gguf
from minfer_jax.gguf_types import FOREIGN_FORMATS
from tests.helpers.gguf_builder import build_gguf, fields
from tests.helpers.gguf_samples import METADATA, SAMPLE, TENSORS, refusal, save

# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_bytes", "meaning"), FOREIGN_FORMATS)
def test_foreign_files_are_recognised(tmp_path, first_bytes, meaning):
    message = refusal(save(tmp_path, first_bytes + bytes(100)))
    assert message.startswith(f"not a GGUF file: it begins with {first_bytes[:4]!r}"[:-1])
    assert message.endswith(f"it seems to be {meaning}")


def test_safetensors_and_unknown_files(tmp_path):
    data = struct.pack("<Q", 20) + b'{"__metadata__":{}} ' + bytes(50)
    assert "a safetensors file" in refusal(save(tmp_path, data))
    assert "seems" not in refusal(save(tmp_path, b"\x01\x02\x03\x04" * 20))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    assert "git lfs pull" in refusal(save(tmp_path, pointer))


def test_paths_that_are_not_regular_files(tmp_path):
    assert refusal(tmp_path).startswith("is a directory; expected a GGUF file")
    assert refusal(tmp_path / "absent").startswith("no such file")
    assert refusal(tmp_path / "a\nb\udcff").startswith("no such file")
    assert "null byte" in refusal(tmp_path / "a\0b")
    assert "is empty (0 bytes)" in refusal(save(tmp_path, b""))
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "fifo")
    assert "is a pipe, socket or device" in refusal(tmp_path / "fifo")
    assert "is a pipe, socket or device" in refusal(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (1, "GGUF version 1; expected version 2 or 3, little-endian"),
        (0, "GGUF version 0; expected"),
        (4, "GGUF version 4; expected"),
        (0x03000000, "big-endian GGUF (version 3); expected"),
        (0x02000000, "big-endian GGUF (version 2); expected"),
    ],
)
def test_versions(tmp_path, version, problem):
    path = save(tmp_path, build_gguf(METADATA, TENSORS, patches={"version": version}))
    assert refusal(path).startswith(problem)


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("patches", "problem"),
    [
        ({"n_tensors": HUGE}, f"header: claims {HUGE} tensors of at least 24 bytes each, but only"),
        ({"n_tensors": -1}, f"header: claims {2**64 - 1} tensors"),
        ({"n_keys": HUGE}, f"header: claims {HUGE} metadata keys of at least 14 bytes each"),
        ({"kv/u8/name": b"i8"}, "metadata key 'i8': is there twice"),
        ({"kv/u8/name": b"", "kv/u8/name/length": 0}, "metadata key 2 of 22: its name is empty"),
        ({"kv/u8/name/length": HUGE}, f"metadata key 2 of 22: needs {HUGE} bytes at offset"),
        ({"kv/u8/type": 13}, "metadata key 'u8': has value type 13, expected 0 to 12"),
        ({"kv/u8/name": b"\n\xff", "kv/u8/type": 77}, r"metadata key '\n\udcff': has value type"),
        ({"kv/text/value/length": -1}, f"metadata key 'text': needs {2**64 - 1} bytes"),
        (
            {"kv/f32s/item_type": 99},
            "metadata key 'f32s': has array item type 99, expected 0 to 12",
        ),
        ({"kv/f32s/count": HUGE}, f"key 'f32s': claims {HUGE} float32 items of at least 4 bytes"),
        ({"kv/tokens/count": HUGE}, f"key 'tokens': claims {HUGE} strings of at least 8 bytes"),
        ({"kv/tokens/2/value/length": HUGE}, f"metadata key 'tokens': needs {HUGE} bytes"),
        ({"kv/nested/count": HUGE}, f"key 'nested': claims {HUGE} arrays of at least 12 bytes"),
        ({"tensor/norm/name": b"four"}, "tensor 'four': is there twice"),
        ({"tensor/norm/n_dims": 5}, "tensor 'norm': has 5 dimensions, expected at most 4"),
        ({"tensor/norm/dim0": -1}, "tensor 'norm': has dimensions (-1,), expected none below 0"),
        ({"tensor/norm/dim0": HUGE}, f"tensor 'norm': its data is {4 * HUGE} bytes at offset"),
        (
            {"tensor/experts/dim2": HUGE},
            f"tensor 'experts': has dimensions (4, 3, {HUGE}), whose pro",
        ),
        (
            {"tensor/norm/type": 43},
            "tensor 'norm': has unknown type 43, expected one of ggml's 0 to 42",
        ),
        ({"tensor/norm/type": -1}, f"tensor 'norm': has unknown type {2**32 - 1}"),
        ({"tensor/norm/type": 31}, "tensor 'norm': has type 31 (Q4_0_4_4), which ggml has removed"),
        (
            {"tensor/norm/type": 8},
            "has rows of 5 elements, expected a multiple of 32 for its type Q8_0",
        ),
        ({"tensor/norm/offset": 33}, "tensor 'norm': has data offset 33, expected 224"),
        ({"tensor/norm/offset": 0}, "tensor 'norm': has data offset 0, expected 224"),
        ({"tensor/four/offset": HUGE}, f"tensor 'four': has data offset {HUGE}, expected 320"),
    ],
)
def test_damaged_fields(tmp_path, patches, problem):
    assert problem in refusal(save(tmp_path, build_gguf(METADATA, TENSORS, patches=patches)))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (48, "is 48, expected a power of two"),
        (0, "is 0, expected a power of two"),
        (np.uint64(32), "has value type 10, expected 4 (uint32)"),
        ("32", "has value type 8, expected 4 (uint32)"),
    ],
)
def test_alignment(tmp_path, value, problem):
    data = build_gguf({"general.alignment": value}, {})
    assert refusal(save(tmp_path, data)) == f"metadata key 'general.alignment': {problem}"


def test_nesting_is_bounded(tmp_path):
    value: list = ["leaf"]
    for _ in range(3):
        value = [value]
    assert open_gguf(save(tmp_path, build_gguf({"deep": value}, {}))).get("deep") == value
    for depth in [4, 500]:
        while depth > 0:
            value, depth = [value], depth - 1
        assert "nests arrays more than 4 deep" in refusal(
            save(tmp_path, build_gguf({"deep": value}, {}))
        )


def test_truncated_data_names_the_first_tensor_that_does_not_fit(tmp_path):
    data = build_gguf(METADATA, TENSORS)
    offsets = {n: t.offset for n, t in open_gguf(save(tmp_path, data)).tensors.items()}
    message = refusal(save(tmp_path, data[: offsets["experts"] + 10]))
    assert message == (
        f"tensor 'experts': its data is 48 bytes at offset {offsets['experts']}, "
        "but the file has only 10 of them: it is truncated, fetch it again"
    )
    assert "'norm': its data is 20 bytes" in refusal(save(tmp_path, data[: offsets["norm"]]))
    # The padding after the last tensor may be missing, as for llama.cpp.
    assert open_gguf(save(tmp_path, data[: offsets["four"] + 24])).raw("four")[-1, -1, -1, -1] == 23


def test_truncated_header(tmp_path):
    for size in [1, 4, 7, 23]:
        problem = f"truncated: {size} bytes, but a GGUF header has at least 24"
        assert refusal(save(tmp_path, SAMPLE[:size])) == problem
    for size, item in [(100, "header: claims 4 tensors"), (500, "metadata key '")]:
        message = refusal(save(tmp_path, SAMPLE[:size]))
        assert message.startswith(item) and message.endswith("it is damaged or truncated")


def test_long_names_are_shortened_in_messages(tmp_path):
    name = "k" * 5000
    message = refusal(save(tmp_path, build_gguf({name: 1}, {}, patches={f"kv/{name}/type": 13})))
    assert message.startswith(f"metadata key '{'k' * 100}...': has value type 13")


def test_every_truncation_is_refused(tmp_path):
    data = build_gguf(METADATA, TENSORS)
    end = data.index(TENSORS["four"][2]) + len(TENSORS["four"][2])
    path = tmp_path / "m.gguf"
    for size in range(end):
        path.write_bytes(data[:size])
        with pytest.raises(GGUFError):
            open_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "patches", "problem"),
    [
        ({"t": "x"}, {"kv/t/value/length": 1 << 40}, "but the header may take only"),
        (
            {"t": [0]},
            {"kv/t/count": 1 << 40},
            "claims 1099511627776 int32 items of at least 4 bytes",
        ),
        ({"t": ["x"]}, {"kv/t/count": 1 << 22}, "claims 4194304 strings, expected at most 2097152"),
        ({"t": [["x"]]}, {"kv/t/count": 1 << 20}, "claims 1048576 arrays, expected at most 65536"),
        ({"t": "x"}, {"n_keys": 1 << 20}, "claims 1048576 metadata keys, expected at most 65536"),
        ({"t": "x"}, {"n_tensors": 1 << 20}, "claims 1048576 tensors, expected at most 65536"),
    ],
)
def test_a_sparse_file_that_does_hold_what_it_claims_costs_nothing(
    tmp_path, metadata, patches, problem
):
    path = save(tmp_path, build_gguf(metadata, {}, patches=patches))
    os.truncate(path, 1 << 34)  # bytes, nearly all of them a hole
    assert problem in refusal(path)


@pytest.mark.parametrize("value", [["a", "b", "c"], [[1], [2], [3]]])
def test_bounds_hold_for_all_arrays_together(tmp_path, monkeypatch, value):
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 5)
    monkeypatch.setattr(gguf_header, "MAX_ENTRIES", 5)
    assert len(open_gguf(save(tmp_path, build_gguf({"a": value}, {}))).metadata) == 1
    message = refusal(save(tmp_path, build_gguf({"a": value, "b": value}, {})))
    assert message.startswith("metadata key 'b': claims 3 ")
    assert message.endswith(", expected at most 2")


# --- fuzzing --------------------------------------------------------------------------------------

NUMBERS = [k for k, v in fields(METADATA, TENSORS).items() if len(v) in (4, 8)]
positions = st.integers(0, len(SAMPLE) - 1)
damages = st.one_of(
    positions.map(lambda end: SAMPLE[:end]),
    st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=8).map(
        lambda changes: _overwritten(dict(changes))
    ),
    st.tuples(positions, positions, st.binary(max_size=40)).map(
        lambda cut: SAMPLE[: min(cut[:2])] + cut[2] + SAMPLE[max(cut[:2]) :]
    ),
    st.dictionaries(
        st.sampled_from(NUMBERS),
        st.integers(0, 50) | st.integers(0, 64).map(lambda bits: (1 << bits) - 1) | st.integers(),
        min_size=1,
        max_size=3,
    ).map(lambda patches: build_gguf(METADATA, TENSORS, patches=patches)),
)


def _overwritten(changes: dict[int, int]) -> bytes:
    return bytes(changes.get(i, byte) for i, byte in enumerate(SAMPLE))


@settings(max_examples=600, deadline=None)
@given(data=damages)
def test_any_damage_ends_in_success_or_one_line(tmp_path_factory, data):
    path = save(tmp_path_factory.getbasetemp(), data, "damaged.gguf")
    tracemalloc.start()
    started = time.process_time()
    try:
        file = open_gguf(path)
        for name, tensor in file.tensors.items():
            raw = file.raw(name)
            assert raw.nbytes == tensor.nbytes and raw.ndim == len(tensor.shape)
            raw.sum()
            file.release(name)
    except GGUFError as e:
        assert str(e).isprintable() and str(e).startswith(str(path))
    assert time.process_time() - started < 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
