"""Workflow files: YAML and JSON are read strictly, and what is wrong is found by its line or field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.errors import BadRequest
from hexrt.workflow.check import check_workflow
from hexrt.workflow.load import dump_workflow, load_workflow
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from hexrt.workflow.syntax import Format, parse
from tests.workflow_ops import LIMITS, OPS, step

EXAMPLES = Path(__file__).parent / "data" / "workflows"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in {".yaml", ".json"})


def refused(text: str, format: Format = "yaml", **more: Any) -> tuple[str, str]:
    with pytest.raises(BadRequest) as info:
        load_workflow(text, format, **more)
    return info.value.where, info.value.message


def value_of(text: str) -> Any:
    """What `text` stands for as a YAML value."""
    return parse(f"x: {text}", "yaml")["x"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_examples_load_and_check(path: Path) -> None:
    graph = check_workflow(load_workflow(path), OPS, LIMITS, 600.0)
    assert len(graph.nodes) >= 3
    assert graph.edges


def test_yaml_and_json_of_one_workflow_are_equal() -> None:
    workflow = load_workflow(EXAMPLES / "ask_documents.yaml")
    for format in ("yaml", "json"):
        text = dump_workflow(workflow, format)
        assert load_workflow(text, format) == workflow
        assert text.index("name") < text.index("steps")


def test_files_are_attached_as_bytes() -> None:
    workflow = load_workflow(EXAMPLES / "agent.yaml")
    assert workflow.steps[0].inputs == {"image": (EXAMPLES / "photo.bin").read_bytes()}


def test_merged_mappings_yield_to_what_stands_beside_them() -> None:
    workflow = load_workflow(EXAMPLES / "agent.yaml")
    review = next(s for s in workflow.steps if s.id == "review")
    assert review.params == {"model": "smollm2", "max_tokens": 16, "temperature": 0, "seed": 7}


def test_a_schema_named_for_the_editor_is_left_out() -> None:
    load_workflow('{"$schema": "x", "steps": [{"id": "a", "op": "noop"}]}', "json")


def test_a_byte_order_mark_is_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "w.yml"
    path.write_bytes(b"\xef\xbb\xbfsteps: [{id: a, op: noop}]\n")
    assert load_workflow(path).steps[0].id == "a"


# --- syntax -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps:\n  - id: a\n    op: 'noop\n", "line "),
        ("steps:\n  - {id: a, op: noop}\n\t- b", "line 3"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1"),
        ("steps:\n  - {id: a, id: b}\n", "line 2"),
        ("a: *nowhere\n", "line 1, column 4"),
        ("a: &x [1, *x]\n", "line 1"),
        ("a: !!python/object:os.system x\n", "line 1"),
        ("a: !!set {x, y}\n", "line 1"),
        ("a: !mine [x]\n", "line 1"),
        ("a: !!int '3'\n", "line 1"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a:\n  - 2020-01-01\n", "line 2, column 5"),
        ("1: a\n", "line 1, column 1"),
        ("true: a\n", "line 1, column 1"),
        ("[1, 2]: a\n", "line 1"),
        ("{a: 1}: b\n", "line 1"),
        ("<<: 3\n", "line 1"),
        ("x: .nan\n", "line 1"),
        ("x: 1e999\n", "line 1"),
        ("x: " + "9" * 5_000, "line 1"),
        ("", "line 1"),
        ("  \n\n", "line 1"),
        ("x: " + "[" * 2_000, "line 1"),
        ("- " * 2_000 + "1", "line 1"),
    ],
)
def test_wrong_yaml_is_refused_with_its_line(text: str, line: str) -> None:
    where, message = refused(text)
    assert where.startswith(line) and message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("False", False),
        ("3", 3), ("-3", -3), ("+3", 3), ("0", 0), ("0x1F", 31), ("0o17", 15),
        ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-0.0", 0.0),
        ("text", "text"), ("'3'", "3"), ('"yes"', "yes"), ("! 3", "3"), ("!!str 3", "3"), ("1.2.3", "1.2.3"),
        ("a:b", "a:b"), ("12:aa", "12:aa"), ("e3", "e3"), ("-", None), ("nope", "nope"), ("y", "y"),
    ],
)  # fmt: skip
def test_plain_words_of_yaml_mean_what_version_1_2_says(text: str, value: Any) -> None:
    if text == "-":
        assert parse("x: '-'", "yaml") == {"x": "-"}
        return
    found = value_of(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    ["yes", "No", "ON", "off", "010", "-07", "1_000", "12:30", "1:30:59.5", "0b11", "2020-1-1", "2001-12-14t21:59:43.10-05:00",
     "2001-12-14 21:59:43"],
)  # fmt: skip
def test_words_that_readers_of_yaml_disagree_about_are_refused(text: str) -> None:
    where, message = refused(f"steps:\n  - {{id: a, op: noop, inputs: {{value: {text}}}}}")
    assert where.startswith("line 2") and "quotes" in message
    assert value_of(f"'{text}'") == text


def test_an_alias_bomb_is_refused_before_it_goes_off() -> None:
    lines = ["a0: &a0 [" + ", ".join(["lol"] * 9) + "]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 30)]
    where, message = refused("\n".join(lines))
    assert where.startswith("line ") and "alias" in message
    long = "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 1_000) + "]"
    assert "alias" in refused(long)[1]


def test_aliases_in_measure_are_written_out() -> None:
    assert parse("a: &a {k: [1]}\nb: [*a, *a]\nc: &s word\nd: *s", "yaml") == {
        "a": {"k": [1]}, "b": [{"k": [1]}, {"k": [1]}], "c": "word", "d": "word",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": 1,\n "b": }', "line 2, column 7"),
        ('{"a": NaN}', ""),
        ('{"a": -Infinity}', ""),
        ('{"a": 1e999}', ""),
        ('{"a": ' + "9" * 5_000 + "}", ""),
        ('{"a": {"k": 1, "k": 2}}', "k"),
        ('{"a": "\\ud800"}', ""),
        ('{"a": ' + "[" * 100_000 + "}", ""),
        ("", "line 1"),
        ("nul", "line 1, column 1"),
        ('{"a": 1} x', "line 1, column 10"),
        ("'a'", "line 1, column 1"),
    ],
)
def test_wrong_json_is_refused(text: str, where: str) -> None:
    found, message = refused(text, "json")
    assert found == where and message


@pytest.mark.parametrize("format", ["yaml", "json"])
@pytest.mark.parametrize("text", ["3", "[1]", '"steps"', "null"])
def test_something_other_than_a_mapping_is_refused(text: str, format: Format) -> None:
    assert "a workflow is a mapping" in refused(text, format)[1]


def test_a_path_given_as_text_is_recognised() -> None:
    assert "pass a Path" in refused("flows/rag.yaml")[1]


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_half_a_surrogate_pair_in_the_text_is_refused(format: Format) -> None:
    assert "surrogate" in refused('{"a":\n "\ud800"}', format)[1]


# --- files ------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text("x: " + "y" * 100)
    (tmp_path / "latin.yaml").write_bytes(b"steps:\n- id: \xe9\n")
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / "w.txt").write_text("steps: []")
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").write_bytes(b"a: \x00\n")
    (tmp_path / "wide.yaml").write_bytes("steps: []".encode("utf-16"))
    expected = {
        "big.yaml": "larger than the 50", "latin.yaml": "not UTF-8", "empty.json": "nothing in it", "w.txt": "suffix",
        "dir.yaml": "not a regular file", "pipe.yaml": "not a regular file", "none.yaml": "does not exist",
        "zero.yaml": "not YAML", "wide.yaml": "not UTF-8",
    }  # fmt: skip
    for name, says in expected.items():
        with pytest.raises(BadRequest, match=says) as info:
            load_workflow(tmp_path / name, max_bytes=50)
        assert name != "latin.yaml" or info.value.where == "line 2"
    with pytest.raises(BadRequest, match="more than the 10"):
        load_workflow("x: " + "y" * 100, max_bytes=10)


FILE_STEP = 'steps: [{{id: a, op: noop, inputs: {{value: [0, {{$file: "{}"}}]}}}}]'


def test_a_missing_attachment_is_named_at_its_place(tmp_path: Path) -> None:
    where, message = refused(FILE_STEP.format("no.png"), base_dir=tmp_path)
    assert where == "steps.a.inputs.value[1]" and "no.png" in message and "does not exist" in message


def test_attachments_need_a_folder_to_start_from() -> None:
    assert "base_dir" in refused(FILE_STEP.format("x"))[1]


def test_attachments_are_bounded_together(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    text = "steps: [{id: a, op: noop, inputs: {value: [{$file: x}, {$file: x}]}}]"
    assert load_workflow(text, base_dir=tmp_path, max_attached_bytes=10).steps[0].inputs == {"value": [b"12345"] * 2}
    assert refused(text, base_dir=tmp_path, max_attached_bytes=9)[0] == "steps.a.inputs.value[1]"
    assert refused(text, base_dir=tmp_path, max_attached_bytes=4)[0] == "steps.a.inputs.value[0]"


def test_attachments_of_a_map_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    text = 'steps: [{id: a, op: noop, map: {over: [{$file: x}]}, inputs: {value: {$item: ""}}}]'
    assert load_workflow(text, base_dir=tmp_path).steps[0].map == MapSpec([b"1"])


@pytest.mark.parametrize(
    "written", ['{$file: ""}', "{$file: 3}", "{$file: x, more: 1}", "{$file: 'a\\0b'}", '{$file: "a\\0b"}']
)
def test_a_malformed_attachment_is_refused(written: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    text = f"steps: [{{id: a, op: noop, inputs: {{value: {written}}}}}]"
    assert refused(text, base_dir=tmp_path)[0] == "steps.a.inputs.value"


# --- content ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("step: []", "step", "'steps'"),
        ("name: x", "steps", "required"),
        ("steps: 3", "steps", "array"),
        ("steps: [3]", "steps[0]", "object"),
        ("steps: [{id: a}]", "steps.a.op", "required"),
        ("steps: [{op: noop}]", "steps[0].id", "required"),
        ("steps: [{id: a, op: noop, time_out_s: 3}]", "steps.a.time_out_s", "'timeout_s'"),
        ("steps: [{id: a, op: noop, needs: {devise: npu}}]", "steps.a.needs.devise", "'device'"),
        ("steps: [{id: a, op: noop, map: {ovr: []}}]", "steps.a.map.ovr", "'over'"),
        ("steps: [{id: a, op: noop, inputs: [1]}]", "steps.a.inputs", "object"),
        ("steps: [{id: a, op: noop, inputs: null}]", "steps.a.inputs", "object"),
        ("steps: [{id: a.b, op: noop}]", "steps.a.b.id", "regex"),
        ("steps: [{id: a, op: x}, {id: a, op: noop, retries: -1}]", "steps[1].retries", ">= 0"),
        ("steps: [{id: a, op: noop, retries: 1.5}]", "steps.a.retries", "int"),
        ("steps: [{id: a, op: noop, timeout_s: 0}]", "steps.a.timeout_s", "> 0"),
        ("steps: [{id: a, op: noop, after: b}]", "steps.a.after", "array"),
        ("{steps: [{id: a, op: noop}], priority: 1000}", "priority", "<= 100"),
        ("{steps: [{id: a, op: noop}], deadline_s: 100000000000000000000000000000000}", "deadline_s", "<="),
    ],
)
def test_a_wrong_field_is_refused_at_its_path(text: str, where: str, says: str) -> None:
    found, message = refused(text)
    assert found == where and says in message


def test_a_workflow_with_bytes_or_tensors_is_not_written() -> None:
    for value in (b"x", msgspec.msgpack.Ext(1, b""), float("nan")):
        for bad in (step("a", {"k": [value]}), step("a", map=MapSpec([value])), StepSpec("a", "noop", {"k": value})):
            with pytest.raises(BadRequest) as info:
                dump_workflow(Workflow((bad,)))
            assert info.value.where.startswith("steps.a.")


def test_a_large_file_loads_in_one_pass_over_its_steps() -> None:
    steps = [
        {"id": f"s{i}", "op": "noop", "inputs": {"value": {"$ref": f"s{i - 1}"}} if i else {}} for i in range(3_000)
    ]
    workflow = load_workflow(json.dumps({"steps": steps}), "json")
    assert check_workflow(workflow, OPS, LIMITS, 1.0).order == list(range(3_000))
