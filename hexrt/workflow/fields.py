"""Says where in a workflow a fault lies and what to write instead. Used by `check`, `load` and `build`. Pure.

A place is written `steps.hits.inputs.query[2].text`: keys by dots, list positions in brackets, steps by id.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec

from hexrt.errors import BadRequest

_PATH = re.compile(r"\$([^`]*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `([^`]*)`")
MOST_SHOWN = 12
MOST_TEXT = 500
MOST_COMPARED = 500
"""Names that a wrong one is compared with: the comparison is slow, and many names that look alike help nobody."""


def place(prefix: str, at: Iterable[str | int]) -> str:
    """`place("inputs", ("texts", 2))` is `inputs.texts[2]`."""
    return prefix + "".join(f"[{key}]" if isinstance(key, int) else f".{shown(key)}" for key in at)


def shown(key: str) -> str:
    """`key` as part of a place: in one line, cut where it is long."""
    text = key[:80]
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence: the nearest of `known`, else all of them where they are few."""
    from difflib import get_close_matches  # for bad input only: not part of the daemon's start

    names = sorted(known) if len(known) <= MOST_COMPARED else []
    near = get_close_matches(name, names, 1) if len(name) <= 200 else []
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return ""
    shown = ", ".join(names[:MOST_SHOWN])
    return f"; there are: {shown}" + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")


def quoted(name: object) -> str:
    """`name` for a message, cut where it is long."""
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."


def field_error(error: msgspec.ValidationError, prefix: str, known: Sequence[str] = ()) -> BadRequest:
    """msgspec's complaint as a BadRequest whose `where` is `prefix` and the path of the field. `known` are the fields that exist there."""
    text, _, at = str(error).partition(" - at ")
    found = _PATH.search(at)
    path = prefix + (found[1] if found else "")
    text = text[:1].lower() + text[1:]
    field = _FIELD.search(text)
    if field is not None:
        path = f"{path}.{shown(field[1])}"
        if "unknown" in text:
            text = f"there is no such field{did_you_mean(field[1], known) if known else ''}"
        else:
            text = "this field is required: give it a value"
    return BadRequest(text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + "...", path.lstrip("."))
