"""Text to plain data and back: YAML and JSON read strictly, with the line of what is wrong.

YAML is read as its version 1.2 reads plain words (`null`, `true`, numbers); words that readers disagree about (dates, `yes`, `010`,
`12:30`) are refused rather than guessed. Duplicate keys, tags, several documents, deep nesting and aliases that blow up are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import yaml

from hexrt.errors import BadRequest
from hexrt.workflow.fields import quoted, shown

Format = Literal["yaml", "json"]

MOST_NESTING = 100
MOST_EXPANDED = 16 << 20
"""Characters, with 8 more a value, that the aliases of a YAML text may come to once they are written out."""

LONGEST_WORD = 80
"""Characters beyond which no word is taken for a date or the like."""

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:(?:[Tt]|[ \t]+)[0-9:.]+.*)?", re.S)
_UNSURE = re.compile(
    r"(?:yes|no|on|off)|[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?|[-+]?[0-9]+(?::[0-9]{1,2})+(?:\.[0-9]*)?|0b[01_]+",
    re.I,
)
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def parse(text: str, format: Format) -> Any:
    """The plain data that `text` writes. Raises BadRequest whose `where` is `line N, column M` where that is known."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            "half a surrogate pair stands in the text", f"line {text.count(chr(10), 0, error.start) + 1}"
        ) from None
    if not text.strip():
        raise BadRequest("there is nothing in it: a workflow needs at least `steps`", "line 1")
    return _parse_json(text) if format == "json" else _YamlReader().read(text)


def plain_is_text(text: str) -> bool:
    """True where YAML reads this unquoted word as text, by `parse` as well as by older readers."""
    if text in _WORDS or _INT.fullmatch(text) or _FLOAT.fullmatch(text):
        return False
    return len(text) > LONGEST_WORD or not any(p.fullmatch(text) for p in (_NOT_FINITE, _DATE, _UNSURE))


# --- JSON -------------------------------------------------------------------------------------------------------


