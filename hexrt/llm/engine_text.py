"""From answer ids to text, id by id: nothing is given out that a later id could change or a stop string could take back.

Owns the ids of one answer and the text that is held back. Depends on the ids alone, not on how they were chunked, so a restart that
pushes the same ids again stands at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole UTF-8 character."""
MOST_HELD = 16
"""More ids than any character has bytes: what is unfinished after so many is no character."""


class Detokeniser:
    """Turns ids into pieces of text whose concatenation is the text of all ids.

    `decode` is asked for the last few ids only: those since the last piece, after those of the piece before for context.
    """

    __slots__ = ("_before", "_context", "_decode", "_given", "_ids")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # _ids[_context:_given] is the text of the last piece
        self._given = 0
        self._before = ""  # that text

    def push(self, token: int) -> str:
        """The text that became certain with this id; empty in the middle of a character."""
        self._ids.append(token)
        return self._take(whole=False)

    def push_all(self, tokens: Sequence[int]) -> str:
        """What pushing one after the other gives, in one piece and mostly with one decoding."""
        if len(tokens) < 2:
            return "".join(map(self.push, tokens))
        begin = len(self._ids)
        self._ids.extend(tokens)
        text = self._decode(self._ids[self._context :])
        if UNFINISHED not in text and len(text) > len(self._before):
            return self._give(text)
        del self._ids[begin:]  # where a character ends, and what counts as one, is seen id by id
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        """The text of what is left, unfinished characters as U+FFFD."""
        return self._take(whole=True)

    def _take(self, whole: bool) -> str:
        text = self._decode(self._ids[self._context :])
        if not whole and text.endswith(UNFINISHED) and len(self._ids) - self._given < MOST_HELD:
            return ""
        return self._give(text) if len(text) > len(self._before) else ""

    def _give(self, text: str) -> str:
        """Gives out all of `text`, which begins with the piece before."""
        new = text[len(self._before) :]
        self._context, self._given = self._given, len(self._ids)
        self._before = self._decode(self._ids[self._context :])
        return new


class StopCutter:
    """Lets text through up to the first stop string, holding back what may yet become one."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        if self.stopped or not piece:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What was held back, when no more can come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of `text` that is a beginning of `stop`."""
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0


class AnswerText:
    """The text of one answer under its stop strings."""

    __slots__ = ("_cutter", "_detokeniser", "has_stops")

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(decode)
        self._cutter = StopCutter(stops)
        self.has_stops = bool(stops)

    @property
    def stopped(self) -> bool:
        return self._cutter.stopped

    def push(self, token: int) -> str:
        return self._cutter.push(self._detokeniser.push(token))

    def push_all(self, tokens: Sequence[int]) -> str:
        """As `push`, for many at once; with stop strings, in which the very token counts, it does not say at which they stopped."""
        if self.has_stops:
            return "".join(map(self.push, tokens))
        return self._detokeniser.push_all(tokens)

    def flush(self) -> str:
        """The rest, at the end of the answer. A stop string that only the rest completes still cuts."""
        text = self._cutter.push(self._detokeniser.flush())
        return text if self._cutter.stopped else text + self._cutter.flush()
