"""Finds every numeric field of a typed record, and says which values its documented range takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from msgspec import inspect

Path = tuple[str | int, ...]
NUMBERS: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, -1, 0, 2**31, 2**63, 2**64, 1e308, -1e308, 0.5, True, "1",
)  # fmt: skip


def numeric_fields(kind: inspect.Type, path: Path = ()) -> Iterator[tuple[Path, inspect.Type]]:
    """Each numeric field below `kind`: where it is, and its type as declared (a union with None where it may be left out)."""
    if isinstance(kind, inspect.Metadata):
        yield from numeric_fields(kind.type, path)
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        yield path, kind
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from numeric_fields(field.type, (*path, field.encode_name))
    elif isinstance(kind, inspect.UnionType):
        numbers = [each for each in kind.types if isinstance(each, inspect.IntType | inspect.FloatType)]
        if numbers:
            yield path, kind
        for each in kind.types:
            if each not in numbers:
                yield from numeric_fields(each, path)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from numeric_fields(kind.item_type, (*path, 0))
    elif isinstance(kind, inspect.DictType):
        yield from numeric_fields(kind.value_type, (*path, "key"))


def takes(kind: inspect.Type, value: Any) -> bool:
    """Whether the declared type and range take `value`."""
    if isinstance(kind, inspect.UnionType):
        return any(takes(each, value) for each in kind.types)
    if isinstance(kind, inspect.BoolType) or isinstance(value, bool):
        return isinstance(kind, inspect.BoolType) and isinstance(value, bool)
    if isinstance(kind, inspect.StrType) or isinstance(value, str):
        return isinstance(kind, inspect.StrType) and isinstance(value, str)
    if not isinstance(kind, inspect.IntType | inspect.FloatType) or not math.isfinite(value):
        return False
    if isinstance(kind, inspect.IntType) and not isinstance(value, int):
        return False
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return False  # no message can carry it
    bounds = ((kind.ge, operator.ge), (kind.gt, operator.gt), (kind.le, operator.le), (kind.lt, operator.lt))
    return all(bound is None or holds(value, bound) for bound, holds in bounds)


def put(record: dict[str, Any], path: Path, value: Any) -> None:
    """Sets `value` at `path`; what lies on the way is made where it is missing."""
    at: Any = record
    for key, behind in pairwise(path):
        made: Any = [None] if isinstance(behind, int) else {}
        if isinstance(key, int):
            at[key] = at[key] or made
            at = at[key]
        else:
            at = at.setdefault(key, made)
    at[path[-1]] = value
