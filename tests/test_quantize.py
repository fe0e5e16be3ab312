"""The quantise command: what it writes, and that it writes all of it or nothing."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from minfer_jax import quantize, quantize_file
from minfer_jax.gguf import open_gguf
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.language_model import from_file
from minfer_jax.quant import quantizers
from minfer_jax.quantize_choice import choose
from minfer_jax.quantize_mix import MIXES
from tests.helpers import tiny_models
from tests.helpers.gguf_builder import build_gguf, build_split, dense
from tests.helpers.ran import Ran

RNG = np.random.default_rng(0)
WEIGHTS = {
    "token_embd.weight": RNG.standard_normal((40, 256)).astype(np.float16),
    "blk.0.attn_norm.weight": RNG.standard_normal(256).astype(np.float32),
    "blk.0.attn_v.weight": RNG.standard_normal((3, 256)).astype(np.float32),
    "blk.0.ffn_up_exps.weight": RNG.standard_normal((4, 3, 256)).astype(np.float16),
    "output.weight": RNG.standard_normal((40, 256)).astype(np.float16),
}
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 1,
    "llama.block_count": 1,
    "u8": np.uint8(255),
    "i64": np.int64(-5),
    "f64": np.float64(0.1),
    "bool": True,
    "words": ["a", b"\xff\xfe not UTF-8", ""],
    "numbers": np.arange(5, dtype=np.uint16),
    "nested": [[1, 2], [3]],
    "empty": [],
}
AFTER = KEYS | {"general.file_type": 7, "general.quantization_version": np.uint32(2)}


@pytest.fixture
def run(capsys) -> Callable[..., Ran]:
    """Runs the command in this process."""

    def call(*argv: object) -> Ran:
        capsys.readouterr()
        status = quantize.main(["quantize", *map(str, argv)])
        return Ran(status, *capsys.readouterr())

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.gguf"
    path.write_bytes(build_gguf(KEYS, {name: dense(w) for name, w in WEIGHTS.items()}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(ran: Ran, status: int) -> str:
    """The one line with which a run was refused."""
    assert (ran.status, ran.out) == (status, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith("error: ") and last.isprintable()
    assert ran.err.count("error: ") == 1 and "Traceback" not in ran.err
    return last.removeprefix("error: ")


# What is written


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_the_file_byte_by_byte(run, tmp_path: Path, alignment: int):
    """As the tests' own writer has it, which knows nothing of the command's."""
    tensors = {name: dense(w) for name, w in WEIGHTS.items()}
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, tensors, alignment=alignment))
    assert run(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q8_0").status == 0
    expected = {}
    for name, w in WEIGHTS.items():
        q8 = gguf.quants.quantize(w.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        expected[name] = tensors[name] if "norm" in name else (8, w.shape, q8.tobytes())
    whole = build_gguf(AFTER, expected, alignment=alignment)
    assert (tmp_path / "out.gguf").read_bytes() == whole
    assert names(tmp_path) == ["in.gguf", "out.gguf"]


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_is_read_back(run, tmp_path: Path, source: Path, mix: str):
    assert run(source, tmp_path / "out.gguf", mix).status == 0
    old, new = open_gguf(source), open_gguf(tmp_path / "out.gguf")
    assert new.metadata["general.file_type"] == MIXES[mix].file_type
    for key in KEYS.keys() - {"general.file_type"}:
        assert new.record(key) == old.record(key)
    # The wanted types, the bytes of a quantiser that was given all weights at once, the size told.
    choices = choose(old, MIXES[mix])
    for c in choices:
        info = new.tensors[c.info.name]
        assert (info.shape, GGML_TYPES[info.ggml_type].name) == (c.info.shape, c.type)
        weights = WEIGHTS[info.name].astype(np.float32)
        whole = quantizers.quantize(weights, c.type)
        np.testing.assert_array_equal(new.raw(info.name).reshape(-1), whole)
    size = quantize_file.size(old, choices, MIXES[mix].file_type)
    assert (tmp_path / "out.gguf").stat().st_size == size


def test_gguf_py_reads_it(run, tmp_path: Path, source: Path):
    assert run(source, tmp_path / "out.gguf", "Q4_K_M").status == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in reader.tensors] == list(WEIGHTS)
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K" and types["output.weight"] == "Q6_K"


def test_pieces_and_threads_change_nothing(run, monkeypatch, tmp_path: Path, source: Path):
    for n, (piece, threads) in enumerate([(1 << 18, 1), (256, 1), (512, 2), (256, 5)]):
        monkeypatch.setattr(quantize_file, "PIECE", piece)
        monkeypatch.setattr(quantize.host, "processors", lambda: range(8))
        assert run(source, tmp_path / f"{n}.gguf", "Q4_K_M", "-t", threads).status == 0
    assert len({(tmp_path / f"{n}.gguf").read_bytes() for n in range(4)}) == 1


def test_tensors_of_the_wanted_type_are_copied(run, tmp_path: Path, source: Path):
    first, again = tmp_path / "first.gguf", tmp_path / "again.gguf"
    run(source, first, "Q3_K_M")
    ran = run(first, again, "Q3_K_M")
    assert ran.status == 0 and "quantised already" not in ran.err
    assert first.read_bytes() == again.read_bytes()


def test_what_is_quantised_already_is_told_of(run, tmp_path: Path, source: Path):
    run(source, tmp_path / "q8.gguf", "Q8_0")
    ran = run(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0")
    assert ran.status == 0
    assert ran.err.count("note: 4 tensors are quantised already (Q8_0)") == 1


def test_rows_that_no_block_divides_are_told_of(run, tmp_path: Path):
    weights = {"a.weight": RNG.standard_normal((2, 96)).astype(np.float32)}
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, {"a.weight": dense(weights["a.weight"])}))
    ran = run(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_S")
    assert "note: 1 tensors have rows that no block of Q4_K divides, and take Q5_0" in ran.err


def test_a_split_model_becomes_one_file(run, tmp_path: Path, source: Path):
    tensors = [{name: dense(w)} for name, w in WEIGHTS.items()]
    for name, data in build_split("part", KEYS, tensors).items():
        (tmp_path / name).write_bytes(data)
    assert run(tmp_path / "part-00001-of-00005.gguf", tmp_path / "a.gguf", "Q5_0").status == 0
    assert run(source, tmp_path / "b.gguf", "Q5_0").status == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_version_2_becomes_version_3(run, tmp_path: Path):
    tensors = {name: dense(w) for name, w in WEIGHTS.items()}
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, tensors, version=2))
    assert run(tmp_path / "in.gguf", tmp_path / "out.gguf", "F16").status == 0
    assert open_gguf(tmp_path / "out.gguf").version == 3


def test_the_model_says_much_the_same(run, tmp_path: Path):
    path = tiny_models.save(tmp_path, tiny_models.tiny_text_model(width=256, n_ff=256)).path
    assert run(path, tmp_path / "out.gguf", "Q8_0").status == 0
    ids = list(range(5, 25))
    before, after = (
        np.asarray(from_file(open_gguf(p), n_ctx=64, precision="highest").engine.logits(ids))
        for p in (path, tmp_path / "out.gguf")
    )
    assert 0 < np.abs(after - before).max() < 0.05 * np.abs(before).max()


# What is said


def test_the_report(run, tmp_path: Path, source: Path):
    ran = run(source, tmp_path / "out.gguf", "Q8_0")
    assert ran.out == ""
    before, after, last = ran.err.splitlines()[-3:]
    assert before.split()[:2] == ["before", str(source.stat().st_size)]
    assert before.endswith("3 F16, 2 F32") and after.endswith("4 Q8_0, 1 F32")
    assert after.split()[:2] == ["after", str((tmp_path / "out.gguf").stat().st_size)]
    assert last.startswith(f"{tmp_path / 'out.gguf'}: ") and last.endswith(" seconds")


def test_a_dry_run(run, tmp_path: Path, source: Path):
    dry = run(source, "Q4_K_M", "--dry-run")
    assert (dry.status, names(tmp_path)) == (0, ["in.gguf"])
    rows = [line.split() for line in dry.out.splitlines()]
    assert rows[0] == ["token_embd.weight", "40x256", "F16", "Q4_K", "5760"]
    assert [row[0] for row in rows] == list(WEIGHTS)
    run(source, tmp_path / "out.gguf", "Q4_K_M")
    assert f"after {(tmp_path / 'out.gguf').stat().st_size:>12}" in dry.err


def test_help(run):
    ran = run("--help")
    assert ran.status == 0 and ran.out.startswith("usage: python -m minfer_jax.quantize")


# What is refused


def test_wrong_usage(run, source: Path):
    assert "expected 3: IN OUT TYPE" in refused(run(source), 2)


@pytest.mark.parametrize("name", ["in.gguf", "./in.gguf", "link.gguf", "hard.gguf"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_the_model_itself_is_never_written_to(run, tmp_path: Path, source: Path, name, force):
    (tmp_path / "link.gguf").symlink_to(source)
    os.link(source, tmp_path / "hard.gguf")
    data = source.read_bytes()
    assert "is the model that is read" in refused(run(source, tmp_path / name, "Q8_0", *force), 1)
    assert source.read_bytes() == data


def test_a_file_that_exists(run, tmp_path: Path, source: Path):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    assert "exists; give another name, or --force" in refused(run(source, out, "Q8_0"), 1)
    assert out.read_bytes() == b"precious"
    assert run(source, out, "Q8_0", "--force").status == 0
    assert open_gguf(out).get("general.file_type") == 7


def test_places_that_cannot_be_written(run, tmp_path: Path, source: Path):
    for out, message in (
        (tmp_path, "is not a file"),
        ("/dev/null", "is not a file"),
        (tmp_path / "none" / "out.gguf", "there is no folder"),
        (source / "out.gguf", ""),
        (tmp_path / "two\nlines" / "out.gguf", r"two\nlines"),
    ):
        assert message in refused(run(source, out, "Q8_0", "--force"), 1)
    assert names(tmp_path) == ["in.gguf"]


def test_a_disk_without_room_is_found_before(run, monkeypatch, tmp_path: Path, source: Path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: usage._replace(free=1000))
    monkeypatch.setattr(quantizers, "quantize", pytest.fail)
    message = refused(run(source, tmp_path / "out.gguf", "Q8_0"), 1)
    assert "MB are needed and 0 MB are free" in message
    assert names(tmp_path) == ["in.gguf"]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_weights_that_are_no_use(run, tmp_path: Path, value: float):
    bad = np.ones((2, 256), np.float32)
    bad[1, 7] = value
    tensors = {"fine.weight": dense(np.ones((2, 256), np.float32)), "bad.weight": dense(bad)}
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, tensors))
    message = refused(run(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_M"), 1)
    assert f"tensor 'bad.weight' holds a weight of {value:.4g}, expected at most" in message
    assert names(tmp_path) == ["in.gguf"]


def test_types_that_cannot_be_read(run, tmp_path: Path):
    q8_k = (15, (2, 256), bytes(2 * 292))
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, {"a.weight": q8_k}))
    message = refused(run(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q8_0"), 1)
    assert "has tensors of Q8_K, which cannot be read as floats here" in message


@pytest.mark.parametrize("old", [None, b"precious"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_early_end_leaves_nothing(run, monkeypatch, tmp_path: Path, source: Path, old, error):
    out = tmp_path / "out.gguf"
    if old:
        out.write_bytes(old)
    before, calls = names(tmp_path), []

    def failing(x: np.ndarray, name: str) -> np.ndarray:
        calls.append(name)
        if len(calls) == 3:
            assert names(tmp_path) != before, "no temporary file to leave behind"
            raise error
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(quantizers, "quantize", failing)
    ran = run(source, out, "Q8_0", "--force", "-t", 1)
    if isinstance(error, KeyboardInterrupt):
        assert (ran.status, ran.err.splitlines()[-1]) == (130, "interrupted")
    else:
        assert refused(ran, 1) == f"{out} cannot be written: No space left on device"
    assert names(tmp_path) == before
    assert not old or out.read_bytes() == old


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals):
    weights = np.ones((1 << 14, 1024), np.float16)
    (tmp_path / "in.gguf").write_bytes(build_gguf(KEYS, {"a.weight": dense(weights)}))
    command = (sys.executable, "-m", "minfer_jax.quantize", "in.gguf", "out.gguf", "MXFP4")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while len(names(tmp_path)) == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(names(tmp_path)) == 2, "it never began"
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert names(tmp_path) == ["in.gguf"]


def test_permissions_are_those_of_a_new_file(run, tmp_path: Path, source: Path):
    run(source, tmp_path / "out.gguf", "Q8_0")
    (tmp_path / "plain").touch()
    assert (tmp_path / "out.gguf").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_choices_may_be_made_by_hand(tmp_path: Path, source: Path):
    file = open_gguf(source)
    choices = [dataclasses.replace(c, type="F16") for c in choose(file, MIXES["Q8_0"])]
    written: list[int] = []
    quantize_file.write(
        file, choices, tmp_path / "out.gguf", file_type=1, threads=2, on_bytes=written.append
    )
    new = open_gguf(tmp_path / "out.gguf")
    assert {t.ggml_type for t in new.tensors.values()} == {1}
    assert sum(written) == sum(t.nbytes for t in new.tensors.values())
