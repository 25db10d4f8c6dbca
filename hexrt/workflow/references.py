"""Reads the literals and references of a workflow: `$ref`, `$item`, `$file` and what stands between them.

Owns the reference notation that `model` describes. Everything here is bounded by the nesting that the caller allows. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from hexrt.errors import BadRequest
from hexrt.values import DESCRIPTOR, TENSOR, bytes_of, handle_of, is_array, tensor, tensor_meta
from hexrt.workflow.fields import place, quoted
from hexrt.workflow.model import FILE, ITEM, REF

Path = tuple[str | int, ...]

MOST_NESTING = 100
"""What `GraphLimits.max_nesting` may be at most: the walk calls itself once a level."""
MOST_KEYS = 64
MOST_VALUES = 200_000
"""Values in the inputs, params or map of one step, since they are walked through without a pause; a list of plain scalars counts an eighth."""
MOST_REFERENCES = 10_000
_POSITION = re.compile(r"0|-?[1-9][0-9]{0,8}")
_INT_LOW, _INT_HIGH = -(2**63), 2**64 - 1


class Reference(msgspec.Struct, frozen=True, gc=False):
    """A reference as written: into a step's output, or with `step` None into the map element."""

    step: str | None
    path: Path


class Hole(msgspec.Struct, frozen=True, gc=False):
    """Where in a value a reference stood."""

    to: Path
    reference: Reference


def parse_path(text: str) -> Path:
    """`documents.0.text` to its keys and positions. Raises BadRequest."""
    keys = text.split(".")
    if len(keys) == 1 and not _POSITION.match(text):
        return (text,)
    if len(keys) > MOST_KEYS:
        raise BadRequest(f"a reference has at most {MOST_KEYS} keys")
    if not all(keys):
        raise BadRequest(
            f"{quoted(text)} has an empty key: write keys with one dot between them, as in `hits.documents.0.text`"
        )
    return tuple(int(key) if _POSITION.fullmatch(key) else key for key in keys)


def write_path(path: Sequence[str | int]) -> str | list[str | int]:
    """The text form of a path, or the list form where a key would not survive as text."""
    plain = all(isinstance(key, int) or (key and "." not in key and not _POSITION.fullmatch(key)) for key in path)
    return ".".join(map(str, path)) if plain else list(path)


def _listed_path(value: Sequence[Any], name: str) -> Path:
    if len(value) > MOST_KEYS:
        raise BadRequest(f"a reference has at most {MOST_KEYS} keys")
    for key in value:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise BadRequest(f"a `{name}` list holds keys (text) and positions (whole numbers), not {quoted(key)}")
        if isinstance(key, int) and abs(key) >= 10**9:
            raise BadRequest(f"position {quoted(key)} is out of range")
    return tuple(value)


def _parse(name: str, value: Any) -> Reference:
    if isinstance(value, str):
        path = parse_path(value) if value else ()
    elif isinstance(value, list | tuple):
        path = _listed_path(value, name)
    else:
        raise BadRequest(f"`{name}` needs text such as `hits.documents.0`, not {quoted(value)}")
    if name == ITEM:
        return Reference(None, path)
    if not path:
        raise BadRequest(
            "`$ref` is empty: write the id of a step, then a path into its output, as in `hits.documents.0`"
        )
    if not isinstance(path[0], str):
        raise BadRequest(f"a `$ref` begins with the id of a step, not with {path[0]}")
    return Reference(path[0], path[1:])


def as_reference(value: dict[Any, Any]) -> Reference | None:
    """The reference that this dict is, or None where it is plain data. Raises BadRequest where it is a malformed one.

    A `$ref` that begins with `#` is a pointer inside a JSON Schema, hence data.
    """
    for name in (REF, ITEM, FILE):
        if name not in value:
            continue
        inner = value[name]
        if name == REF and isinstance(inner, str) and inner.startswith("#"):
            return None
        if len(value) > 1:
            others = ", ".join(quoted(key) for key in value if key != name)
            raise BadRequest(f"a dict with `{name}` holds nothing else: take out {others}")
        if name == FILE:
            raise BadRequest("`$file` is read on the client's side: load the file with `load_workflow` or `hexrt run`")
        return _parse(name, inner)
    return None


def is_written(value: dict[Any, Any]) -> bool:
    """True where `value` is a reference, well formed or not."""
    pointer = value.get(REF)
    return (
        ITEM in value or FILE in value or (REF in value and not (isinstance(pointer, str) and pointer.startswith("#")))
    )


