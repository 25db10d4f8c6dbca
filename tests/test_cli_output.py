"""What the command line prints: the live table, event lines, values for people and for programs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from hexrt.cli.follow import MOST_ROWS, LiveView, event_line
from hexrt.cli.machine import facts_text
from hexrt.cli.output import for_people, plain, print_json, print_outcome, print_table
from hexrt.client import Outcome
from hexrt.core import RunId, RunState
from hexrt.errors import ErrorRecord
from hexrt.protocol.messages import Update


def drawn(view: LiveView, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(view.draw())
    return console.export_text()


def test_the_live_table_shows_states_tokens_and_errors_in_one_line_each() -> None:
    view = LiveView()
    view.accepted("ab" * 16)
    view.update(Update(0, 1, "started", "write", 0, "cpu:0"))
    for text in ("one\n", "two ", "\x1b[2J"):
        view.update(Update(0, 2, "tokens", "write", 0, text=text))
    view.update(Update(0, 3, "failed", "fetch", 0, error=ErrorRecord("timed_out", "after 3 s")))
    shown = drawn(view)
    assert "one two" in shown and "\x1b[2J" not in shown and "timed_out: after 3 s" in shown and "ab" * 16 in shown


def test_a_long_text_leaves_the_live_table_its_other_columns_and_shows_its_end() -> None:
    view = LiveView()
    view.update(Update(0, 1, "placed", "answer", 0, "pool:0"))
    view.update(Update(0, 2, "tokens", "answer", 0, "cpu:0", text="word " * 100 + "and the last"))
    view.update(Update(0, 3, "failed", "a_step_with_a_name_that_has_no_end", 0, error=ErrorRecord("task_failed", "no " * 100)))  # fmt: skip
    shown = drawn(view, width=80)
    assert "answer" in shown and "started  cpu:0" in shown and "and the last" in shown and "task_failed: no no" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_live_table_of_many_steps_shows_those_at_work_and_counts_the_rest() -> None:
    view = LiveView()
    for i in range(500):
        view.update(Update(0, i, "started" if i in (3, 400) else "done", f"step{i}", 0, "pool:0"))
    shown = drawn(view)
    assert "step3 " in shown and "step400 " in shown and f"... and {500 - MOST_ROWS} more" in shown
    assert len(shown.splitlines()) < MOST_ROWS + 5


@pytest.mark.parametrize(
    ("update", "line"),
    [
        (Update(0, 1, "started", "a", 0, "pool:1"), "a started on pool:1"),
        (Update(0, 1, "started", "a", 7, "pool:1", 2), "a[7] started on pool:1 (attempt 2)"),
        (Update(0, 1, "done", "a", 0, "cpu:0"), "a done on cpu:0"),
        (Update(0, 1, "tokens", "a", 0, text="two\nlines\x1b"), "a tokens two⏎lines␛"),
        (Update(0, 1, "failed", "a", 0, error=ErrorRecord("task_failed", "no\nluck")), "a failed task_failed: no luck"),
    ],
)
def test_an_event_is_one_line(update: Update, line: str) -> None:
    assert event_line(update) == line


def test_a_device_is_told_in_words_with_the_reason_last() -> None:
    assert facts_text({"threads": 2, "npu": False, "why": "none is installed", "pid": 7}) == "threads 2, no npu, pid 7; none is installed"  # fmt: skip
    assert facts_text({"npu": True}) == "npu" and facts_text({}) == ""


def test_values_are_shown_to_people_by_what_they_are() -> None:
    assert for_people("text") == "text"
    assert for_people({"a": [1, None]}) == '{"a":[1,null]}'
    assert for_people(b"123") == "3 bytes"
    assert for_people(np.arange(20, dtype=np.float32).reshape(4, 5)).startswith("float32[4, 5] 0, 1, 2")
    assert for_people(np.array([1, 2], np.int64)) == "int64[2] 1, 2"


def test_arrays_are_shown_to_people_in_short_wherever_they_are_and_to_programs_whole(capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    array = np.arange(100_000, dtype=np.float32)
    short = "float32[100000] 0, 1, 2, 3, 4, 5, 6, 7, ..."
    numbers = list(range(50))
    value = {"x": array, "deep": [{"parts": (array[:2], 1)}, None], "numbers": numbers, "text": "long " * 500}
    assert json.loads(for_people(value)) == {
        "x": short, "deep": [{"parts": ["float32[2] 0, 1", 1]}, None], "numbers": numbers, "text": "long " * 500,
    }  # fmt: skip
    assert json.loads(for_people([array] * 8)) == [short] * 8
    assert json.loads(for_people([array] * 1000)) == [short] * 8 + ["... and 992 more"]
    assert json.loads(for_people([array[:1]] * 10 + [1])) == ["float32[1] 0"] * 10 + [1]
    print_outcome(Outcome(RunId(b"r" * 16), RunState.SUCCEEDED, {"maps": [[array]] * 2}, {}))
    assert len(capsys.readouterr().out) < 200
    print_json(value)
    assert len(json.loads(capsys.readouterr().out)["x"]) == 100_000


def test_json_has_hex_ids_base64_bytes_lists_for_tensors_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"run": b"\xab" * 16, "b": b"\xff", "t": np.ones((1, 2), np.float32), "n": float("nan")}
    print_json(value)
    assert json.loads(capsys.readouterr().out) == {"run": "ab" * 16, "b": "/w==", "t": [[1.0, 1.0]], "n": None}
    assert plain((1, (2,))) == [1, [2]]


def test_a_table_in_a_pipe_keeps_every_cell_whole_and_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "about"), [("a", "x" * 300), ("bb\n", "")])
    assert capsys.readouterr().out.splitlines() == ["name  about", f"a     {'x' * 300}", "bb"]