def _parse_json(text: str) -> Any:
    try:
        data = json.loads(text, object_pairs_hook=_json_object, parse_constant=_json_constant, parse_float=_json_float)
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except json.JSONDecodeError as error:
        raise BadRequest(f"not JSON: {error.msg}", f"line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadRequest("lists and objects are nested too deeply") from None
    except UnicodeEncodeError:
        raise BadRequest("a \\u escape is half a surrogate pair: write both halves, or the character itself") from None
    except ValueError as error:
        raise BadRequest(f"a number is out of range: {str(error)[:80]}") from None


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise BadRequest(f"the key {quoted(twice)} stands twice in one object: take one out", shown(twice))
    return made


def _json_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is no number of JSON: only finite numbers are allowed")


def _json_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest(f"the number {quoted(text)} is out of range")
    return value


# --- YAML -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Open:
    """A list or mapping whose end has not been read."""

    value: Any
    anchor: str | None
    start: int  # expanded size before it
    key: Any = None
    has_key: bool = False
    merges: list[Any] = field(default_factory=list)


_MERGE = object()


class _YamlReader:
    """Makes plain data of YAML's events, without recursion."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._unfinished: set[str] = set()
        self._size = self._aliased = 0
        self._documents = 0
        self._root: Any = None

    def read(self, text: str) -> Any:
        try:
            for event in yaml.parse(text, Loader=yaml.CSafeLoader):
                self._take(event)
        except yaml.MarkedYAMLError as error:
            what = " ".join(str(part) for part in (error.context, error.problem) if part)
            raise BadRequest(f"not YAML: {what}", _line(error.problem_mark or error.context_mark)) from None
        except yaml.YAMLError as error:
            raise BadRequest(f"not YAML: {' '.join(str(error).split())[:200]}") from None
        return self._root

    def _take(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._size += len(event.value) + 8
                value = self._scalar(event)
                if event.anchor:
                    self._anchors[event.anchor] = (value, len(event.value) + 8)
                self._put(value, event)
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._begin(event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._end(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise BadRequest("there is a second document: a file holds one workflow", _line(event.start_mark))

    def _begin(self, event: Any) -> None:
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", "tag:yaml.org,2002:map" if mapping else "tag:yaml.org,2002:seq"):
            raise BadRequest(f"the tag {quoted(event.tag)} is not allowed: write plain data", _line(event.start_mark))
        if len(self._open) >= MOST_NESTING:
            raise BadRequest(f"nested deeper than {MOST_NESTING} levels", _line(event.start_mark))
        if event.anchor:
            self._unfinished.add(event.anchor)
        self._open.append(_Open({} if mapping else [], event.anchor, self._size))
        self._size += 8

    def _end(self, event: Any) -> None:
        done = self._open.pop()
        for merged in done.merges:
            for key, value in merged.items():
                done.value.setdefault(key, value)
        if done.anchor:
            self._unfinished.discard(done.anchor)
            self._anchors[done.anchor] = (done.value, self._size - done.start)
        self._put(done.value, event)

    def _alias(self, event: Any) -> None:
        name, line = event.anchor, _line(event.start_mark)
        if name in self._unfinished:
            raise BadRequest(f"the alias *{name} stands inside what it stands for", line)
        if name not in self._anchors:
            raise BadRequest(f"there is no anchor &{name} before this alias", line)
        value, size = self._anchors[name]
        self._size += size
        self._aliased += size
        if self._aliased > MOST_EXPANDED:
            raise BadRequest(
                f"the aliases, written out, are more than {MOST_EXPANDED} characters: write less by alias", line
            )
        self._put(value, event)

    def _put(self, value: Any, event: Any) -> None:
        if not self._open:
            self._root = value
            return
        into = self._open[-1]
        if isinstance(into.value, list):
            into.value.append(value)
        elif not into.has_key:
            self._put_key(into, value, event)
        else:
            into.has_key = False
            if into.key is _MERGE:
                into.merges.extend(_mergeable(value, event))
            else:
                into.value[into.key] = value

    def _put_key(self, into: _Open, key: Any, event: Any) -> None:
        into.has_key = True
        if key == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            into.key = _MERGE
            return
        if not isinstance(key, str):
            raise BadRequest(f"the key {quoted(key)} is not text: put it in quotes", _line(event.start_mark))
        if key in into.value:
            raise BadRequest(f"the key {quoted(key)} stands twice: take one out", _line(event.start_mark))
        into.key = key

    def _scalar(self, event: Any) -> Any:
        text, line = event.value, _line(event.start_mark)
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise BadRequest(f"the tag {quoted(event.tag)} is not allowed: write plain data", line)
        if event.tag is not None or not event.implicit[0]:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > 400:
                raise BadRequest("this whole number is out of range", line)
            return int(text, 0)
        if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        if _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
            raise BadRequest(
                f"{quoted(text)} is not a finite number: only finite ones are allowed, or put it in quotes", line
            )
        if len(text) > LONGEST_WORD:
            return text
        if _DATE.fullmatch(text):
            raise BadRequest(f"{text[:40]} is a date in YAML, and there are no dates here: put it in quotes", line)
        if _UNSURE.fullmatch(text):
            raise BadRequest(
                f"readers of YAML disagree about {quoted(text)}: put it in quotes, or write true, false or a plain number",
                line,
            )
        return text


def _mergeable(value: Any, event: Any) -> Iterator[dict[str, Any]]:
    for one in value if isinstance(value, list) else (value,):
        if not isinstance(one, dict):
            raise BadRequest("`<<` merges mappings only", _line(event.start_mark))
        yield one


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


class _Dumper(yaml.CSafeDumper):
    """Quotes what `parse` would not read back as text, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_data(self, data: Any) -> Any:
        if type(data) is str and not plain_is_text(data):
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')
        return super().represent_data(data)


def write(data: Any, format: Format) -> str:
    """The text that `parse` reads back as `data`: dicts, lists, text, finite numbers, booleans and None."""
    if format == "json":
        return json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
