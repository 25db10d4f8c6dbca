"""How soon a conversation is gone on from, by the graph and by what its steps are expected to take; and with whom it shares pages."""

from __future__ import annotations

import msgspec
import pytest

from hexrt.brain.ahead import MANY, need_of
from hexrt.brain.models import LoadedModel
from hexrt.brain.sequences import Sharing, root_of
from hexrt.events import Finished
from hexrt.runtime.entities import Run
from tests.notation import submit, table, task_of, workflow

TIMES = {"a": 10.0, "b": 100.0, "c": 1000.0, "d": 5.0, "e": 7.0}


def expected_ns(run: Run, step: int) -> float:
    return TIMES.get(run.steps[step].node.id, 1.0)


def index(run: Run, name: str) -> int:
    return next(step.node.index for step in run.steps if step.node.id == name)


def test_the_slowest_way_to_the_soonest_reader_counts_and_what_has_ended_does_not() -> None:
    runs = table()
    run = submit(runs, workflow("a -> b -> d, a -> c -> d, a -> e"))
    need = need_of(run, [index(run, "d")], expected_ns, 50, 9)
    assert need is not None
    assert (need.steps, need.at_ns, need.most_hold_ns) == (3, 50 + 10 + 1000, 9)
    both = need_of(run, [index(run, "d"), index(run, "e")], expected_ns, 0, 9)
    assert both is not None and (both.steps, both.at_ns) == (2, 10)
    task = task_of(run, "a")
    runs.apply(Finished(run.id, index(run, "a"), 0, task.attempt, "pool:0", 1, 2, msgspec.Raw(b"\xc0")))
    after = need_of(run, [index(run, "d")], expected_ns, 0, 9)
    assert after is not None and (after.steps, after.at_ns) == (2, 1000)


def test_nobody_needs_what_only_ended_steps_read() -> None:
    runs = table()
    run = submit(runs, workflow("a"))
    task = task_of(run, "a")
    runs.apply(Finished(run.id, 0, 0, task.attempt, "pool:0", 1, 2, msgspec.Raw(b"\xc0")))
    assert need_of(run, [0], expected_ns, 0, 9) is None


def test_a_far_reader_is_expected_never_rather_than_looked_for() -> None:
    run = submit(table(), workflow(" -> ".join(f"s{i}" for i in range(2 * MANY))))
    need = need_of(run, [2 * MANY - 1], expected_ns, 0, 9)
    assert need is not None and need.at_ns == float("inf")


@pytest.mark.parametrize(("between", "same"), [("user", False), ("all", True)])
def test_users_share_beginnings_only_where_the_config_says_so(between: str, same: bool) -> None:
    about = LoadedModel(4096, 64, digest="weights")
    written = workflow("a", a={"op": "llm.decode", "inputs": {"prefix": {"ids": [1], "prompt_tokens": 1}}})
    one, two = submit(table(), written), submit(table(), written)
    two.uid = one.uid + 1
    roots = {root_of(task_of(run, "a"), about, Sharing(between)) for run in (one, two)}
    assert (len(roots) == 1) is same
    assert root_of(task_of(one, "a"), about, Sharing("off")) == b""
    assert root_of(task_of(one, "a"), about, Sharing(between)) != root_of(task_of(one, "a"), LoadedModel(4096, 64, digest="other"), Sharing(between))  # fmt: skip
