"""What the demo shows while its runs go on: a live line per run on a terminal, plain lines elsewhere.

A view is told of a run's beginning, of each update and of its end. Text of a model is shown without control characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hexrt.protocol.messages import Update

LINE = 90
BAR = 15
DOING = 20


def printable(text: str) -> str:
    """One line of `text`, control and format characters left out."""
    return " ".join("".join(c if not unicodedata.category(c).startswith("C") else " " for c in text).split())


class View(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, run: str, steps: Sequence[str]) -> None:
        """A run was accepted."""

    def update(self, run: str, update: Update) -> None: ...

    def end(self, run: str, state: str) -> None: ...


class PlainView:
    """A line for each step that ended, and one for each piece of text of some length."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held back beyond a run's end."""

    def _say(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def begin(self, run: str, steps: Sequence[str]) -> None:
        self._say(f"{run}: begins, {len(steps)} steps")

    def update(self, run: str, update: Update) -> None:
        key = run, update.step
        if update.event == "tokens":
            self._text[key] = self._text.get(key, "") + update.text
            if len(self._text[key]) >= LINE:
                self._say(f"{run} | {update.step} | {printable(self._text.pop(key))}")
        elif update.event in ("done", "failed", "cancelled", "skipped", "unknown"):
            rest = printable(self._text.pop(key, ""))
            if rest:
                self._say(f"{run} | {update.step} | {rest}")
            why = f": {update.error.message}" if update.error is not None else ""
            where = f" on {update.device}" if update.device else ""
            self._say(f"{run}: {update.step} {update.event}{where}{why}")

    def end(self, run: str, state: str) -> None:
        self._say(f"{run}: {state}")


class _Line:
    """One run on the screen."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.left = set(steps)
        self.total = len(self.left)
        self.going: dict[str, str] = {}
        self.speaker = ""
        self.text = ""
        self.state = ""

    def take(self, update: Update) -> None:
        if update.event == "started":
            self.going[update.step] = update.device
        elif update.event == "tokens":
            if self.speaker != update.step:
                self.speaker, self.text = update.step, ""
            self.text = (self.text + update.text)[-400:]
        elif update.event in ("done", "failed", "cancelled", "skipped", "unknown"):
            self.going.pop(update.step, None)
            self.left.discard(update.step)

    def cells(self, room: int) -> tuple[Text, Text, Text]:
        """Progress, the steps that run, and the newest text of the model in `room` columns."""
        done = self.total - len(self.left)
        filled = round(BAR * done / max(1, self.total))
        bar = Text("━" * filled, "green") + Text("━" * (BAR - filled), "bright_black") + Text(f" {done}/{self.total}")
        doing = (
            Text(self.state, "green" if self.state == "succeeded" else "red")
            if self.state
            else Text(" ".join(self.going))
        )
        said = printable(self.text)
        room -= len(self.speaker) + 2
        said = "…" + said[1 - room :] if len(said) > room > 1 else said
        return bar, doing, Text.assemble((f"{self.speaker}: ", "cyan") if self.speaker else "", said)


class LiveView:
    """A line per run, redrawn in place: how far it is, what runs, and the newest text of its model."""

    def __init__(self, console: Console) -> None:
        self._lines: dict[str, _Line] = {}
        self._console = console
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def _draw(self) -> Group:
        lines = list(self._lines.items())
        label = max((len(run) for run, _ in lines), default=0)
        table = Table.grid(padding=(0, 2, 0, 0))
        for width in (label, BAR + 6, DOING):
            table.add_column(no_wrap=True, width=width, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis")
        room = max(10, self._console.width - label - BAR - 6 - DOING - 6)
        for run, line in lines:
            table.add_row(Text(run, "bold"), *line.cells(room))
        return Group(table)

    def begin(self, run: str, steps: Sequence[str]) -> None:
        self._lines[run] = _Line(steps)

    def update(self, run: str, update: Update) -> None:
        self._lines[run].take(update)

    def end(self, run: str, state: str) -> None:
        self._lines[run].state = state
