from __future__ import annotations

from typing import Any

import pytest

from accel_impl.tokenizer import StopText, TextFront, TextStream
from harness.adapter import silent
from harness.errors import PortError
from harness.types import Case

BOS, USER, ASSISTANT, END = 256, 259, 260, 261


def test_a_prompt_and_a_conversation_begin_once(opened: Any) -> None:
    """A plain prompt gets <bos> from the tokenizer, a conversation from its template only."""
    port = opened()
    assert port.encode("hi") == [BOS, *b"hi"]
    case = Case(id="c", messages=({"role": "user", "content": "hi"},))
    ids = port.prepare(case, silent).token_ids[0].tolist()
    assert ids == [BOS, USER, *b"hi", END, ASSISTANT]
    assert port.decode(ids) == "hi"


def test_a_role_that_the_template_refuses_is_an_error(opened: Any) -> None:
    """The template's own words reach the caller."""
    with pytest.raises(PortError, match="user or assistant, found robot"):
        opened().render([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize("text", ["né 世界 👋🏽", "\u00e9", "a\ufffdb"])
def test_streamed_pieces_join_to_the_text(opened: Any, text: str) -> None:
    """Pieces never end inside a character, and join to the text decoded at once."""
    front: TextFront = opened().front()
    stream, ids = TextStream(front), list(text.encode())
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.end() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_broken_bytes_at_the_end_are_given_at_the_end(opened: Any) -> None:
    """An answer that stops inside a character streams to what it decodes to at once."""
    front: TextFront = opened().front()
    stream, ids = TextStream(front), [*b"ok", 0xE4, 0xB8]
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == "ok"
    assert "ok" + stream.end() == front.decode(ids)


@pytest.mark.parametrize("pieces", [["ab", "cEN", "Dx"], ["abcENDx"], list("abcENDx")])
def test_text_ends_before_a_stop_however_it_is_cut(pieces: list[str]) -> None:
    """A stop string that spans pieces is found, nothing of it or behind it is given."""
    stop = StopText(["END", "ENQ"])
    assert "".join(map(stop.push, pieces)) + stop.end() == "abc"
    assert stop.met


def test_the_beginning_of_a_stop_is_given_once_it_is_none() -> None:
    """What was held back comes when the text goes on otherwise, or ends."""
    stop = StopText(["END"])
    assert [stop.push("aE"), stop.push("N"), stop.push("X"), stop.push("EN"), stop.end()] == ["a", "", "ENX", "", "EN"]
    assert not stop.met
