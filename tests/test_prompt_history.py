"""What was typed before: bounded, private, and never the reason for which a conversation ends."""

import re

from minfer_jax import prompt_history


def test_the_history_is_bounded_and_survives(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "history"
    monkeypatch.setenv(prompt_history.VARIABLE, str(path))
    monkeypatch.setattr(prompt_history, "_LONGEST", 2000)
    history = prompt_history.open_history()
    for i in range(100):
        history.append_string(f"word {i}\nand more")
    history = prompt_history.open_history()
    found = list(history.load_history_strings())
    assert found[0] == "word 99\nand more"
    assert 5 < len(found) < 40
    assert all(re.fullmatch(r"word \d+\nand more", text) for text in found)
    assert path.stat().st_size <= 1000
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.mkdir()
    history.append_string("still there")  # in memory
    assert history.get_strings() == ["still there"]
    for name in ("off", str(path), "/proc/none/history", "~nobody-of-this-name/history"):
        monkeypatch.setenv(prompt_history.VARIABLE, name)
        history = prompt_history.open_history()
        history.append_string("word")
        assert history.get_strings() == ["word"]
