"""Packed formats: values bit for bit those of gguf-py, planes of the documented shape."""

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.quant import xla
from minfer_jax.quant.formats import FORMATS, Format
from minfer_jax.quant.formats.base import (
    TILE,
    column_places,
    pack,
    repack,
    repack_bits,
    repack_signs,
)
from minfer_jax.quant.formats.grids import signs_of
from minfer_jax.quant.qtensor import QTensor, from_blocks, stack_blocks
from tests.helpers.random_blocks import (
    BLOCK_SCALES,
    OTHER_SCALES,
    dequantized,
    random_blocks,
)

ALL = [pytest.param(fmt, id=fmt.name) for fmt in FORMATS.values()]
HALVES = [pytest.param(fmt, id=fmt.name) for fmt in FORMATS.values() if fmt.name in BLOCK_SCALES]
PACKED = [pytest.param(fmt, id=fmt.name) for fmt in FORMATS.values() if fmt.widths]

# Bytes of the planes over bytes in the file. Scales of fewer bits take a byte each here; TQ1_0's
# base 3 becomes 2 bits, the 7 bits of IQ2_XXS's, IQ2_XS's and IQ3_XXS's signs 8, the indices of
# IQ3_S the 4 bits a weight that they stand for.
RATIOS = {
    "Q2_K": 100 / 84,
    "Q3_K": 114 / 110,
    "Q4_K": 148 / 144,
    "Q5_K": 180 / 176,
    "TQ1_0": 66 / 54,
    "IQ1_S": 58 / 50,
    "IQ1_M": 66 / 56,
    "IQ2_XXS": 74 / 66,
    "IQ2_XS": 90 / 74,
    "IQ2_S": 90 / 82,
    "IQ3_XXS": 106 / 98,
    "IQ3_S": 138 / 110,
    "IQ4_XS": 138 / 136,
}

dequantize = partial(jax.jit, static_argnums=1)(xla.dequantize)


