"""What runs hold in memory: counted, let go of when nothing needs it any more, and stopped by name where it is too much."""

from __future__ import annotations

from typing import Any

import pytest

from hexrt import values
from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines
from hexrt.brain.view import Device
from hexrt.core import DeviceKind, RunState, TaskState
from hexrt.events import CancelRequested
from hexrt.runtime import maps
from hexrt.runtime.entities import Run
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import CostModel
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.llm_desk import keeper_of
from tests.notation import failed, finished, place, states, submit, table, task_of, workflow

KIB = 1 << 10


def done(runs: RunTable, run: Run, step: str, value: Any = None, part: int = 0) -> None:
    runs.apply(finished(place(runs, run, step, part), value))


def decide(runs: RunTable) -> None:
    """Applies what has no room, as a turn of the owner does."""
    brain = Brain(runs, CostModel(), Engines({}, keeper_of(), 16, 1))
    brain.add_device(Device("pool:0", DeviceKind.POOL, 64, "pool"))
    for event in brain.decide(9).events:
        runs.apply(event)


def map_over(over: Any, max_in_flight: int | None = None) -> Workflow:
    return Workflow((StepSpec("src", "noop"), StepSpec("each", "noop", map=MapSpec(over, max_in_flight))))


def test_a_run_that_holds_more_than_its_limit_is_stopped_by_name_and_another_goes_on() -> None:
    runs = table()
    runs.holding.max_run_bytes = 1 << 20
    greedy, modest = submit(runs, workflow("a, b, c, d")), submit(runs, workflow("x"))
    for step in "ab":
        done(runs, greedy, step, b"x" * (600 * KIB))
        runs.check_integrity()
    decide(runs)
    assert greedy.state is RunState.FAILED and greedy.error is not None
    assert (greedy.error.kind, greedy.error.where) == ("out_of_memory", "b")
    assert "limits.max_run_mib" in greedy.error.message
    assert states(greedy) == {"a": "done", "b": "done", "c": "cancelled", "d": "cancelled"}
    done(runs, modest, "x", b"x" * (600 * KIB))
    decide(runs)
    assert modest.state is RunState.SUCCEEDED
    runs.check_integrity()


def test_many_small_outputs_are_counted_as_well() -> None:
    runs = table()
    runs.holding.max_run_bytes = 1 << 20
    run = submit(runs, map_over(list(range(200))))
    for part in range(200):
        if run.ended_ns:
            break
        done(runs, run, "each", b"x" * (6 * KIB), part)
        decide(runs)
    assert run.error is not None and run.error.kind == "out_of_memory" and part < 180
    assert run.held_bytes < 200 * KIB  # what the ended map had put out is let go of
    runs.check_integrity()


def test_where_all_open_runs_hold_too_much_the_one_that_holds_most_is_stopped() -> None:
    runs = table()
    runs.holding.max_held_bytes = 1 << 20
    ended = submit(runs, workflow("e"))
    done(runs, ended, "e", b"x" * (800 * KIB))  # an ended run does not count: its like give way
    large, small = submit(runs, workflow("a, b")), submit(runs, workflow("c, d"))
    done(runs, large, "a", b"x" * (800 * KIB))
    decide(runs)
    assert not large.ended_ns
    done(runs, small, "c", b"x" * (300 * KIB))
    decide(runs)
    assert large.state is RunState.FAILED and large.error is not None and not small.ended_ns
    assert large.error.retryable and "limits.max_held_mib" in large.error.message
    runs.check_integrity()


def test_a_large_output_is_let_go_of_when_its_last_consumer_has_ended_and_not_before() -> None:
    steps = (
        StepSpec("a", "noop"),
        StepSpec("b", "noop", {}, {"value": {"$ref": "a"}}),
        StepSpec("c", "noop", {}, {"value": {"$ref": "a"}}, retries=1),
        StepSpec("kept", "noop"),
        StepSpec("d", "noop", {}, {"value": {"$ref": "kept"}}),
        StepSpec("last", "noop", after=("b", "c", "d")),
    )
    runs = table()
    run = submit(runs, Workflow(steps, outputs={"kept": {"$ref": "kept"}}))
    held = run.held_bytes
    done(runs, run, "a", b"x" * 40_000)
    done(runs, run, "kept", b"y" * 40_000)
    done(runs, run, "b")
    runs.apply(failed(place(runs, run, "c")))  # it is tried again, with the same input
    assert run.steps[0].output is not None and run.held_bytes > held + 80_000
    done(runs, run, "c")
    assert run.steps[0].output is None and run.held_bytes < held + 50_000
    done(runs, run, "d")
    runs.check_integrity()
    done(runs, run, "last")
    assert run.state is RunState.SUCCEEDED and values.decode(run.steps[3].output or b"") == b"y" * 40_000
    runs.check_integrity()


