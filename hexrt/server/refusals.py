"""Turns an undecodable frame into an error that names the field.

Owns the reading of msgspec's messages. Pure, and used only where something is already wrong.
"""

from __future__ import annotations

import re

import msgspec

from hexrt.errors import BadRequest

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError, MemoryError)
"""What decoding a hostile frame may raise."""

_PLACE = re.compile(r" - at (?:`(key|value)` in )?`\$(.*)`$", re.DOTALL)
_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`", re.DOTALL)
MAX_MESSAGE = 500


class _Numbered(msgspec.Struct):
    request: int


_numbered = msgspec.msgpack.Decoder(_Numbered)


def bad_frame(error: BaseException) -> BadRequest:
    """`where` is the field's path as the user knows it: within a submitted workflow it starts at the workflow."""
    if isinstance(error, RecursionError):
        return BadRequest("the message is nested too deeply", "frame")
    if not isinstance(error, msgspec.ValidationError):
        return BadRequest(f"the frame is not one whole msgpack message: {error}"[:MAX_MESSAGE], "frame")
    text = str(error)
    place = _PLACE.search(text)
    path = ""
    if place is not None:
        text = text[: place.start()]
        path = place.group(2).lstrip(".")
        if place.group(1) == "key":
            text = f"in a key: {text}"
    field = _FIELD.match(text)
    if field is not None:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        text = "a required field is missing" if "missing" in text[:20] else "there is no such field"
    return BadRequest(text[:MAX_MESSAGE], path.removeprefix("workflow.")[:MAX_MESSAGE] or "frame")


def request_number(body: bytes) -> int | None:
    """The number of a request whose other fields are wrong, None where not even that can be read."""
    try:
        number = _numbered.decode(body).request
    except UNREADABLE:
        return None
    return number if 0 <= number < 2**63 else None
