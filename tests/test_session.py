"""The state as a value and as a file: what it holds, that it goes on, and what is refused."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax import state_file
from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.session import identity_of, to_parts
from minfer_jax.state_file import StateError
from tests.helpers import tiny_models
from tests.helpers.tiny_engines import short_engine

pytestmark = pytest.mark.usefixtures("shared_compiles")

LONG = [(7 * i * i + 3 * i + 11) % 96 for i in range(40)]
DRAWN: dict[str, Any] = {
    "temperature": np.float32(1.3),  # numpy's numbers are numbers
    "top_k": np.int64(50),
    "seed": 2**64 - 1,
    "repeat_penalty": 1.3,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes an engine of a model with rings (8 positions in 8 + chunk slots)."""
    data = tiny_models.tiny_model("gemma3", tied=False)
    cfg, params = tiny_models.load(tmp_path_factory.mktemp("ringed"), data)

    @functools.cache
    def engine(n_ctx: int = 40, prefill_chunk: int = 8, **changes: Any) -> Engine:
        changed = dataclasses.replace(cfg, **changes), params
        return short_engine(changed, n_ctx=n_ctx, prefill_chunk=prefill_chunk)

    return engine


@pytest.fixture(scope="module")
def engine(make):
    return make()


@pytest.fixture(scope="module")
def other(make):
    return make(n_ctx=40)  # another one


