"""Deadlines: kept while their runs are open, and not much longer."""

from __future__ import annotations

from hexrt.events import CancelRequested
from hexrt.runtime.deadlines import FEW, Deadlines
from hexrt.workflow.model import StepSpec, Workflow
from tests.notation import submit, table

SECOND = 1_000_000_000


def test_deadlines_come_due_in_order_of_time() -> None:
    runs, deadlines = table(), Deadlines()
    run = submit(
        runs, Workflow((StepSpec("a", "noop", deadline_s=3), StepSpec("b", "noop", deadline_s=1)), deadline_s=2)
    )
    assert run.graph is not None
    deadlines.add(run.id, run.graph, SECOND, runs.runs)
    assert list(deadlines.due(2 * SECOND - 1)) == []
    assert list(deadlines.due(3 * SECOND)) == [(2 * SECOND, run.id, 1), (3 * SECOND, run.id, -1)]
    assert len(deadlines) == 1


def test_far_deadlines_of_ended_runs_do_not_pile_up_while_others_are_open() -> None:
    runs, deadlines = table(), Deadlines()
    open_runs = [submit(runs, Workflow((StepSpec("a", "noop"),), deadline_s=1000 + i)) for i in range(300)]
    for run in open_runs:
        assert run.graph is not None
        deadlines.add(run.id, run.graph, 0, runs.runs)
    most = 0
    for _ in range(10_000):
        run = submit(runs, Workflow((StepSpec("a", "noop"),), deadline_s=9000))
        assert run.graph is not None
        deadlines.add(run.id, run.graph, 0, runs.runs)
        runs.apply(CancelRequested(run.id, 0, 1, 2, ""))
        runs.forget(run)
        most = max(most, len(deadlines))
    assert most <= FEW + 2 * 301 + 1
    assert [run for _, run, _ in deadlines.due(5000 * SECOND)] == [run.id for run in open_runs]
