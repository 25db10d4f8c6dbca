"""Shows a run while it goes on: a table that is drawn anew on a terminal, plain lines elsewhere.

Owns what is shown, on standard error, so that standard output holds the result alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hexrt.cli.output import error_text, one_line, visible
from hexrt.protocol.messages import Update

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

MOST_ROWS = 24
MOST_NAME = 24
KEPT_TEXT = 400
STYLES = {
    "done": "green",
    "failed": "red",
    "cancelled": "yellow",
    "skipped": "yellow",
    "unknown": "yellow",
    "started": "cyan",
}
ENDED = frozenset({"done", "failed", "cancelled", "skipped", "unknown"})


class View(Protocol):
    def accepted(self, run: str) -> None: ...

    def update(self, update: Update) -> None: ...


class Silent:
    def accepted(self, run: str) -> None:
        """For `--json`."""

    def update(self, update: Update) -> None:
        """For `--json`."""


class PlainView:
    """A line an event, written at once."""

    def accepted(self, run: str) -> None:
        print(f"run {run}", file=sys.stderr, flush=True)

    def update(self, update: Update) -> None:
        print(event_line(update), file=sys.stderr, flush=True)


def event_line(update: Update) -> str:
    """One event in one line; a map's parts by their position."""
    name = f"{update.step}[{update.part}]" if update.part else update.step
    rest = f" on {update.device}" if update.device and update.event in ("placed", "started", "done") else ""
    if update.event == "tokens":
        rest = f" {visible(update.text).replace(chr(10), chr(0x23CE))}"
    elif update.error is not None:
        rest = f" {error_text(update.error)}"
    elif update.attempt > 1:
        rest += f" (attempt {update.attempt})"
    return f"{one_line(name)} {update.event}{rest}"


@dataclass(slots=True)
class _Row:
    state: str = "waiting"
    device: str = ""
    ended: int = 0
    text: str = ""
    error: str = ""


class _Newest:
    """The end of a text, as much of it as its column has room for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        room, text = options.max_width, self._text
        yield Text(text if len(text) <= room else f"…{text[len(text) - room + 1 :]}", no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(1, max(1, len(self._text)))


class LiveView:
    """The steps as a table. `update` is called on one thread while another draws."""

    def __init__(self) -> None:
        self._run = ""
        self._rows: dict[str, _Row] = {}

    def accepted(self, run: str) -> None:
        self._run = run

    def update(self, update: Update) -> None:
        row = self._rows.setdefault(update.step, _Row())
        row.device = update.device or row.device
        if update.event == "tokens":
            row.state = "started"  # a step's later parts are not told of; their text is
            row.text = (row.text + update.text)[-KEPT_TEXT:]
            row.error = ""  # of an earlier attempt
            return
        row.state = update.event
        row.ended += update.event in ENDED
        if update.error is not None:
            row.error = error_text(update.error)

    def draw(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        title = f"run {self._run}" if self._run else None
        table = Table(box=None, pad_edge=False, expand=True, title=title, title_justify="left")
        table.add_column("step", no_wrap=True, overflow="ellipsis", max_width=MOST_NAME)
        for column in ("state", "device", "ended"):
            table.add_column(column, no_wrap=True)
        table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
        rows = list(self._rows.items())
        shown = [r for r in rows if r[1].state not in ENDED][-MOST_ROWS:]
        ended = [r for r in rows if r[1].state in ENDED]
        shown = ended[len(ended) - max(MOST_ROWS - len(shown), 0) :] + shown if len(shown) < MOST_ROWS else shown
        for name, row in shown:
            text = Text(row.error) if row.error else _Newest(one_line(row.text))
            state = Text(row.state, STYLES.get(row.state, ""))
            table.add_row(Text(one_line(name)), state, row.device, str(row.ended), text)
        if len(shown) < len(rows):
            table.add_row(f"... and {len(rows) - len(shown)} more", "", "", "", "")
        return table


@contextmanager
def view(silent: bool) -> Iterator[View]:
    """The view that fits standard error."""
    if silent:
        yield Silent()
    elif not sys.stderr.isatty():
        yield PlainView()
    else:
        from rich.console import Console
        from rich.live import Live

        shown = LiveView()
        live: Any = Live(get_renderable=shown.draw, console=Console(stderr=True), refresh_per_second=8)
        with live:
            yield shown
