"""Reads workflow files, YAML or JSON, on the client's side, and writes them.

Owns nothing. Reads the file that it is given and those that `$file` names; never used by the daemon, so a path in a request means nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hexrt.errors import BadRequest
from hexrt.workflow.fields import field_error, place, quoted, shown
from hexrt.workflow.model import FILE, MapSpec, Needs, StepSpec, Workflow
from hexrt.workflow.sendable import check_sendable
from hexrt.workflow.syntax import MOST_NESTING, Format, parse, write

MOST_FILE_BYTES = 16 << 20
MOST_ATTACHED_BYTES = 48 << 20
_KEYS = ("name", "priority", "deadline_s", "steps", "outputs")
SUFFIXES: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def load_workflow(
    source: Path | str,
    format: Format | None = None,
    base_dir: Path | None = None,
    max_bytes: int = MOST_FILE_BYTES,
    max_attached_bytes: int = MOST_ATTACHED_BYTES,
) -> Workflow:
    """The workflow in a file (a `Path`) or in a text (a `str`). Raises BadRequest: `where` is a line, or the path of a field.

    `format` defaults to the file's suffix, and for text to YAML. `{"$file": NAME}` is replaced by that file's bytes, NAME relative to
    `base_dir`, by default the file's folder; a text without `base_dir` may hold none.
    """
    if isinstance(source, Path):
        base_dir = source.parent if base_dir is None else base_dir
        format = format or _format_of(source)
        source = _read_text(source, max_bytes)
    elif len(source) > max_bytes:
        raise BadRequest(f"the text has more than the {max_bytes} characters allowed")
    data = parse(source.removeprefix("\ufeff"), format or "yaml")
    if not isinstance(data, dict):
        hint = ""
        if isinstance(data, str) and "\n" not in data and Path(data).suffix in SUFFIXES:
            hint = "; to read a file, pass a Path"
        raise BadRequest(f"a workflow is a mapping with `steps`, not a {type(data).__name__}{hint}", "line 1")
    data.pop("$schema", None)  # for editors
    _attach(data, _Attacher(base_dir, max_attached_bytes))
    try:
        workflow = msgspec.convert(data, Workflow)
    except msgspec.ValidationError as error:
        raise _explain(error, data) from None
    check_sendable(workflow)
    return workflow


def dump_workflow(workflow: Workflow, format: Format = "yaml") -> str:
    """The text that `load_workflow` reads back as an equal workflow. Raises BadRequest where a literal has no text form: bytes and tensors."""
    for step in workflow.steps:
        _check_plain(step.params, f"steps.{step.id}.params", ())
        _check_plain(step.inputs, f"steps.{step.id}.inputs", ())
        if step.map is not None:
            _check_plain(step.map.over, f"steps.{step.id}.map.over", ())
    _check_plain(workflow.outputs, "outputs", ())
    data = msgspec.to_builtins(workflow)
    return write({key: data[key] for key in _KEYS if key in data}, format)


def _format_of(path: Path) -> Format:
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise BadRequest(f"the suffix {path.suffix!r} says no format: name the file .yaml or .json", path.name)
    return found


def _read_text(path: Path, max_bytes: int) -> str:
    content = _read(path, max_bytes, path.name)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRequest("the file is not UTF-8: save it as UTF-8", f"line {line}") from None


def _read(path: Path, max_bytes: int, where: str) -> bytes:
    """All of a regular file. A pipe or device is refused: it might never end."""
    try:
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise BadRequest(f"{quoted(str(path))} {problem}", where)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadRequest(f"{quoted(str(path))} cannot be read: {reason}", where) from None
    if len(content) > max_bytes:
        raise BadRequest(f"{quoted(str(path))} is larger than the {max_bytes} bytes allowed", where)
    return content


@dataclass(eq=False, slots=True)
class _Attacher:
    """Replaces `$file` by bytes; the same file is read once."""

    base_dir: Path | None
    room_bytes: int
    _read: dict[str, bytes] = field(default_factory=dict)

    def replace(self, value: Any, prefix: str, at: tuple[str | int, ...]) -> Any:
        """A copy of `value` with each `$file` replaced."""
        if len(at) > MOST_NESTING:
            raise BadRequest(f"nested deeper than {MOST_NESTING} levels", place(prefix, at[:4]))
        if isinstance(value, dict):
            if FILE in value:
                return self._bytes(value, place(prefix, at))
            return {key: self.replace(part, prefix, (*at, key)) for key, part in value.items()}
        if isinstance(value, list):
            return [self.replace(part, prefix, (*at, i)) for i, part in enumerate(value)]
        return value

    def _bytes(self, value: dict[str, Any], where: str) -> bytes:
        name = value[FILE]
        if len(value) > 1:
            raise BadRequest("a dict with `$file` holds nothing else", where)
        if not isinstance(name, str) or not name:
            raise BadRequest("`$file` needs the name of a file", where)
        if self.base_dir is None:
            raise BadRequest("a text that holds `$file` needs base_dir: the folder that file names start from", where)
        content = self._read.get(name)
        if content is None:
            content = self._read[name] = _read(self.base_dir / name, self.room_bytes, where)
        self.room_bytes -= len(content)
        if self.room_bytes < 0:
            raise BadRequest("the files named by `$file` are larger together than one submission may be", where)
        return content


def _attach(data: dict[str, Any], attacher: _Attacher) -> None:
    """Replaces `$file` in the inputs and map lists of steps, as far as these have the right form; `data` is changed."""
    steps = data.get("steps")
    if not isinstance(steps, list):
        return
    counts = _count_ids(steps)
    for i, step in enumerate(steps):
        if not isinstance(step, dict):
            continue
        prefix = _step_place(steps, i, counts)
        changed = dict(step)
        if isinstance(step.get("inputs"), dict):
            changed["inputs"] = attacher.replace(step["inputs"], f"{prefix}.inputs", ())
        if isinstance(step.get("map"), dict) and "over" in step["map"]:
            changed["map"] = {**step["map"], "over": attacher.replace(step["map"]["over"], f"{prefix}.map.over", ())}
        steps[i] = changed


def _count_ids(steps: list[Any]) -> Counter[Any]:
    ids = (step.get("id") for step in steps if isinstance(step, dict))
    return Counter(name for name in ids if isinstance(name, str))


def _step_place(steps: list[Any], i: int, counts: Counter[Any]) -> str:
    """`steps.ID` where the id names this step alone, else `steps[i]`."""
    name = steps[i].get("id") if isinstance(steps[i], dict) else None
    return f"steps.{shown(name)}" if isinstance(name, str) and counts[name] == 1 else f"steps[{i}]"


def _explain(error: msgspec.ValidationError, data: dict[str, Any]) -> BadRequest:
    fault = field_error(error, "")
    head, bracket, rest = fault.where.partition("]")
    steps = data.get("steps")
    if bracket and head.startswith("steps[") and head[6:].isdigit() and isinstance(steps, list):
        inside = rest.lstrip(".").split(".")
        kind = {"map": MapSpec, "needs": Needs}.get(inside[0], StepSpec) if len(inside) > 1 else StepSpec
        fault = field_error(error, "", kind.__struct_fields__)
        return BadRequest(fault.message, _step_place(steps, int(head[6:]), _count_ids(steps)) + rest)
    return BadRequest(field_error(error, "", Workflow.__struct_fields__).message, fault.where)


def _check_plain(value: Any, prefix: str, at: tuple[str | int, ...]) -> None:
    if len(at) > MOST_NESTING:
        raise BadRequest(f"nested deeper than {MOST_NESTING} levels", place(prefix, at[:4]))
    if isinstance(value, dict):
        for key, part in value.items():
            _check_plain(part, prefix, (*at, key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            _check_plain(part, prefix, (*at, i))
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{value} is not a finite number: only finite ones are allowed", place(prefix, at))
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise BadRequest(
            f"a {type(value).__name__} has no form in a workflow file: keep it in a file of its own and name that by `$file`",
            place(prefix, at),
        )
