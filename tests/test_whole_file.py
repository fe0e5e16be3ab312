"""A file that is there whole or not at all."""

import os
from pathlib import Path

import pytest

from minfer_jax.whole_file import check_apart, replacing


@pytest.fixture(params=[None, b"before"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Of a file that is not there, or has other contents."""
    path = tmp_path / "file"
    if request.param:
        path.write_bytes(request.param)
    return path


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_comes_last(path: Path, durable: bool):
    before = path.read_bytes() if path.exists() else None
    with replacing(path, durable=durable) as file:
        file.write(b"after")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == before
    assert path.read_bytes() == b"after"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_early_end_changes_nothing(path: Path, error: type[BaseException]):
    before = sorted((p.name, p.read_bytes()) for p in path.parent.iterdir())
    with pytest.raises(error), replacing(path) as file:
        file.write(b"after")
        raise error
    assert sorted((p.name, p.read_bytes()) for p in path.parent.iterdir()) == before


def test_an_interrupt_once_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch):
    rename = os.replace

    def interrupted(*names) -> None:
        rename(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"after")
    assert path.read_bytes() == b"after"


def test_contents_and_name_reach_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.exists()))
    path.unlink(missing_ok=True)
    with replacing(path, durable=False):
        pass
    assert synced == []
    path.unlink()
    with replacing(path):
        pass
    assert synced == [False, True]  # the file, then the folder that names it


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "file"):
        pytest.fail("there is nothing to write to")


def test_what_the_system_refuses_is_told_of_the_file_asked_for(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    for name in ("taken", "nowhere/file"):
        with pytest.raises(OSError) as caught, replacing(tmp_path / name) as file:
            file.write(b"after")
        assert caught.value.filename == str(tmp_path / name) and caught.value.strerror
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_pipe_stays_one(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe"), replacing(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("shared", [True, False])
def test_who_may_read_it(path: Path, shared: bool):
    with replacing(path, shared=shared):
        pass
    (path.parent / "plain").touch()
    plain = (path.parent / "plain").stat().st_mode & 0o777
    assert path.stat().st_mode & 0o777 == (plain if shared else 0o600)


def test_what_is_read_is_not_written_over(tmp_path: Path):
    model, new = tmp_path / "model", tmp_path / "new"
    model.write_bytes(b"")
    (tmp_path / "link").symlink_to(model)
    check_apart([new, tmp_path / "other"], [model, tmp_path / "gone"])
    with pytest.raises(OSError, match="link is read here, and would be lost"):
        check_apart([tmp_path / "link"], [model])
    with pytest.raises(OSError, match="would be written twice"):
        check_apart([new, tmp_path / "x" / ".." / "new"], [])
