"""The persistent compile cache: where it lies, when it is used, and when it is left alone."""

import logging
import os
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

from minfer_jax import compile_cache
from tests.helpers.jax_settings import compile_cache_of


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """jax and the environment as if nothing had been set, and put back afterwards."""
    with compile_cache_of(None):
        monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        yield


@pytest.fixture
def hits():
    """A list that grows with every program found in the cache."""
    found = []

    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def compute() -> list[float]:
    """Compiles: the function is another object each time, of which jax knows nothing."""

    def plus_seven(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * x + 7

    return jax.jit(plus_seven)(np.arange(3, dtype=np.float32)).tolist()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("jit_plus_seven-*-cache"))


def test_the_second_compile_is_a_hit(tmp_path, hits):
    folder = compile_cache.enable()
    assert folder is not None
    assert folder.parent == tmp_path / "home" / ".cache" / "minfer" / "compile"
    first = compute()
    assert len(entries(folder)) == 1, "however short the compile"
    assert not hits
    assert compute() == first
    assert len(hits) == 1
    assert len(entries(folder)) == 1


def test_the_folder_is_one_compilers_on_one_kind_of_processor(monkeypatch):
    folder = compile_cache.enable()
    assert folder is not None
    assert folder.name.startswith(f"jaxlib-{jaxlib.version.__version__}-")
    same = compile_cache._compiler_and_cpu()
    assert folder.name == same
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu sse2\nmodel : x\n")
    old = compile_cache._compiler_and_cpu()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu sse2 avx512f\n")
    new = compile_cache._compiler_and_cpu()
    assert len({same, old, new}) == 3


def test_enabling_twice_changes_nothing():
    assert compile_cache.enable() == compile_cache.enable()


@pytest.mark.parametrize("word", ["off", "OFF", "0", "none"])
def test_off(monkeypatch, tmp_path, word):
    monkeypatch.setenv(compile_cache.VARIABLE, word)
    assert compile_cache.enable() is None
    compute()
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert not list(tmp_path.iterdir())


def test_another_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "mine" / "deep"))
    folder = compile_cache.enable()
    assert folder is not None
    assert folder.parent == tmp_path / "mine" / "deep"
    compute()
    assert len(entries(folder)) == 1
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("where", ["below a file", "a file", "a link to nowhere"])
def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path, caplog, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file" / "x")
    path = {"below a file": "file/x", "a file": "file", "a link to nowhere": "link"}[where]
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / path))
    with caplog.at_level(logging.WARNING, "minfer_jax"):
        assert compile_cache.enable() is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith(f"no compile cache: cannot write to {tmp_path}")
    assert compute(), "it works all the same"


def test_a_cache_that_the_user_configured_is_left_alone(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    assert compile_cache.enable() == tmp_path / "theirs"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "theirs")
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 5.0
    assert not (tmp_path / "home").exists()


def test_a_damaged_entry_is_compiled_anew(hits):
    folder = compile_cache.enable()
    assert folder is not None
    first = compute()
    for entry in entries(folder):
        os.truncate(entry, 10)
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        assert compute() == first
    assert not hits


def test_without_a_home_folder(monkeypatch, caplog):
    def no_home(self: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with caplog.at_level(logging.WARNING, "minfer_jax"):
        assert compile_cache.enable() is None
    assert "no compile cache" in caplog.text