def run(engine: Engine, ids, n: int, **options: Any) -> list[int]:
    return list(engine.generate_tokens(ids, n, **options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, engine):
    """The bytes of a file, of a run of 9 and 12 tokens."""
    run(engine, LONG[:9], 12, **DRAWN)
    path = tmp_path_factory.mktemp("saved") / "state"
    engine.save_state(path, "a model")
    return path.read_bytes()


# Going on


@pytest.mark.parametrize("taken", [1, 12, 23])
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_a_restored_state_goes_on_as_the_live_one(make, tmp_path, cache, taken):
    """In another engine, to the bit: its cache holds the same numbers in the same places."""
    one, two = make(cache_dtype=cache), make(cache_dtype=cache, n_ctx=40)
    whole = run(one, LONG[:9], 24, **DRAWN)
    left = list(itertools.islice(one.generate_tokens(LONG[:9], 24, **DRAWN), taken))
    one.save_state(tmp_path / "state", "m")
    run(two, LONG[:30], 3)
    two.load_state(tmp_path / "state", "m")
    assert two.tokens == one.tokens == [*LONG[:9], *left]
    assert [*left, *two.continue_tokens(24 - taken)] == whole
    assert two.stats.n_reused == 8 + taken, "nothing was run again but the last token"
    assert [*left, *one.continue_tokens(24 - taken)] == whole
    for a, b in zip(one.snapshot().rows.arrays, two.snapshot().rows.arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_saving_does_not_disturb_a_run(engine, tmp_path):
    whole = run(engine, LONG[:9], 12, **DRAWN)
    tokens = []
    for token in engine.generate_tokens(LONG[:9], 12, **DRAWN):
        tokens.append(token)
        engine.save_state(tmp_path / "state", "m")
    assert tokens == whole


@pytest.mark.parametrize(("n_ctx", "chunk"), [(64, 8), (34, 4), (64, 64)])
def test_another_context_and_chunk_can_go_on(make, engine, tmp_path, n_ctx, chunk):
    """Rows go where their positions belong; a shorter ring takes the latest."""
    tokens = run(engine, LONG[:20], 6, temperature=0.0)
    whole = [*tokens, *engine.continue_tokens(6)]
    run(engine, LONG[:20], 6, temperature=0.0)
    engine.save_state(tmp_path / "state", "m")
    two = make(n_ctx=n_ctx, prefill_chunk=chunk)
    two.load_state(tmp_path / "state", "m")
    assert [*tokens, *two.continue_tokens(6)] == whole
    assert two.stats.n_reused == 25


def test_a_restored_state_serves_as_a_prefix(engine, other, tmp_path):
    tokens = run(engine, LONG[:20], 3, temperature=0.0)
    engine.save_state(tmp_path / "state", "m")
    other.load_state(tmp_path / "state", "m")
    prompt = [*LONG[:20], *tokens, 1, 2]
    expected = run(engine, prompt, 5, temperature=0.0, reuse=False)
    assert run(other, prompt, 5, temperature=0.0) == expected
    assert other.stats.n_reused == 22


def test_a_full_context_is_saved_and_shifts_after(engine, other, tmp_path):
    options: dict[str, Any] = {**DRAWN, "context_shift": True, "n_keep": 3, "stop_ids": [10**6]}
    whole = run(engine, LONG[:9], 60, **options)
    part = run(engine, LONG[:9], 32, **options)
    engine.save_state(tmp_path / "state", "m")
    other.load_state(tmp_path / "state", "m")
    assert len(other.tokens) == 41
    assert [*part, *other.continue_tokens(28)] == whole


@pytest.mark.parametrize(
    "options",
    [
        {"n_keep": np.int64(3), "context_shift": np.bool_(True)},
        {"stop_ids": range(96, 97 + 2**20)},  # ids that no token has
        {"stop_ids": np.arange(0, 96, 2)},
        {"top_k": 10**5000},
    ],
)
def test_whatever_a_run_takes_can_be_saved(engine, tmp_path, options):
    run(engine, LONG[:9], 12, **options)
    tokens = engine.tokens
    engine.save_state(tmp_path / "state", "m")
    more = list(engine.continue_tokens(5))
    engine.load_state(tmp_path / "state", "m")
    assert engine.tokens == tokens
    assert list(engine.continue_tokens(5)) == more


def test_a_snapshot_is_a_value(engine):
    """What the engine does later does not show in it, and it can be put back again and again."""
    run(engine, LONG[:9], 4, **DRAWN)
    snapshot = engine.snapshot()
    ends = []
    for _ in range(2):
        ends.append(list(engine.continue_tokens(20)))
        run(engine, LONG[:30], 3)
        engine.restore(snapshot)
    assert ends[0] == ends[1] == list(engine.continue_tokens(20))


def test_a_snapshot_that_is_too_long(make, engine):
    small = make(n_ctx=12)
    run(engine, LONG[:9], 5)
    with pytest.raises(EngineError, match="has 14 tokens, but the context holds 12"):
        small.restore(engine.snapshot())
    run(engine, LONG[:9], 4)
    small.restore(engine.snapshot())
    assert (list(small.continue_tokens(4)), len(small.tokens)) == ([], 13)


def test_only_what_is_used_is_written(make, tmp_path):
    engine = make(n_ctx=64)
    run(engine, LONG[:5], 1)
    engine.save_state(tmp_path / "short", "m")
    assert (tmp_path / "short").stat().st_size < engine.kv_bytes / 4
    run(engine, LONG[:40], 20)
    engine.save_state(tmp_path / "long", "m")
    (full,) = {a.shape[3] for a in engine.snapshot().rows.arrays[:2]}
    (ring,) = {a.shape[3] for a in engine.snapshot().rows.arrays[2:]}
    assert (full, ring <= 16) == (59, True)


def test_a_state_without_rows_is_run_again(engine, other, tmp_path):
    """After a failure the tokens are still known."""
    whole = run(engine, LONG[:9], 12, temperature=0.0)
    tokens = run(engine, LONG[:9], 4, temperature=0.0)
    engine._runner.kv.drop()
    engine.save_state(tmp_path / "state", "m")
    assert (tmp_path / "state").stat().st_size < 2000
    other.load_state(tmp_path / "state", "m")
    assert [*tokens, *other.continue_tokens(8)] == whole
    assert other.stats.n_reused == 0


# Refusals


def test_there_must_be_something_to_save(make, tmp_path):
    with pytest.raises(EngineError, match="no run to continue or to save"):
        make(n_ctx=39).save_state(tmp_path / "state", "m")
    assert not list(tmp_path.iterdir())


def test_where_a_file_cannot_be_written(engine, tmp_path):
    run(engine, LONG[:5], 1)
    with pytest.raises(StateError, match=r"none/state: cannot be written \(No such file"):
        engine.save_state(tmp_path / "none" / "state", "m")
    with pytest.raises(StateError, match="cannot be written"):
        engine.save_state(tmp_path, "m")
    assert not list(tmp_path.iterdir()), "nothing half written is left"


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_file_can_have(engine, tmp_path, name):
    run(engine, LONG[:5], 1)
    for call, why in ((engine.save_state, "cannot be written"), (engine.load_state, "read")):
        with pytest.raises(StateError, match=why) as caught:
            call(tmp_path / name, "m")
        assert str(caught.value).isprintable()
    assert not list(tmp_path.iterdir())


def test_the_old_file_stays_until_the_new_one_is_whole(engine, tmp_path, monkeypatch):
    run(engine, LONG[:5], 1)
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(state_file.os, "fsync", full)
        with pytest.raises(StateError, match="No space left"):
            engine.save_state(path, "m")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    engine.save_state(path, "m")
    engine.load_state(path, "m")


def refused(engine: Engine, path, data: bytes, model: str = "a model") -> str:
    """The line with which a file is refused; the engine stays as it was."""
    path.write_bytes(data)
    before = engine.tokens
    with pytest.raises(StateError) as caught:
        engine.load_state(path, model)
    assert engine.tokens == before
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 5000
    return message.removeprefix(f"{path}: ")


def test_files_that_are_none_of_these(engine, tmp_path):
    path = tmp_path / "state"
    with pytest.raises(StateError, match=r"none: cannot be read \(No such file"):
        engine.load_state(tmp_path / "none", "m")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StateError, match=r": not a file$"):
            engine.load_state(other, "m")
    with pytest.raises(StateError) as caught:
        engine.load_state(tmp_path / "a\nb\udc80", "m")
    assert str(caught.value).isprintable()
    for data in (b"", b"MINFERST", b"GGUF" + bytes(100), bytes(100)):
        assert refused(engine, path, data) == "not a saved state"


@settings(
    max_examples=60, deadline=None, suppress_health_check=(HealthCheck.function_scoped_fixture,)
)
@given(data=st.data())
def test_what_is_cut_or_altered_is_refused(engine, saved, tmp_path, data):
    n = len(saved)
    near = st.integers(0, 200) | st.integers(n - 60, n - 1) | st.integers(0, n - 1)
    at = data.draw(near)
    assert refused(engine, tmp_path / "state", saved[:at])
    flipped = bytearray(saved)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    assert refused(engine, tmp_path / "state", bytes(flipped))
    assert "damaged" in refused(engine, tmp_path / "state", saved + b"\0")


def test_states_of_something_else(make, engine, saved, tmp_path):
    path = tmp_path / "state"
    message = refused(engine, path, saved, "another")
    assert message == "saved with model a model, but this is another"
    message = refused(make(cache_dtype="float16"), path, saved)
    assert message == "saved with cache type float32, but this is float16"
    message = refused(make(precision="default"), path, saved)
    assert message == "saved with precision highest, but this is default"
    message = refused(make(n_ctx=16), path, saved)
    assert message == "it holds 21 tokens, but the context holds 16: raise n_ctx"


def test_a_state_of_another_rotation(tmp_path):
    """Phi 3 rotates by other factors where the context is longer than the original one."""
    options = {"long_factors": True, "keys": {"rope.scaling.original_context_length": 16}}
    cfg, params = tiny_models.load(tmp_path, tiny_models.tiny_model("phi3", **options))
    short, same, long = (Engine(params, cfg, n_ctx=n, prefill_chunk=8) for n in (16, 12, 17))
    run(short, LONG[:4], 2)
    short.save_state(tmp_path / "state", "m")
    same.load_state(tmp_path / "state", "m")
    with pytest.raises(StateError, match="saved with RoPE for at most 16 positions, but this is"):
        long.load_state(tmp_path / "state", "m")


def forged(saved: bytes, change) -> bytes:
    """A file whose header was changed by someone who knows how to make its checksum."""
    n_text = struct.unpack_from("<I", saved, 12)[0]
    value = json.loads(saved[24 : 24 + n_text])
    changed = change(value)
    value = value if changed is None else changed
    text = json.dumps(value).encode() if not isinstance(value, bytes) else value
    size = len(saved) - n_text + len(text)
    body = struct.pack("<8sIIQ", b"MINFERST", 1, len(text), size) + text + saved[24 + n_text : -32]
    return body + hashlib.sha256(body).digest()


def put(*path_and_value: Any):
    *keys, value = path_and_value

    def change(whole: Any) -> None:
        for key in keys[:-1]:
            whole = whole[key]
        whole[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"[" * 60000, "its header is not"),
        (lambda _: b"\xff", "its header is not"),
        (lambda _: [], "its header is not"),
        (put("header", []), "its header is not"),
        (put("arrays", 0, ["object", [9]]), "its header is not"),
        (put("arrays", 0, ["int32", [2**50]]), "its header is not"),
        (put("arrays", 0, ["int32", [-21]]), "its header is not"),
        (put("arrays", 0, ["int32", [True]]), "its header is not"),
        (put("arrays", 0, ["int32", [2**39]]), "which it does not have"),
        (put("arrays", 0, ["int32", [2**39] * 1000]), "its header is not"),
        (put("identity", "model", "a\nmodel\ud800"), "saved with model a\\nmodel"),
        (put("identity", "model", "x" * 50000), "saved with model xxx"),
        (put("header", "n_rows", "x" * 50000), "n_rows is 'xxx"),
        (put("header", "n_drawn", 10**4200), "n_drawn is 1000"),
        (put("arrays", []), "which it does not have"),
        (put("arrays", 0, ["float32", [21]]), "it lists no tokens"),
        (put("header", "n_rows", 21), "n_rows is 21, expected 0 to 20"),
        (put("header", "n_rows", 19), "its keys and values are"),
        (put("header", "n_rows", "20"), "n_rows is '20'"),
        (put("header", "n_drawn", -1), "n_drawn is -1"),
        (put("header", "n_drawn", 2**40), "n_drawn is"),
        (put("header", "n_keep", None), "n_keep is None"),
        (put("header", "first", [0, 21]), "first is"),
        (put("header", "first", 0), "first is"),
        (put("header", "context_shift", 1), "context_shift is neither"),
        (put("header", "sampling", {"temperature": -1.0}), "temperature must be"),
        (put("header", "sampling", {"temprature": 1.0}), "temprature"),
        (put("header", "sampling", 3), "its sampling values"),
    ],
)
def test_forged_headers(engine, saved, tmp_path, change, message):
    assert message in refused(engine, tmp_path / "state", forged(saved, change))


@pytest.mark.parametrize("token", [-1, 96, 2**31 - 1])
def test_forged_tokens(engine, tmp_path, token):
    run(engine, LONG[:9], 2)
    header, arrays = to_parts(engine.snapshot())
    arrays[0][3] = token
    path = tmp_path / "state"
    state_file.write(path, identity_of(engine.cfg, engine.n_ctx, "a model"), header, arrays)
    assert "outside the vocabulary" in refused(engine, path, path.read_bytes())


def test_another_version(engine, saved, tmp_path):
    data = saved[:8] + struct.pack("<I", 2) + saved[12:]
    assert "version 2, expected 1" in refused(engine, tmp_path / "state", data)
