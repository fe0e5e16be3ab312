"""Stop strings: where the text is cut, that pieces do not matter, and that little is held back."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minfer_jax.stop_strings import StopStrings

# Few letters, so that stops overlap the text and one another.
texts = st.text("ab\n€", max_size=20)
stop_lists = st.lists(st.text("ab\n€", max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 20), max_size=8)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is to come out: the stop that is complete first counts, of several the longest.

    So no text has to be generated after a stop, to see whether a longer one around it follows.
    """
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if s and text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def split(text: str, at: list[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    bounds = [0, *sorted(min(i, len(text)) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(texts, stop_lists, cuts)
@example("abab", ["abab", "ba"], [])  # "ba" is complete first, though "abab" begins first
@example("abab", ["abab", "ba"], [3])
@example("ab", ["ab", "b"], [1])  # complete together: the longer
@example("ab", ["a", "ab"], [])  # one begins the other
@example("aab", ["ab"], [1, 2])  # what was held back turns out to begin later
@example("ab", ["", "b"], [0, 0, 1])
def test_any_split_of_any_text_is_cut_at_the_same_place(text, stops, at):
    stop = StopStrings(stops)
    out = "".join([stop.push(piece) for piece in split(text, at)])
    expected, stopped = cut_at_stop(text, stops)
    assert stop.stopped == stopped
    assert out + stop.flush() == expected


@given(texts, stop_lists, cuts)
def test_only_what_may_become_a_stop_is_held_back(text, stops, at):
    stop, seen, out = StopStrings(stops), "", ""
    for piece in split(text, at):
        seen += piece
        out += stop.push(piece)
        if stop.stopped:
            break
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(s.startswith(held) and s != held for s in stops)
        assert not any(seen.endswith(s[:n]) for s in stops for n in range(len(held) + 1, len(s)))


@given(texts, cuts)
def test_without_stops_every_piece_passes_at_once(text, at):
    stop = StopStrings([""])
    pieces = split(text, at)
    assert [stop.push(piece) for piece in pieces] == pieces
    assert stop.flush() == ""
    assert not stop.stopped


@pytest.mark.parametrize("then", ["", "D", "END", "more"])
def test_nothing_comes_out_after_a_stop(then):
    stop = StopStrings(["END"])
    assert stop.push("one ENDING") == "one "
    assert (stop.push(then), stop.flush(), stop.stopped) == ("", "", True)


def test_the_examples_of_the_documentation():
    stop = StopStrings(["END"])
    assert [stop.push(piece) for piece in ("one E", "N", "D two")] == ["one ", "", ""]
    assert stop.stopped
    stop = StopStrings(["END"])
    assert [stop.push(piece) for piece in ("one E", "N", "OUGH")] == ["one ", "", "ENOUGH"]
    assert not stop.stopped
    assert stop.flush() == ""


def test_text_held_back_at_the_end_is_not_lost():
    stop = StopStrings(["END"])
    assert stop.push("to the EN") == "to the "
    assert (stop.flush(), stop.flush(), stop.stopped) == ("EN", "", False)


def test_a_single_string_is_one_stop():
    stops = StopStrings("blue")
    assert stops.push("the blue sky") == "the "
    assert stops.stopped
