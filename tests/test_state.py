"""The run table: given these events, exactly these states."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexrt import values
from hexrt.core import Durability, RunState, TaskState
from hexrt.errors import ErrorRecord
from hexrt.events import CancelRequested, DeadlinePassed, Emitted, Finished, Recovered, Started
from hexrt.runtime.entities import Run
from hexrt.runtime.state import RunTable
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.notation import failed, finished, fresh, place, states, submit, table, task_of, workflow


def do(runs: RunTable, run: Run, *steps: str) -> None:
    for step in steps:
        runs.apply(finished(place(runs, run, step)))


def test_a_step_is_ready_when_all_its_predecessors_are_done() -> None:
    runs = table()
    run = submit(runs, workflow("a -> c, b -> c -> d"))
    assert fresh(runs) == ["a", "b"]
    do(runs, run, "a")
    assert fresh(runs) == []
    do(runs, run, "b")
    assert fresh(runs) == ["c"]
    do(runs, run, "c", "d")
    assert run.state is RunState.SUCCEEDED and runs.ended == [run]
    runs.check_integrity()


def test_a_failed_step_fails_its_descendants_by_name_and_leaves_other_branches_running() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b -> c, x -> y"))
    runs.apply(failed(place(runs, run, "a")))
    assert states(run) == {"a": "failed", "b": "skipped", "c": "skipped", "x": "ready", "y": "waiting"}
    assert run.steps[2].error is not None and "'a'" in run.steps[2].error.message
    assert not run.ended_ns
    do(runs, run, "x", "y")
    assert run.state is RunState.FAILED and run.error is not None and run.error.message == "it broke"
    runs.check_integrity()


def test_retries_are_counted_and_a_bad_request_is_not_tried_again() -> None:
    runs = table()
    run = submit(runs, workflow("a, b", a={"retries": 1}, b={"retries": 5}))
    fresh(runs)
    runs.apply(failed(place(runs, run, "a")))
    assert fresh(runs) == ["a"]
    runs.apply(failed(place(runs, run, "a")))
    runs.apply(failed(place(runs, run, "b"), "bad_request"))
    assert states(run) == {"a": "failed", "b": "failed"}
    assert [r.attempt for r in run.history] == [1]


def test_a_report_of_an_old_attempt_changes_nothing() -> None:
    runs = table()
    run = submit(runs, workflow("a", a={"retries": 1}))
    late = finished(place(runs, run, "a"))
    runs.apply(failed(task_of(run, "a")))
    place(runs, run, "a")
    runs.apply(late)
    assert task_of(run, "a").state is TaskState.PLACED
    runs.check_integrity()


def test_an_innocent_task_is_started_again_without_counting_and_a_dropped_one_keeps_its_attempt_number() -> None:
    runs = table()
    run = submit(runs, workflow("a"))
    runs.apply(failed(place(runs, run, "a"), "dropped", blame=False))
    assert task_of(run, "a").attempt == 0 and task_of(run, "a").state is TaskState.READY
    runs.apply(failed(place(runs, run, "a"), "device_lost", blame=False))
    assert task_of(run, "a").state is TaskState.READY and task_of(run, "a").failures == 0


def test_a_step_that_is_not_idempotent_and_was_running_when_its_worker_died_is_unknown() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b", a={"idempotent": False, "retries": 3}))
    runs.apply(failed(place(runs, run, "a"), "worker_died"))
    assert states(run) == {"a": "unknown", "b": "skipped"} and run.state is RunState.FAILED


def test_cancelling_stops_what_runs_and_ends_the_run_when_that_has_stopped() -> None:
    runs = table()
    run = submit(runs, workflow("a -> c, b"))
    task = place(runs, run, "a")
    runs.apply(CancelRequested(run.id, 1000, 1, 9, "enough"))
    assert runs.stop == [task] and not run.ended_ns
    runs.apply(failed(task, "cancelled"))
    assert run.state is RunState.CANCELLED and "enough" in str(run.error)
    runs.check_integrity()


def test_a_deadline_of_a_step_fails_that_step_and_one_of_the_run_fails_the_run() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b, x"))
    runs.apply(DeadlinePassed(run.id, 1, 50))
    assert states(run) == {"a": "ready", "b": "failed", "x": "ready"}
    runs.apply(DeadlinePassed(run.id, -1, 60))
    assert run.state is RunState.FAILED and run.error is not None and run.error.kind == "timed_out"


def mapped(over: object, **more: int) -> Workflow:
    return Workflow(
        (
            StepSpec("src", "noop"),
            StepSpec("each", "noop", inputs={"value": {"$item": ""}}, map=MapSpec(over, **more)),
            StepSpec("all", "noop", inputs={"value": {"$ref": "each"}}),
        )
    )


def test_a_map_over_an_output_makes_a_task_for_each_element_and_joins_their_outputs_in_order() -> None:
    runs = table()
    run = submit(runs, mapped({"$ref": "src.items"}))
    fresh(runs)
    runs.apply(finished(place(runs, run, "src"), {"items": ["p", "q", "r"]}))
    assert fresh(runs) == ["each[0]", "each[1]", "each[2]"]
    for part in (2, 0, 1):
        runs.apply(finished(place(runs, run, "each", part), part))
    assert fresh(runs) == ["all"]
    assert values.decode(run.steps[1].output or b"") == [0, 1, 2]


def test_a_map_keeps_no_more_in_flight_than_it_says() -> None:
    runs = table()
    run = submit(runs, mapped([1, 2, 3], max_in_flight=2))
    assert fresh(runs) == ["src", "each[0]", "each[1]"]
    runs.apply(finished(place(runs, run, "each", 1)))
    assert fresh(runs) == ["each[2]"]


@pytest.mark.parametrize(("output", "says"), [({"items": 7}, "needs a list"), ({}, "items"), (None, "items")])
def test_a_map_over_what_is_no_list_fails_that_step_by_name(output: object, says: str) -> None:
    runs = table()
    run = submit(runs, mapped({"$ref": "src.items"}))
    runs.apply(finished(place(runs, run, "src"), output))
    error = run.steps[1].error
    assert error is not None and says in error.message and error.where == "each" and run.state is RunState.FAILED


def test_a_map_over_nothing_is_done_with_an_empty_list() -> None:
    runs = table()
    run = submit(runs, mapped({"$ref": "src"}))
    runs.apply(finished(place(runs, run, "src"), []))
    assert values.decode(run.steps[1].output or b"") == [] and states(run)["all"] == "ready"


def test_emitted_tokens_add_up_once() -> None:
    runs = table()
    run = submit(runs, workflow("a"))
    task = place(runs, run, "a")
    for first, ids in ((0, (5, 6)), (0, (5, 6)), (2, (7,))):
        runs.apply(Emitted(run.id, 0, 0, task.attempt, first, ids, "x", 3))
    assert task.answered == [5, 6, 7]


def test_replay_runs_an_idempotent_step_again_and_leaves_a_started_other_one_unknown() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b, e -> f", e={"idempotent": False}), Durability.SYNC)
    runs.apply(Finished(run.id, 0, 0, 1, "pool:0", 2, 3, msgspec.Raw(values.encode(1))))
    runs.apply(Started(run.id, 2, 0, 1, "pool:1", 3))
    runs.apply(Recovered(10, 10))
    assert states(run) == {"a": "done", "b": "ready", "e": "unknown", "f": "skipped"}
    runs.check_integrity()


def test_a_step_placed_ahead_of_its_predecessor_waits_again_when_that_failed_and_is_tried_again() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b", a={"retries": 1}))
    fresh(runs)
    first, ahead = place(runs, run, "a"), place(runs, run, "b")
    runs.apply(failed(first))
    runs.apply(failed(ahead, "dropped", blame=False))
    assert ahead.state is TaskState.WAITING and fresh(runs) == ["a"]
    do(runs, run, "a")
    assert fresh(runs) == ["b"]
    runs.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_run_ends_whatever_happens_to_its_tasks(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    steps = [
        StepSpec(
            f"s{i}", "noop",
            after=tuple(f"s{j}" for j in range(i) if data.draw(st.booleans())),
            retries=data.draw(st.integers(0, 2)), idempotent=data.draw(st.sampled_from([None, False])),
        )
        for i in range(size)
    ]  # fmt: skip
    runs = table()
    run = submit(runs, Workflow(tuple(steps)))
    for _ in range(200):
        if run.ended_ns:
            break
        runs.check_integrity()
        live = [t for s in run.steps for t in s.tasks]
        ready = [t for t in live if t.state is TaskState.READY]
        flying = [t for t in live if t.state in (TaskState.PLACED, TaskState.RUNNING)]
        if ready and (not flying or data.draw(st.booleans())):
            runs.place(data.draw(st.sampled_from(ready)), "pool:0", 1, 1, 1)
        else:
            task = data.draw(st.sampled_from(flying))
            what = data.draw(
                st.sampled_from(["done", "task_failed", "device_lost", "worker_died", "dropped", "cancel"])
            )
            if what == "done":
                runs.apply(finished(task))
            elif what == "cancel":
                runs.apply(CancelRequested(run.id, 0, 1, 9, ""))
            else:
                runs.apply(failed(task, what, blame=what != "device_lost" and what != "dropped"))
    assert run.ended_ns and runs.open_runs == 0 and runs.open_tasks == 0
    runs.check_integrity()
    assert isinstance(run.error, ErrorRecord) or run.state is RunState.SUCCEEDED


@pytest.mark.parametrize("order", [1, -1])
def test_a_map_over_nothing_is_done_at_once_wherever_it_stands_and_however_many_follow(order: int) -> None:
    steps = [StepSpec(f"m{i}", "noop", map=MapSpec([]), after=(f"m{i - 1}",) if i else ()) for i in range(3000)]
    steps.append(StepSpec("b", "noop", {}, {"value": {"$ref": "m2999"}}))
    runs = table()
    run = submit(runs, Workflow(tuple(steps[::order])))
    assert fresh(runs) == ["b"] and run.open_steps == 1
    do(runs, run, "b")
    assert run.state is RunState.SUCCEEDED and runs.open_tasks == 0
    assert {values.decode(s.output) == [] for s in run.steps if s.node.map is not None and s.output} == {True}
    runs.check_integrity()


def test_all_maps_of_a_run_together_are_held_to_the_limit_of_tasks() -> None:
    steps = (StepSpec("a", "noop"), *(StepSpec(f"m{i}", "noop", map=MapSpec({"$ref": "a"})) for i in range(4)))
    runs = table()
    runs.max_tasks = 10
    run = submit(runs, Workflow(steps))
    runs.apply(finished(place(runs, run, "a"), [0] * 4))
    assert states(run) == {"a": "done", "m0": "ready", "m1": "ready", "m2": "failed", "m3": "failed"}
    assert run.steps[3].error is not None and "10 tasks" in run.steps[3].error.message
    runs.check_integrity()


@pytest.mark.parametrize(("retries", "attempts"), [(0, 3), (2, 5)])
@pytest.mark.parametrize("kind", ["worker_died", "device_lost"])
def test_an_idempotent_step_whose_worker_dies_is_tried_twice_more_and_then_says_how_often(
    kind: str, retries: int, attempts: int
) -> None:
    runs = table()
    run = submit(runs, workflow("a, b", a={"retries": retries}))
    for attempt in range(1, attempts + 1):
        assert task_of(run, "a").state is TaskState.READY
        runs.apply(failed(place(runs, run, "a"), kind))
        assert task_of(run, "a").attempt == attempt
    error = run.steps[0].error
    assert states(run)["a"] == "failed" and error is not None
    assert error.kind == kind and f"{attempts} times" in error.message
    runs.check_integrity()


def test_a_step_that_is_not_idempotent_is_not_begun_again_when_its_worker_dies() -> None:
    runs = table()
    run = submit(runs, workflow("a", a={"retries": 5, "idempotent": False}))
    runs.apply(failed(place(runs, run, "a"), "worker_died"))
    assert states(run) == {"a": "unknown"}
