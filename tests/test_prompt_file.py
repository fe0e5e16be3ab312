"""A prompt from a file or from standard input."""

import io
import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax import prompt_file
from minfer_jax.prompt_file import decoded, read_text
from minfer_jax.usage import UsageError


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"hello", "hello"),
        (b"hello\n", "hello"),
        (b"hello\r\n", "hello"),
        (b"two\r\nlines\r\n\r\n", "two\nlines\n"),
        (b"a\rb", "a\rb"),
        (" 東京\n".encode(), " 東京"),
        (b"\xef\xbb\xbfhello\r\n", "hello"),
        (b"\xef\xbb\xbf", ""),
        ("héllo\r\n".encode("utf-16"), "héllo"),  # as PowerShell redirects, with its mark
        (b"\xfe\xff" + "a\r\n\U0001f600\n".encode("utf-16-be"), "a\n\U0001f600"),
        ("a\ufffdb".encode(), "a\ufffdb"),
        ("\ufeff\ufeffa".encode(), "\ufeffa"),
    ],
)
def test_a_text_is_the_same_from_any_system(tmp_path, monkeypatch, caplog, data, text):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_text(str(path)) == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    assert read_text("-") == text
    assert not caplog.records


@given(st.text(st.characters(exclude_characters="\r\0\ufeff", exclude_categories=("Cs",))))
def test_any_text_comes_back_from_either_encoding(text):
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        for line_end in ("\n", "\r\n"):
            raw = (text.replace("\n", line_end) + line_end).encode(encoding)
            assert decoded(raw, "x") == text


@pytest.mark.parametrize(
    ("data", "text", "at"),
    [(b"caf\xe9 \xff\n", "caf\ufffd \ufffd", "not utf-8 at byte 3"), (b"\xff\xfea", "\ufffd", "0")],
)
def test_what_is_not_in_its_encoding_is_told(caplog, data, text, at):
    with caplog.at_level(logging.WARNING, "minfer_jax"):
        assert decoded(data, "the file") == text
    (record,) = caplog.records
    assert record.getMessage().startswith("the file is not utf-")
    assert at in record.getMessage()


def test_a_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert read_text("-") == ""


def test_files_that_are_no_prompt(tmp_path, monkeypatch):
    def refused(path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            read_text(str(path))
        message = str(caught.value)
        assert message.startswith(f"the prompt file {str(path)!r} ")
        assert message.isprintable()
        return message

    path = tmp_path / "prompt\n.txt"
    assert refused(path).endswith("does not exist")
    assert "is a folder" in refused(tmp_path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert "is no text: there is a NUL in it" in refused(path)
    monkeypatch.setattr(prompt_file, "LONGEST", 9)
    assert "holds more than 9 bytes" in refused(path)
    path.write_bytes(b"123456789")
    assert read_text(str(path)) == "123456789"
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read: " in refused(tmp_path / "loop")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no endless file")
def test_an_endless_file_is_read_to_its_bound(monkeypatch):
    monkeypatch.setattr(prompt_file, "LONGEST", 1 << 16)
    with pytest.raises(UsageError, match="holds more than 65536 bytes"):
        read_text("/dev/zero")


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="pipes have no paths")
def test_a_pipe_is_a_file(tmp_path):
    """As `-f <(command)` of a shell."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"hello\n")
    os.close(write_end)
    try:
        assert read_text(f"/dev/fd/{read_end}") == "hello"
    finally:
        os.close(read_end)
