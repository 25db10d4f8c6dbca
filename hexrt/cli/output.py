"""What commands print: JSON for programs, tables and texts for people.

Owns the forms. What a model or a workflow wrote cannot steer a terminal: control characters are shown, not sent.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hexrt.client import Outcome
from hexrt.errors import ErrorRecord

CONTROL = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | dict.fromkeys(range(127, 160), 0xFFFD)
MOST_NUMBERS = 8  # of an array
MOST_ARRAYS = 8  # of a list of nothing else


def visible(text: str) -> str:
    """`text` with control characters, tabs and line ends apart, as pictures of them."""
    return text.translate(CONTROL)


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def print_text(text: str) -> None:
    print(visible(text))


def print_json(value: Any) -> None:
    """One line: messages as objects, ids in hex, bytes in base64, tensors as lists, and null for what is no number."""
    sys.stdout.write(msgspec.json.encode(plain(value)).decode() + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """`value` as JSON can say it."""
    if isinstance(value, msgspec.Struct):
        return plain({name: getattr(value, name) for name in value.__struct_fields__ if name != "request"})
    if isinstance(value, Outcome):
        return plain(
            {"run": value.run, "state": value.state, "outputs": dict(value.outputs), "errors": dict(value.errors)}
        )
    if isinstance(value, Mapping):
        return {str(key): part.hex() if key == "run" and isinstance(part, bytes) else plain(part) for key, part in value.items()}  # fmt: skip
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, complex):
        return [value.real, value.imag]
    return value


def for_people(value: Any) -> str:
    """A text as it is, a tensor by dtype, shape and first numbers, anything else as JSON, with such words for the tensors in it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if _is_array(value):
        return _in_short(value)
    return msgspec.json.encode(plain(_with_arrays_in_short(value))).decode()


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "ravel")


def _in_short(array: Any) -> str:
    numbers = array.ravel()[:MOST_NUMBERS].tolist()
    shown = ", ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers)
    return f"{array.dtype}{list(array.shape)} {shown}{', ...' if array.size > MOST_NUMBERS else ''}"


def _with_arrays_in_short(value: Any) -> Any:
    if _is_array(value):
        return _in_short(value)
    if isinstance(value, Mapping):
        return {key: _with_arrays_in_short(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > MOST_ARRAYS and all(map(_is_array, value)):
            return [*map(_in_short, value[:MOST_ARRAYS]), f"... and {len(value) - MOST_ARRAYS} more"]
        return [_with_arrays_in_short(part) for part in value]
    return value


def error_text(error: ErrorRecord) -> str:
    """Its kind, the field that it is about where it is about one, and its message."""
    where = f"{error.where}: " if "." in error.where else ""
    return one_line(f"{error.kind}: {where}{error.message}")


def print_outcome(outcome: Outcome) -> None:
    """The outputs on standard output, by name where there are several; errors on standard error."""
    for name, value in outcome.outputs.items():
        text = for_people(value)
        print_text(text if len(outcome.outputs) == 1 else f"{name}:{chr(10) if chr(10) in text else ' '}{text}")
    for step, error in outcome.errors.items():
        print(f"{one_line(step)}: {error_text(error)}", file=sys.stderr)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Fitted to a terminal's width; elsewhere every cell whole, on a line a row."""
    lines = [tuple(one_line(cell) for cell in row) for row in rows]
    if not sys.stdout.isatty():
        lines.insert(0, tuple(columns))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 100 else f"{value:.0f} s"


def wall(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns / 1e9))
