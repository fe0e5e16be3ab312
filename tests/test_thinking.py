"""Thoughts told from the answer, however both are cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.thinking import ThinkingSplitter, opens_thinking


def split(pieces: list[str], begun: bool = False) -> tuple[str, str, list[tuple[str, bool]]]:
    """(thoughts, the rest, all parts)."""
    splitter = ThinkingSplitter(begun=begun)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    thoughts, rest = (
        "".join(t for t, is_thought in parts if is_thought is w) for w in (True, False)
    )
    return thoughts, rest, parts


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "rest"),
    [
        ("<think>Hm</think>Yes", False, "<think>Hm</think>", "Yes"),
        ("\n <think>Hm</think>\n\nYes", False, "<think>Hm</think>", "\n \n\nYes"),
        ("Hm</think>Yes", True, "Hm</think>", "Yes"),
        ("<think></think>", False, "<think></think>", ""),
        ("<think>no end", False, "<think>no end", ""),
        ("<think>a<think>b</think>c</think>d", False, "<think>a<think>b</think>", "c</think>d"),
        ("Write <think> so </think>.", False, "", "Write <think> so </think>."),
        ("<thin", False, "", "<thin"),
        ("<thinker>", False, "", "<thinker>"),
        (" \n", False, "", " \n"),
        ("a</thin", True, "a</thin", ""),
        ("", False, "", ""),
        ("", True, "", ""),
        ("Hm</think>Yes", False, "", "Hm</think>Yes"),
    ],
)
def test_what_is_a_thought(text, begun, thoughts, rest):
    for pieces in ([text], list(text), [text[:3], text[3:]], [text[:8], text[8:]]):
        assert split(pieces, begun)[:2] == (thoughts, rest)


@given(
    st.lists(st.sampled_from(["<", "<th", "ink>", "</think>", "<think>", "a", " ", "\n", ""])),
    st.booleans(),
)
def test_nothing_is_lost_and_pieces_do_not_count(pieces, begun):
    thoughts, rest, parts = split(pieces, begun)
    whole = "".join(pieces)
    assert "".join(text for text, _ in parts) == whole
    assert split([whole], begun)[:2] == (thoughts, rest)


def test_nothing_is_held_back_for_long():
    splitter = ThinkingSplitter()
    assert splitter.push("Hello <thi") == [("Hello <thi", False)]
    splitter = ThinkingSplitter()
    assert splitter.push("<think>Hm, </t") == [("<think>Hm, ", True)]
    assert splitter.push("wo") == [("</two", True)]


def test_a_prompt_may_open_the_thoughts():
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("")
