"""A daemon with little room: what would hold too many bytes or tasks is refused or stopped by name, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hexrt.client import Client
from hexrt.core import RunState
from hexrt.errors import Overloaded
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.notation import workflow
from tests.running import CONFIG, Running

MIB = 1 << 20
LIMITS = """
[limits]
max_open_tasks = 500
max_run_mib = 8
max_held_mib = 12
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Running(tmp_path_factory.mktemp("room"), CONFIG + LIMITS) as running, running.client() as connected:
        yield connected


def asleep(literal: bytes = b"") -> Workflow:
    sleeper = StepSpec("sleep", "map.python", {"function": "tests.hostile:sleep_for_ever"})
    return Workflow((sleeper, StepSpec("literal", "noop", {}, {"value": literal}, after=("sleep",))))


def copies(literal: Any, count: int) -> Workflow:
    """`count` steps that each put out the same literal, all of it wanted in the end."""
    steps = [StepSpec("src", "noop", {}, {"value": literal})]
    steps += [StepSpec(f"s{i}", "noop", {}, {"value": {"$ref": "src"}}) for i in range(count)]
    return Workflow(tuple(steps))


@pytest.mark.parametrize("durability", ["sync", "none"])
def test_outputs_beyond_the_limit_of_a_run_end_that_run_by_name(client: Client, durability: Any) -> None:
    outcome = client.run(copies(bytes(MIB), 30), durability)
    assert outcome.state is RunState.FAILED
    assert {error.kind for error in outcome.errors.values()} == {"out_of_memory"}
    assert "limits.max_run_mib" in next(iter(outcome.errors.values())).message
    client.run(copies(bytes(MIB), 3)).check()


def test_kept_runs_give_way_to_new_ones(client: Client) -> None:
    runs = [client.run(copies(bytes(MIB), 4)).run for _ in range(6)]
    assert client.statistics()["held_bytes"] <= 12.1 * MIB
    assert len(client.result(runs[0]).outputs["s3"]) == MIB  # from the disk


def test_a_run_for_which_the_open_ones_leave_no_room_is_refused_and_fits_once_one_has_ended(client: Client) -> None:
    first, second = client.submit(asleep(bytes(5 * MIB))), client.submit(asleep(bytes(5 * MIB)))
    with pytest.raises(Overloaded, match=r"limits\.max_held_mib"):
        client.submit(asleep(bytes(5 * MIB)))
    client.cancel(first)
    third = client.submit(asleep(bytes(5 * MIB)))
    for run in (second, third):
        client.cancel(run)


def test_the_listed_elements_of_maps_count_as_tasks(client: Client) -> None:
    each = StepSpec("each", "noop", map=MapSpec(list(range(600))))
    with pytest.raises(Overloaded, match="this run has 600"):
        client.submit(Workflow((each,)))
    outcome = client.run(Workflow((StepSpec("each", "noop", map=MapSpec(list(range(400)))),))).check()
    assert len(outcome.outputs["each"]) == 400


def test_a_map_that_fans_out_too_far_for_the_daemon_fails_alone(client: Client) -> None:
    steps = (
        StepSpec("src", "noop", {}, {"value": list(range(5000))}),
        StepSpec("each", "noop", {}, {"value": {"$item": ""}}, map=MapSpec({"$ref": "src"})),
        StepSpec("behind", "noop", after=("each",)),
        StepSpec("other", "noop", {}, {"value": 7}),
    )
    outcome = client.run(Workflow(steps))
    assert (outcome.errors["each"].kind, outcome.errors["behind"].kind) == ("overloaded", "skipped")
    assert "limits.max_open_tasks" in outcome.errors["each"].message and outcome.outputs["other"] == 7
    assert client.statistics()["open_tasks"] == 0
    client.run(workflow("a")).check()