def blocks_of(fmt: Format, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows as they lie in a file: random bits, but every number finite."""
    rng = np.random.default_rng(seed)
    if fmt.widths:
        return random_blocks(fmt.name, (n, k), rng)
    return gguf.quants.quantize(
        rng.standard_normal((n, k)).astype(np.float32), gguf.GGMLQuantizationType[fmt.name]
    ).view(np.uint8)


def reference(raw: np.ndarray, fmt: Format) -> np.ndarray:
    """[N, K] as gguf-py has it."""
    return dequantized(raw, fmt.name)


def assert_same_bits(found: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    )


def shapes(fmt: Format) -> list[tuple[int, int]]:
    """Odd and even N; every K of 256, 512, 576 that the block allows, and the smallest of all."""
    ks = {k for k in (fmt.block, 256, 512, 576) if k % fmt.block == 0}
    return list(zip((1, 7, 16, 193), sorted(ks), strict=False))


@pytest.mark.parametrize("fmt", ALL)
def test_values_are_those_of_gguf_py(fmt: Format):
    for n, k in shapes(fmt):
        raw = blocks_of(fmt, n, k)
        w = from_blocks(raw, fmt.ggml_type)
        assert w.shape == (n, k)
        assert_same_bits(dequantize(w, jnp.dtype("float32")), reference(raw, fmt).T)


@pytest.mark.parametrize("fmt", HALVES)
def test_values_with_scales_of_any_size_and_sign(fmt: Format):
    rng = np.random.default_rng(1)
    raw = blocks_of(fmt, 5, 512).reshape(-1, fmt.block_bytes).copy()
    for at in BLOCK_SCALES[fmt.name]:
        # Zero, the smallest, below what is normal, and the largest that leaves products finite.
        choices = np.array([0.0, -0.0, 6e-8, -3e-5, 1.0, -0.1, 3.0, 60000.0], np.float16)
        raw[:, at : at + 2] = rng.choice(choices, (len(raw), 1)).view(np.uint8)
    raw = raw.reshape(5, -1)
    w = from_blocks(raw, fmt.ggml_type)
    assert_same_bits(dequantize(w, jnp.dtype("float32")), reference(raw, fmt).T)


# What llama.cpp b11434's dequantize_row_q1_0 and dequantize_row_q2_0 give for a block, over its
# scale of 0.375: gguf-py cannot read these types.
GOLDEN = {
    "Q1_0": (
        "0036b8abeeab14cef599cc052535d5cec0ad",
        {"-": -1, "+": 1},
        "---+++-+++-+-+-+-+++-+++++-+-+-+--+-+----+++--+++-+-+++++--++--+"
        "--++--+++-+-----+-+--+--+-+-++--+-+-+-++-+++--++------+++-++-+-+",
    ),
    "Q2_0": (
        "0036ec83760457a17c472a49ed10c2fa0a67",
        {"-": -1, "0": 0, "+": 1, "2": 2},
        "-2+22--++020-0--20000-++-22020-0+++-0+-002+2--0-+--2++22++--20+0",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_that_gguf_py_does_not_know(name: str):
    block, values, expected = GOLDEN[name]
    fmt = next(fmt for fmt in FORMATS.values() if fmt.name == name)
    raw = np.frombuffer(bytes.fromhex(block), np.uint8)[None]
    wanted = 0.375 * np.array([[values[c] for c in expected]], np.float32)
    np.testing.assert_array_equal(reference(raw, fmt), wanted)
    found = dequantize(from_blocks(raw, fmt.ggml_type), jnp.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(found).T, wanted)


def test_scales_of_eight_bits():
    # Of MXFP4's the two that float32 has as subnormals only are zero: so XLA takes them anyway.
    raw = np.random.default_rng(0).integers(0, 256, (253, 17), np.uint8)
    raw[:, 0] = np.arange(253)
    found = dequantize(from_blocks(raw, 39), jnp.dtype("float32"))
    assert not np.asarray(found)[:, :2].any()
    assert_same_bits(found[:, 2:], reference(raw[2:], FORMATS[39]).T)
    # Of NVFP4's all, also those with the bit that has no meaning, and the one that is no number.
    raw = np.random.default_rng(0).integers(0, 256, (64, 36), np.uint8)
    raw[:, :4] = np.arange(256).reshape(64, 4)
    found = dequantize(from_blocks(raw, 40), jnp.dtype("float32"))
    assert_same_bits(found, reference(raw, FORMATS[40]).astype(np.float32).T)


@pytest.mark.parametrize("ggml_type", [2, 3, 6, 7, 8, 34, 35, 39])  # what gguf-py can quantise to
def test_values_of_quantised_data(ggml_type: int):
    fmt = FORMATS[ggml_type]
    data = np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)
    raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType[fmt.name])
    found = dequantize(from_blocks(raw, fmt.ggml_type), jnp.dtype("float32"))
    assert_same_bits(found, reference(raw, fmt).T)
    # The step between two values is the range over their number, which is some 5 deviations.
    step = 5.0 / 2 ** sum(fmt.widths)
    assert np.sqrt(np.mean((np.asarray(found).T - data) ** 2)) < step


@pytest.mark.parametrize("fmt", ALL)
def test_other_dtypes_are_the_float32_rounded(fmt: Format):
    w = from_blocks(blocks_of(fmt, 8, 256), fmt.ggml_type)
    exact = dequantize(w, jnp.dtype("float32"))
    for dtype in ("bfloat16", "float16"):
        found = dequantize(w, jnp.dtype(dtype))
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(exact).astype(found.dtype))


@pytest.mark.parametrize("fmt", ALL)
def test_a_stack_equals_its_layers(fmt: Format):
    parts = [[blocks_of(fmt, n, 256, seed=10 * i + n) for n in (3, 8, 1)] for i in range(2)]
    called: list[int] = []
    stack = stack_blocks(parts, fmt.ggml_type, done=lambda: called.append(1))
    assert len(called) == 6
    assert stack.shape == (12, 256)
    for i, layer in enumerate(parts):
        single = from_blocks(np.concatenate(layer), fmt.ggml_type)
        for found, expected in zip(jax.tree.leaves(stack), jax.tree.leaves(single), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(found[i]), np.asarray(expected))
        found = dequantize(stack.at(i), jnp.dtype("float32"))
        assert_same_bits(found, reference(np.concatenate(layer), fmt).T)


def test_rows_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch):
    fmt = FORMATS[12]
    raw = blocks_of(fmt, 11, 256)
    whole = from_blocks(raw, fmt.ggml_type)
    monkeypatch.setattr("minfer_jax.quant.qtensor._CHUNK_BYTES", 3 * fmt.block_bytes)
    pieces = from_blocks(raw, fmt.ggml_type)
    for found, expected in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("stacked", [False, True])
def test_planes_are_as_documented(fmt: Format, stacked: bool):
    n, k = 7, 512
    raw = blocks_of(fmt, n, k)
    w = stack_blocks([[raw]] * 3, fmt.ggml_type) if stacked else from_blocks(raw, fmt.ggml_type)
    lead = (3,) if stacked else ()

    def check(plane: jax.Array | None, rows: int, *dtypes: str) -> None:
        assert plane is not None
        assert plane.shape == (*lead, -(-n // TILE), rows, TILE)
        assert plane.dtype.name in dtypes

    assert w.fmt is fmt
    assert w.shape == (n, k)
    assert w.layer is None
    if not fmt.widths:
        check(w.dense, k, "float32", "float16", "bfloat16")
        assert jax.tree.leaves(w) == [w.dense]
        return
    assert w.dense is None
    assert len(w.bits) == len(fmt.widths)
    for plane, width in zip(w.bits, fmt.widths, strict=True):
        check(plane, k * width // 32, "uint32")
    assert fmt.super_block % fmt.group == fmt.block % fmt.super_block == 0
    check(w.scale, k // fmt.super_block, "uint8" if fmt.byte_scale else "float16")
    if w.sub is not None:
        check(w.sub, k // fmt.group, "int8")
    if w.low is not None:
        check(w.low, k // fmt.super_block, "float16")
    assert (w.sublow is not None) == (w.sub is not None and w.low is not None)
    if w.sublow is not None:
        check(w.sublow, k // fmt.group, "int8")
    assert (w.high is not None) == (fmt.grid is not None and fmt.grid.high > 0)
    if w.high is not None:
        check(w.high, k // 32, "uint8", "uint16")


@pytest.mark.parametrize("fmt", ALL)
def test_planes_are_about_as_large_as_the_file(fmt: Format):
    raw = blocks_of(fmt, TILE, 512)
    ratio = sum(a.nbytes for a in jax.tree.leaves(from_blocks(raw, fmt.ggml_type))) / raw.nbytes
    assert ratio == pytest.approx(RATIOS.get(fmt.name, 1.0))
    assert ratio < 1.26


def test_the_table_agrees_with_the_types_of_the_file():
    for ggml_type, fmt in FORMATS.items():
        kind = GGML_TYPES[ggml_type]
        assert fmt.ggml_type == ggml_type
        assert (fmt.name, fmt.block, fmt.block_bytes) == (
            kind.name,
            kind.block_size,
            kind.block_bytes,
        )
    packed = {fmt.name for fmt in FORMATS.values() if fmt.widths}
    assert packed == {*BLOCK_SCALES, *OTHER_SCALES}
    # Of what may stand in a file only whole numbers are not here, and what activations become.
    left = {kind.name for kind in GGML_TYPES.values()} - {fmt.name for fmt in FORMATS.values()}
    assert left == {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}


def test_a_weight_is_hashable_structure_and_arrays():
    w = from_blocks(blocks_of(FORMATS[2], 4, 64), 2)
    leaves, structure = jax.tree.flatten(w)
    assert hash(structure) == hash(jax.tree.structure(w))
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, QTensor)
    assert again.shape == (4, 64)


@settings(deadline=None)
@given(
    width=st.sampled_from([1, 2, 4]),
    n=st.sampled_from([32, 64]),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    offset=st.integers(0, 3),
    data=st.data(),
)
def test_repack_orders_the_fields(
    width: int, n: int, shape: tuple[int, int, int], offset: int, data: st.DataObject
):
    rows, blocks, runs = shape
    size = offset + runs * n
    count = rows * blocks * size
    packed = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8)
    packed = packed.reshape(rows, blocks, size)[..., offset:]  # as in a file: seldom aligned
    before = packed.copy()
    mask = (1 << width) - 1
    # By definition: field s of byte j of a run is its element s n + j.
    by_run = packed.reshape(rows, blocks, runs, n)
    elements = np.concatenate([(by_run >> (width * s)) & mask for s in range(8 // width)], axis=-1)
    found = repack(packed, width, n)
    assert found.dtype == np.uint32
    assert found.shape == (rows, blocks, runs, 8 // width, n // 32, width)
    words = found.reshape(rows, blocks, -1)
    np.testing.assert_array_equal(columns(words, width), elements.reshape(rows, blocks, -1))
    np.testing.assert_array_equal(packed, before)


def columns(words: np.ndarray, width: int) -> np.ndarray:
    """The fields of a plane, in the order of their columns, by where base.py says each lies."""
    units = words.reshape(*words.shape[:-1], -1, width)
    places = [column_places(width)[i] for i in (0, 1)]
    fields = [(units[..., i] >> s) & ((1 << width) - 1) for i, s in zip(*places, strict=True)]
    return np.stack(fields, axis=-1).reshape(*words.shape[:-1], -1)


def test_places_are_those_drawn():
    assert column_places(8) == ([c // 4 for c in range(32)], [8 * (c % 4) for c in range(32)])
    where, shifts = column_places(4)
    assert (where[0], shifts[0]) == (where[3], shifts[3] - 24) == (0, 0)
    assert (where[16], shifts[16]) == (0, 4)
    assert (where[23], shifts[23]) == (1, 28)


@given(st.binary(min_size=8, max_size=8))
def test_repack_of_bits_in_natural_order(raw: bytes):
    packed = np.frombuffer(raw, np.uint8).reshape(2, 1, 4)
    natural = np.unpackbits(packed, axis=-1, bitorder="little")
    np.testing.assert_array_equal(columns(repack_bits(packed), 1), natural)


@settings(deadline=None)
@given(width=st.sampled_from([1, 2, 4]), units=st.integers(1, 3), data=st.data())
def test_pack_is_where_the_columns_are_looked_for(width: int, units: int, data: st.DataObject):
    n = 32 * units
    q = np.frombuffer(data.draw(st.binary(min_size=2 * n, max_size=2 * n)), np.uint8)
    q = (q & np.uint8(2**width - 1)).reshape(2, 1, n)
    found = pack(q, width)
    assert (found.dtype, found.shape) == (np.uint32, (2, 1, units * width))
    np.testing.assert_array_equal(columns(found, width), q)


@given(st.binary(min_size=8, max_size=8))
def test_signs_lie_as_drawn(raw: bytes):
    packed = np.frombuffer(raw, np.uint8).reshape(1, 2, 4)
    (words,) = repack_signs(packed)
    for c, sign in enumerate(np.unpackbits(packed[0], axis=-1, bitorder="little").T):
        g, h, b = c // 8, c // 4 % 2, c % 4
        np.testing.assert_array_equal(words[:, 0] >> (8 * b + 4 * h + g) & 1, sign)


def test_eight_signs_are_even():
    every = signs_of(np.arange(128, dtype=np.uint16))
    assert [int(s).bit_count() % 2 for s in every] == [0] * 128
    np.testing.assert_array_equal(every & 127, np.arange(128))
