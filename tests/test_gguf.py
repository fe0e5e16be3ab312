"""What the GGUF reader reads, compared with gguf-py; whole files and split models."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from minfer_jax import gguf as gguf_reader
from minfer_jax import gguf_types
from minfer_jax.gguf import GGUFError, open_gguf
from minfer_jax.gguf_types import GGML_TYPES, REMOVED_TYPES
from tests.helpers.gguf_builder import build_gguf, build_split, dense
from tests.helpers.gguf_samples import METADATA, RNG, TENSORS, refusal, save

# --- what it reads --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_reads_back_all_that_was_built(tmp_path, version, alignment):
    data = build_gguf(METADATA, TENSORS, version=version, alignment=alignment)
    file = open_gguf(str(save(tmp_path, data + b"trailing bytes are fine")))
    assert (file.version, file.alignment) == (version, alignment)
    assert file.path == tmp_path / "m.gguf" and file.parts == (file.path,)
    metadata = {k: v for k, v in file.metadata.items() if k != "general.alignment"}
    assert list(metadata) == list(METADATA)
    for key, expected in METADATA.items():
        found = metadata[key]
        if isinstance(found, np.ndarray):
            expected = np.asarray(expected, np.int32 if key == "empty" else None)
            assert found.dtype == expected.dtype and not found.flags.writeable
            np.testing.assert_array_equal(found, expected)
        elif key == "f32":
            assert found == float(np.float32(0.1)) and type(found) is float
        elif key == "nested":
            assert [list(found[0]), found[1]] == [[1, 2], ["a", "b"]]
            assert [list(a) for a in found[2]] == [[0.5], []]
        else:
            assert found == expected
            assert type(found) in (int, float, bool, str, list)
    assert list(file.tensors) == list(TENSORS)
    for name, (ggml_type, shape, raw) in TENSORS.items():
        info = file.tensors[name]
        assert (info.name, info.shape, info.ggml_type) == (name, shape, ggml_type)
        assert (info.nbytes, info.part) == (len(raw), 0)
        assert data[info.offset : info.offset + info.nbytes] == raw
        assert file.raw(name).tobytes() == raw


def test_sha256_is_that_of_all_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_reader, "_HASHED", 4096)
    long = {"long": dense(np.zeros(5000, np.float32))}
    paths = save_split(tmp_path, build_split("m", METADATA, [*PARTS, long]))
    data = b"".join(path.read_bytes() for path in paths)
    assert open_gguf(paths[0]).sha256() == hashlib.sha256(data).hexdigest()


def test_raw_is_a_read_only_view_by_rows(tmp_path):
    file = open_gguf(save(tmp_path, build_gguf(METADATA, TENSORS)))
    assert file.raw("token_embd.weight").shape == (3, 2 * 34)
    assert file.raw("norm").shape == (5 * 4,)
    assert file.raw("experts").shape == (2, 3, 4 * 2)
    view = file.raw("four")
    assert view.dtype == np.uint8 and not view.flags.writeable and not view.flags.owndata
    values = file.raw("experts").view(np.float16)
    np.testing.assert_array_equal(
        values, np.frombuffer(TENSORS["experts"][2], "<f2").reshape(2, 3, 4)
    )
    del file
    assert view.tobytes() == TENSORS["four"][2], "the view keeps the file mapped"
    with pytest.raises(KeyError):
        open_gguf(tmp_path / "m.gguf").raw("no such tensor")


def test_agrees_with_gguf_py_as_writer(tmp_path):
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_uint32("qwen3.block_count", 7)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_array("tokens", ["a", "ü"])
    writer.add_array("scores", [0.5, -1.5])
    weights = RNG.standard_normal((4, 96)).astype(np.float32)
    quantised = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("w", quantised, raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("b", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert file.architecture == "qwen3"
    assert file.get("qwen3.block_count") == 7 and file.get("qwen3.rope.freq_base") == 1e6
    assert file.get("tokens") == ["a", "ü"] and file.get("scores").tolist() == [0.5, -1.5]
    assert file.tensors["w"].shape == (4, 96)
    np.testing.assert_array_equal(file.raw("w"), quantised)
    np.testing.assert_array_equal(file.raw("b").view(np.float32), weights[0])


def test_agrees_with_gguf_py_as_reader(tmp_path):
    path = save(tmp_path, build_gguf(METADATA | {"nested": "no"}, TENSORS, alignment=64))
    file, peer = open_gguf(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [t.name for t in peer.tensors]
    for t in peer.tensors:
        info = file.tensors[t.name]
        assert info.shape == tuple(t.shape[::-1]) and info.ggml_type == t.tensor_type
        assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
    for key, value in file.metadata.items():
        contents = peer.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == contents


def test_type_table_agrees_with_gguf_py():
    # gguf-py counts Q8_1's scale and sum as float32; ggml has had them as float16 since 2023.
    corrected = {"Q8_1": (32, 36)}
    for kind, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        expected = (kind.name, *corrected.get(kind.name, (block_size, block_bytes)))
        assert tuple(GGML_TYPES[kind.value]) == expected
    assert GGML_TYPES.keys().isdisjoint(REMOVED_TYPES)
    assert sorted(GGML_TYPES.keys() | REMOVED_TYPES.keys()) == list(range(43))


def test_bytes_that_are_not_utf8_stay_distinct(tmp_path):
    tokens = [b"\xff", b"\xfe", "\ufffd".encode(), b"a\x80"]
    file = open_gguf(
        save(tmp_path, build_gguf({"tokens": tokens, b"k\xff".decode("latin1"): 1}, {}))
    )
    assert len(set(file.get("tokens"))) == 4
    assert [t.encode("utf-8", "surrogateescape") for t in file.get("tokens")] == tokens


def test_any_byte_but_zero_is_true(tmp_path):
    patches = {"kv/bool/value": 2, "kv/bools/items": b"\xff\x00\x02"}
    file = open_gguf(save(tmp_path, build_gguf(METADATA, {}, patches=patches)))
    assert file.get("bool") is True and file.get("bools").tolist() == [True, False, True]


def test_file_of_a_vocabulary_alone(tmp_path):
    file = open_gguf(save(tmp_path, build_gguf({"tokens": ["a"]}, {})))
    assert file.tensors == {} and file.get("tokens") == ["a"]
    assert open_gguf(save(tmp_path, build_gguf({}, {}))).metadata == {}


def test_scalar_and_empty_tensors_are_read_as_llama_cpp_does(tmp_path):
    tensors = {
        "scalar": (0, (), bytes(4)),
        "none": (0, (3, 0), b""),
        "after": dense(np.ones(2, "i4")),
    }
    file = open_gguf(save(tmp_path, build_gguf({}, tensors)))
    assert file.tensors["scalar"].shape == (1,) and file.raw("scalar").shape == (4,)
    assert file.tensors["none"].nbytes == 0 and file.raw("none").shape == (3, 0)
    assert file.raw("after").view("<i4").tolist() == [1, 1]
    file.release("none")


def test_typed_values(tmp_path):
    file = open_gguf(save(tmp_path, build_gguf(METADATA, {})))
    assert file.architecture == "llama"
    assert file.value("u32", int) == 4294967295
    assert file.value("absent", int, 3) == 3 and file.get("absent") is None
    assert file.value("tokens", list)[0] == "<s>"
    for key, kind, problem in [
        ("absent", int, "key 'absent' is missing, expected a value (int)"),
        ("text", int, r"key 'text' is str 'naïve \n 東京', expected int"),
        ("bool", int, "key 'bool' is bool True, expected int"),
        ("u32", float, "key 'u32' is int 4294967295, expected float"),
        ("f32s", list, "key 'f32s' is ndarray"),
    ]:
        with pytest.raises(GGUFError) as caught:
            file.value(key, kind, None)
        assert str(caught.value).startswith(f"{file.path}: metadata {problem}")
        assert str(caught.value).isprintable()
    with pytest.raises(GGUFError, match=r"general\.architecture"):
        _ = open_gguf(save(tmp_path, build_gguf({}, {}))).architecture
    assert len(repr(file)) < 500


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_release_makes_pages_not_resident(tmp_path):
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))

    size = 32 << 20
    file = open_gguf(save(tmp_path, build_gguf({}, {"big": (24, (size // 64, 64), bytes(size))})))
    before = resident()
    total = int(file.raw("big").max())
    touched = resident()
    file.release("big")
    assert touched - before > 0.9 * size
    assert resident() - before < 0.1 * size
    assert int(file.raw("big").max()) == total


def test_large_vocabulary_opens_in_time(tmp_path):
    # As Gemma's: 262,144 tokens, scores and types, at most 0.3 s.
    n = 262_144
    metadata = {
        "tokenizer.ggml.tokens": [f"▁token{i}" for i in range(n)],
        "tokenizer.ggml.scores": np.zeros(n, np.float32),
        "tokenizer.ggml.token_type": np.ones(n, np.int32),
    }
    path = save(tmp_path, build_gguf(metadata, {}))
    seconds = []
    for _ in range(3):
        started = time.process_time()
        tokens = open_gguf(path).get("tokenizer.ggml.tokens")
        seconds.append(time.process_time() - started)
        assert tokens[-1] == f"▁token{n - 1}"
    assert min(seconds) < 0.3


def test_needs_neither_jax_nor_gguf_py():
    # With a bare package in place of minfer_jax/__init__.py, whose own imports do not count here.
    code = (
        "import sys, types; package = types.ModuleType('minfer_jax'); "
        "package.__path__ = sys.argv[1:]; "
        "sys.modules['minfer_jax'] = package; import minfer_jax.gguf; "
        "assert not {'jax', 'gguf'} & sys.modules.keys(), 'imported'"
    )
    folder = str(Path(gguf_types.__file__).parent)
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=60)


# --- split models ---------------------------------------------------------------------------------

PARTS = [
    {"a": TENSORS["norm"]},
    {"b": TENSORS["four"], "c": TENSORS["experts"]},
    {"d": TENSORS["norm"]},
]


def save_split(folder: Path, files: dict[str, bytes]) -> list[Path]:
    return [save(folder, data, name) for name, data in files.items()]


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_model_opens_through_any_part(tmp_path, opened):
    paths = save_split(tmp_path, build_split("a model", METADATA, PARTS))
    file = open_gguf(paths[opened])
    assert file.path == paths[opened] and file.parts == tuple(paths)
    assert file.get("general.architecture") == "llama" and file.get("split.no") == 0
    assert {n: t.part for n, t in file.tensors.items()} == {"a": 0, "b": 1, "c": 1, "d": 2}
    for part in PARTS:
        for name, (_, _, raw) in part.items():
            assert file.raw(name).tobytes() == raw
            file.release(name)


def test_first_part_may_have_no_tensors_and_one_part_needs_no_name(tmp_path):
    paths = save_split(tmp_path, build_split("m", METADATA, [{}, *PARTS]))
    assert list(open_gguf(paths[0]).tensors) == ["a", "b", "c", "d"]
    (data,) = build_split("m", METADATA, PARTS[:1]).values()
    assert list(open_gguf(save(tmp_path, data, "any name")).tensors) == ["a"]


@pytest.mark.parametrize(
    ("patches", "problem"),
    [
        ({1: {"kv/split.count/value": 4}}, "split.no is 1 and split.count 4, expected 1 and 3"),
        ({1: {"kv/split.no/value": 2}}, "split.no is 2 and split.count 3, expected 1 and 3"),
        ({1: {"kv/split.no/name": b"split.oh"}}, "split.no is None, expected an integer"),
        ({1: {"kv/split.count/type": 7, "kv/split.count/value": b"\1"}}, "split.count is True"),
        ({1: {"tensor/c/name": b"a"}}, "tensor 'a' is in m-00001-of-00003.gguf too"),
        ({1: {"magic": b"GGML"}}, "not a GGUF file"),
    ],
)
def test_bad_part_is_named(tmp_path, patches, problem):
    paths = save_split(tmp_path, build_split("m", METADATA, PARTS, patches=patches))
    with pytest.raises(GGUFError) as caught:
        open_gguf(paths[0])
    assert str(caught.value).startswith(f"{paths[1]}: ") and problem in str(caught.value)


def test_parts_must_be_there_with_their_names(tmp_path):
    paths = save_split(tmp_path, build_split("m", METADATA, PARTS))
    paths[2].unlink()
    paths[0].rename(tmp_path / "first.gguf")
    assert "part 1 of 3 of a split model, so expected a name that ends in -00001-of-00003.gguf" in (
        refusal(tmp_path / "first.gguf")
    )
    message = refusal(paths[1])
    assert (
        "part 2 of 3, and 2 of the others are missing, the first m-00001-of-00003.gguf" in message
    )


def test_split_numbers_are_checked(tmp_path):
    patches = {0: {"kv/split.tensors.count/value": 5}}
    paths = save_split(tmp_path, build_split("m", METADATA, PARTS, patches=patches))
    assert "split.tensors.count is 5, but the 3 parts hold 4 tensors" in refusal(paths[0])
    for number, count in [(3, 3), (-1, 3), (0, 65_536), (0, 10**18)]:
        name = f"m-{number + 1:05d}-of-{count:05d}.gguf"
        split = {"split.no": np.int64(number), "split.count": np.int64(count)}
        message = refusal(save(tmp_path, build_gguf(split, {}), name))
        assert message.startswith(f"split.no is {number} and split.count {count}, expected")