def test_what_a_failed_branch_would_have_read_is_let_go_of() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b -> c, x"))
    done(runs, run, "a", b"x" * 40_000)
    runs.apply(failed(place(runs, run, "b")))
    assert run.steps[0].output is None and not run.ended_ns
    runs.check_integrity()


def test_a_forgotten_run_holds_nothing() -> None:
    runs = table()
    for size in (10, 40_000, 900_000):
        run = submit(runs, workflow("a -> b, c"))
        done(runs, run, "a", b"x" * size)
        done(runs, run, "c", b"x" * size)
        runs.apply(CancelRequested(run.id, 1, 1, 9, ""))
        runs.check_integrity()
        runs.forget(run)
    assert runs.holding.held_bytes == 0 == runs.holding.ended_bytes


def test_a_map_makes_the_tasks_of_its_first_elements_and_each_other_when_one_has_ended() -> None:
    runs, size = table(), maps.AT_A_TIME + 10
    run = submit(runs, map_over({"$ref": "src"}))
    done(runs, run, "src", list(range(size)))
    each = run.steps[1]
    assert len(each.tasks) == maps.AT_A_TIME == len(runs.fresh) - 1 and runs.open_tasks == size
    for part in range(size):
        done(runs, run, "each", part, part)
        assert len(each.tasks) == min(size, maps.AT_A_TIME + part + 1)
    assert run.state is RunState.SUCCEEDED and values.decode(each.output or b"") == list(range(size))
    assert runs.open_tasks == 0
    runs.check_integrity()


def test_a_replay_knows_an_element_that_was_begun_earlier_than_it_would_be_now() -> None:
    runs = table()
    run = submit(runs, map_over({"$ref": "src"}, max_in_flight=1))
    done(runs, run, "src", [5, 6, 7])
    event = finished(task_of(run, "each"), "late")
    runs.apply(type(event)(run.id, 1, 2, 1, "pool:0", 2, 5, event.output))
    assert [t.state for t in run.steps[1].tasks] == [TaskState.READY, TaskState.READY, TaskState.DONE]
    done(runs, run, "each", "a", 0)
    done(runs, run, "each", "b", 1)
    assert values.decode(run.steps[1].output or b"") == ["a", "b", "late"]
    runs.check_integrity()


def test_a_map_for_which_too_many_tasks_are_open_fails_by_name_and_its_run_goes_on() -> None:
    runs = table()
    run = submit(runs, Workflow((*map_over({"$ref": "src"}).steps, StepSpec("other", "noop"))))
    runs.max_open_tasks = 500
    done(runs, run, "src", list(range(5000)))
    decide(runs)
    error = run.steps[1].error
    assert error is not None and (error.kind, error.where, error.retryable) == ("overloaded", "each", True)
    assert "limits.max_open_tasks" in error.message and "5000" in error.message
    assert states(run) == {"src": "done", "each": "failed", "other": "ready"} and runs.open_tasks == 1
    runs.check_integrity()


@pytest.mark.parametrize("size", [2, 300])
def test_a_replay_takes_a_map_that_was_begun_as_begun_and_one_that_had_no_room_as_failed(size: int) -> None:
    runs = table()
    runs.max_open_tasks = 100
    run = submit(runs, map_over({"$ref": "src"}))
    source = place(runs, run, "src")
    facts: list[Any] = [finished(source, list(range(size)))]
    runs.apply(facts[0])
    facts += runs.holding.refused
    again = table()  # without limits, as in a replay
    copy = submit(again, map_over({"$ref": "src"}))
    for fact in facts:
        again.apply(type(fact)(copy.id, *[getattr(fact, name) for name in fact.__struct_fields__[1:]]))
    assert states(copy)["each"] == ("ready" if size == 2 else "failed")
