"""Programs kept on disk: found again without a trace, and never in the way."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from minfer_jax import program_cache
from minfer_jax.engine import Engine
from minfer_jax.programs import Programs
from tests.helpers import tiny_models
from tests.helpers.jax_settings import compile_cache_of

PROMPT = [5, 17, 3, 80]


@pytest.fixture
def folder(tmp_path):
    """Where programs are kept; jax's own cache is set aside for the time."""
    with compile_cache_of(str(tmp_path)):
        yield tmp_path / "programs"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    data = tiny_models.tiny_model("llama", n_layer=2, n_ctx=64)
    return tiny_models.load(tmp_path_factory.mktemp("small"), data)


def answer(model) -> tuple[list[int], list[bool]]:
    """What a new engine says, and whether it found its programs."""
    cfg, params = model
    engine = Engine(params, cfg, n_ctx=64)
    tokens = list(engine.generate_tokens(PROMPT, 20, temperature=0.0))
    return tokens, [compiled.cached for compiled in engine.compiles]


def refuse(*_: object) -> None:
    raise AssertionError("traced")


def test_a_second_engine_traces_nothing(model, folder, monkeypatch):
    tokens, cached = answer(model)
    assert cached == [False, False]
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(Programs, "trace", refuse)
    for _ in range(2):
        assert answer(model) == (tokens, [True, True])


def test_a_loaded_program_still_takes_the_kv_state_over(model, folder):
    cfg, params = model
    answer(model)
    engine = Engine(params, cfg, n_ctx=64)
    list(engine.generate_tokens(PROMPT, 2, temperature=0.0))
    assert engine._runner.kv.state is not None
    held = jax.tree.leaves(engine._runner.kv.state.k)
    list(engine.generate_tokens(PROMPT, 2, temperature=0.0))
    assert all(cache.is_deleted() for cache in held)


@pytest.mark.parametrize("damage", [("cut", "changed"), ("empty", "another")])
def test_a_damaged_entry_is_compiled_again(model, folder, damage: tuple[str, str]):
    tokens, _ = answer(model)
    for path, how in zip(sorted(folder.iterdir()), damage, strict=True):
        data = path.read_bytes()
        changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        damaged = {"cut": data[:-100], "changed": changed, "empty": b"", "another": b"\0" * 99}
        path.write_bytes(damaged[how])
    assert answer(model) == (tokens, [False, False])
    assert answer(model) == (tokens, [True, True])


def test_what_a_program_is_made_of_tells_it_apart(model, folder, monkeypatch):
    cfg, params = model

    def find(made_of: object = cfg, arguments: object = params) -> Path | None:
        return program_cache.find(made_of, (arguments,))

    first = find()
    assert first == find()
    assert first is not None
    assert first.parent == folder
    assert find(dataclasses.replace(cfg, norm_eps=1.0)) != first
    other = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert find(arguments=other) != first
    with jax.default_matmul_precision("highest"):
        assert find() != first
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert find() != first
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "_software", lambda: "another version")
        assert find() != first


@pytest.mark.parametrize("cache", [None, "", "gs://bucket/cache"])
def test_without_a_folder_nothing_is_kept(model, folder, cache):
    jax.config.update("jax_compilation_cache_dir", cache)
    assert program_cache.find("", (model[1],)) is None


def test_the_oldest_entries_go(model, folder, monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_ENTRIES", 1)
    answer(model)
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_does_no_harm(model, folder):
    folder.write_text("in the way")
    assert answer(model)[1] == [False, False]
