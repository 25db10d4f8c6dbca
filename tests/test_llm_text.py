"""Text comes out only when it is certain: whole characters, nothing of a stop string, the same whatever came in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexrt.llm.engine_text import AnswerText, Detokeniser, StopCutter


def decode_bytes(ids: Sequence[int]) -> str:
    """A vocabulary of the 256 bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def feed(text: AnswerText, data: bytes) -> list[str]:
    return [text.push(byte) for byte in data]


def test_a_character_comes_out_with_its_last_byte() -> None:
    text = AnswerText(decode_bytes, ())
    assert feed(text, "aé€🙂b".encode()) == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    text = AnswerText(decode_bytes, ())
    assert feed(text, b"a\xe2\x82") == ["a", "", ""]
    assert text.flush() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_the_answer_back_for_ever() -> None:
    text = AnswerText(decode_bytes, ())
    assert "".join(feed(text, b"\xff" * 40)).count("\ufffd") >= 16


@given(st.text(max_size=40))
def test_the_pieces_make_up_the_whole_text(words: str) -> None:
    detokeniser = Detokeniser(decode_bytes)
    pieces = [detokeniser.push(byte) for byte in words.encode()]
    assert "".join(pieces) + detokeniser.flush() == words


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = AnswerText(decode_bytes, ("END",))
    assert feed(text, b"aENxEN") == ["a", "", "", "ENx", "", ""]
    assert text.flush() == "EN"
    assert not text.stopped


def test_the_text_is_cut_where_the_first_stop_string_begins() -> None:
    text = AnswerText(decode_bytes, ("\n\n", "END"))
    pieces = feed(text, b"one\ntwoENDthree\n\n")
    assert "".join(pieces) == "one\ntwo"
    assert text.stopped
    assert text.flush() == ""


def test_the_earliest_of_two_stop_strings_in_one_piece_cuts() -> None:
    cutter = StopCutter(("later", "soon"))
    assert cutter.push("a soon b later") == "a "
    assert cutter.stopped


def test_a_stop_string_that_starts_inside_a_false_start_is_found() -> None:
    text = AnswerText(decode_bytes, ("aab",))
    assert "".join(feed(text, b"xaaab")) == "xa"
    assert text.stopped


@pytest.mark.parametrize("cut", range(12))
def test_pushing_the_same_ids_again_stands_at_the_same_place(cut: int) -> None:
    data = "né STOXSTO€STOP".encode()
    whole = AnswerText(decode_bytes, ("STOP",))
    pieces = feed(whole, data)
    again = AnswerText(decode_bytes, ("STOP",))
    feed(again, data[:cut])
    assert feed(again, data[cut:]) == pieces[cut:]


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_no_stop_string_is_ever_given_out_and_nothing_before_it_is_lost(words: str, stops: list[str]) -> None:
    text = AnswerText(decode_bytes, stops)
    out = ""
    for byte in words.encode():
        out += text.push(byte)
        if text.stopped:
            break
    out += text.flush()
    ends = sorted((words.find(stop) + len(stop), words.find(stop)) for stop in stops if stop in words)
    if not ends:
        assert out == words
    else:
        first_end = ends[0][0]
        assert out == words[: min(start for end, start in ends if end == first_end)]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(1, 9), max_size=12))
def test_pushing_many_at_once_gives_out_what_pushing_each_does(data: bytes, sizes: list[int]) -> None:
    """At every cut, so that a restart, which cuts elsewhere, knows what was given out."""
    each, many = AnswerText(decode_bytes, ()), AnswerText(decode_bytes, ())
    one_by_one, at_once, at = "", "", 0
    for size in [*sizes, 40]:
        one_by_one += "".join(feed(each, data[at : at + size]))
        at_once += many.push_all(list(data[at : at + size]))
        assert one_by_one == at_once
        at += size
    assert one_by_one + each.flush() == at_once + many.flush()