class Walker:
    """Walks through values: checks every number, key and type in them, and takes the references out.

    `on_reference` says why references are not allowed here, or None where they are; holes are collected in `holes`, and tensors whose
    bytes are elsewhere in `named`, as (handle, bytes, where). `on_named` says why those are not allowed here.
    `seen` grows by what was looked at, and measures the time a walk took.
    """

    __slots__ = ("holes", "max_nesting", "named", "on_named", "on_reference", "prefix", "seen", "stop_at")

    def __init__(self, max_nesting: int) -> None:
        self.max_nesting = min(max_nesting, MOST_NESTING)
        self.holes: list[Hole] = []
        self.named: list[tuple[int, int, str]] = []
        self.on_reference: str | None = None
        self.on_named: str | None = None
        self.prefix = ""
        self.seen = 0
        self.stop_at = MOST_VALUES

    def start(self, prefix: str, on_reference: str | None, on_named: str | None = None) -> None:
        """Begins with another value, that stands at `prefix`."""
        self.prefix, self.on_reference, self.on_named, self.holes = prefix, on_reference, on_named, []
        self.stop_at = self.seen + MOST_VALUES

    def walk(self, value: Any, at: Path) -> Any:
        """`value` with None in place of each reference; the same object where nothing had to change. Raises BadRequest."""
        self.seen += 1
        check = _SCALARS.get(type(value))
        if check is not None:
            fault = check(value)
            if fault:
                raise self._bad(fault, at)
            return value
        if len(at) >= self.max_nesting and isinstance(value, dict | list | tuple):
            raise self._bad(f"lists and dicts are nested deeper than the {self.max_nesting} levels allowed", at[:4])
        self._stop_if_many(at)
        if isinstance(value, dict):
            return self._walk_dict(value, at)
        if isinstance(value, list | tuple):
            return self._walk_list(value, at)
        return self._walk_tensor(value, at)

    def walk_part(self, values: Sequence[Any], first: int) -> Sequence[Any]:
        """As `walk`, for a part of a list that is walked through part after part: its elements from position `first` on."""
        self._stop_if_many(())
        return cast(Sequence[Any], self._walk_list(values, (), first))

    def _stop_if_many(self, at: Path) -> None:
        if self.seen > self.stop_at:
            raise self._bad(f"there are more than {MOST_VALUES} values in this: pass a tensor, bytes or a file", at[:1])

    def _bad(self, message: str, at: Path) -> BadRequest:
        return BadRequest(message, place(self.prefix, at))

    def _walk_dict(self, value: dict[Any, Any], at: Path) -> Any:
        if self.on_reference is not None and is_written(value):
            raise self._bad(self.on_reference, at)
        try:
            reference = as_reference(value)
        except BadRequest as error:
            raise self._bad(error.message, at) from None
        if reference is not None:
            if len(self.holes) >= MOST_REFERENCES:
                raise self._bad(f"a step takes at most {MOST_REFERENCES} references: let a `map` step gather", at)
            self.holes.append(Hole(at, reference))
            return None
        result = value
        for key, part in value.items():
            if type(key) is not str:
                raise self._bad(f"the key {quoted(key)} is a {type(key).__name__}: keys are text", at)
            kept = self.walk(part, (*at, key))
            if kept is not part:
                if result is value:
                    result = dict(value)
                result[key] = kept
        return result

    def _walk_list(self, value: Sequence[Any], at: Path, first: int = 0) -> Any:
        kinds = set(map(type, value))
        if len(kinds) == 1 and _all_fit(kinds.pop(), value):
            self.seen += len(value) >> 3
            return value
        result: Any = value
        for i, part in enumerate(value):
            kept = self.walk(part, (*at, first + i))
            if kept is not part:
                if result is value:
                    result = list(value)
                result[i] = kept
        return result

    def _walk_tensor(self, value: Any, at: Path) -> Any:
        try:
            if is_array(value):
                return self.walk(tensor(value), at)
            if not isinstance(value, msgspec.msgpack.Ext):
                raise TypeError(
                    f"a value of type {type(value).__name__} cannot be sent: use text, numbers, bytes, lists and dicts"
                )
            if value.code not in (TENSOR, DESCRIPTOR):
                raise ValueError(f"unknown extension type {value.code}")
            meta = tensor_meta(value)
            if value.code == DESCRIPTOR:
                if self.on_named is not None:
                    raise ValueError(self.on_named)
                self.named.append((handle_of(value), bytes_of(meta), place(self.prefix, at)))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise self._bad(str(error), at) from None
        return value


def _all_fit(kind: type, values: Sequence[Any]) -> bool:
    """True where every one of `values`, all of this type, is a scalar without fault."""
    if kind is str or kind is bool or kind is bytes:
        return True
    if kind is int:
        return bool(min(values) >= _INT_LOW and max(values) <= _INT_HIGH)
    return kind is float and all(map(math.isfinite, values))


def _float_fault(value: float) -> str:
    return "" if math.isfinite(value) else f"{value} is not a finite number: only finite ones are allowed"


def _int_fault(value: int) -> str:
    return (
        ""
        if _INT_LOW <= value <= _INT_HIGH
        else "this whole number does not fit 64 bits, from -2^63 to 2^64 - 1: pass it as text"
    )


def _no_fault(value: object) -> str:
    return ""


_SCALARS: dict[type, Callable[[Any], str]] = {
    str: _no_fault, bool: _no_fault, bytes: _no_fault, type(None): _no_fault, float: _float_fault, int: _int_fault,
}  # fmt: skip
