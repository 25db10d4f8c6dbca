"""The brain: given this state and these devices, exactly these launches."""

from __future__ import annotations

from typing import Any

import pytest

from hexrt.brain.decide import Brain, Commands
from hexrt.brain.engines import Engines
from hexrt.brain.view import Device
from hexrt.core import DeviceKind
from hexrt.events import Failed
from hexrt.ops.spec import OpSpec, Part
from hexrt.runtime.entities import Run
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import PRIOR_NS, CostModel
from hexrt.scheduling.rank import upward_ranks
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import Needs, StepSpec, Workflow
from tests.llm_desk import keeper_of
from tests.notation import OPS, finished, submit, table, task_of, workflow

MS = 1_000_000
BOTH = OpSpec("both", "", (Part("run", (DeviceKind.POOL, DeviceKind.NPU), "x:y"),))
SLOW = OpSpec("slow", "", (Part("run", (DeviceKind.POOL,), "x:y"),))
ALL = {**OPS, "both": BOTH, "slow": SLOW}


def brain(runs: RunTable, *names: str, window: int = 64) -> Brain:
    cost = CostModel()
    made = Brain(runs, cost, Engines({}, keeper_of(), 16, 1))
    for name in names:
        kind = DeviceKind(name.split(":")[0])
        limit = window if kind is DeviceKind.POOL else 2
        made.add_device(Device(name, kind, limit, "pool" if kind is DeviceKind.POOL else name, ready=True))
    return made


def sent(commands: Commands) -> dict[str, list[str]]:
    """Step ids by device, in order of sending."""
    return {device: [message[6] for message in messages] for device, messages in commands.send.items()}


def learn(made: Brain, op: str, device: str, took_ns: int, work: int = 1) -> None:
    made.cost.observe(op, 0, device, work, took_ns)


def test_a_task_of_unknown_cost_is_sent_alone_to_each_worker() -> None:
    runs = table()
    submit(runs, workflow("a, b, c"))
    made = brain(runs, "pool:0", "pool:1")
    assert sent(made.decide(1)) == {"pool:0": ["a"], "pool:1": ["b"]}
    assert sent(made.decide(2)) == {}


def test_short_tasks_are_sent_ahead_up_to_the_window() -> None:
    runs = table()
    run = submit(runs, workflow(", ".join(f"s{i}" for i in range(10))))
    made = brain(runs, "pool:0", window=4)
    learn(made, "noop", "pool", 1000)
    assert sent(made.decide(1)) == {"pool:0": ["s0", "s1", "s2", "s3"]}
    assert made.devices["pool:0"].backlog_ns == 4000 and run.in_flight == 4


def test_a_chain_of_short_steps_is_sent_to_one_worker_before_its_first_has_ended() -> None:
    runs = table()
    submit(runs, workflow("a -> b -> c, c -> d, x -> d"))
    made = brain(runs, "pool:0", "pool:1")
    learn(made, "noop", "pool", 1000)
    commands = made.decide(1)
    assert sent(commands) == {"pool:0": ["a", "b", "c"], "pool:1": ["x"]}
    a, b, _ = commands.send["pool:0"]
    assert [tuple(binding)[3] for binding in b[11]] == [a[1]]


def test_a_chain_through_a_step_that_is_not_idempotent_is_not_sent_ahead() -> None:
    runs = table()
    submit(runs, workflow("a -> b -> c", b={"idempotent": False}))
    made = brain(runs, "pool:0")
    learn(made, "noop", "pool", 1000)
    assert sent(made.decide(1)) == {"pool:0": ["a"]}


def test_the_start_of_a_step_that_is_not_idempotent_is_recorded_before_it_is_sent() -> None:
    runs = table()
    submit(runs, workflow("a", a={"idempotent": False}))
    commands = brain(runs, "pool:0").decide(7)
    assert commands.send == {}
    ((device, message, started, _),) = commands.gated
    assert (device, message[6], started.step, started.attempt, started.at_ns) == ("pool:0", "a", 0, 1, 7)


def test_higher_priority_goes_first_and_then_the_longer_remaining_path() -> None:
    runs = table()
    submit(runs, workflow("short, long -> behind, urgent", urgent={"priority": 5}))
    made = brain(runs, "pool:0")
    made.cost.observe("noop", 0, "pool", 0, 2 * MS)
    order = []
    for now in range(1, 5):
        ((step,),) = sent(made.decide(now)).values()
        order.append(step)
        task = next(t for r in runs.runs.values() for s in r.steps for t in s.tasks if s.node.id == step)
        made.devices["pool:0"].drop(task.command)
        runs.apply(finished(task))
    assert order == ["urgent", "long", "short", "behind"] or order == ["urgent", "long", "behind", "short"]


def both(*ids: str, device: str | None = None) -> tuple[RunTable, Run]:
    runs = table(ALL)
    needs = None if device is None else Needs(device)
    return runs, submit(runs, Workflow(tuple(StepSpec(i, "both", needs=needs) for i in ids)))


def test_a_step_goes_where_it_ends_first_queues_included() -> None:
    runs, _ = both("a", "b", "c")
    made = brain(runs, "pool:0", "npu:0")
    learn(made, "both", "pool", 30 * MS)
    learn(made, "both", "npu:0", 12 * MS)
    assert sent(made.decide(1)) == {"npu:0": ["a", "b"], "pool:0": ["c"]}


def test_a_step_waits_for_the_device_that_ends_it_first_rather_than_start_on_a_slow_one() -> None:
    runs, _ = both("a", "b", "c")
    made = brain(runs, "pool:0", "npu:0")
    learn(made, "both", "pool", 900 * MS)
    learn(made, "both", "npu:0", 12 * MS)
    assert sent(made.decide(1)) == {"npu:0": ["a", "b"]}
    assert made.queued == 1


def test_the_more_urgent_task_gets_a_free_worker_whatever_else_its_op_could_run_on() -> None:
    runs = table(ALL)
    submit(runs, Workflow((StepSpec("first", "slow"),)))
    made = brain(runs, "pool:0", "npu:0")
    learn(made, "both", "pool", MS)
    learn(made, "both", "npu:0", 1000 * MS)
    assert sent(made.decide(1)) == {"pool:0": ["first"]}
    submit(runs, Workflow((StepSpec("later", "slow"),)))
    submit(runs, Workflow((StepSpec("urgent", "both", priority=1),)))
    first = next(iter(made.devices["pool:0"].window))
    task = made.devices["pool:0"].drop(first)
    assert task is not None
    runs.apply(finished(task))
    assert sent(made.decide(2)) == {"pool:0": ["urgent"]}


@pytest.mark.parametrize(("need", "where"), [("npu", "npu:0"), ("pool:1", "pool:1")])
def test_a_device_that_a_step_insists_on_is_kept_to(need: str, where: str) -> None:
    runs, _ = both("a", device=need)
    made = brain(runs, "pool:0", "pool:1", "npu:0")
    learn(made, "both", "pool", MS)
    learn(made, "both", "npu:0", 100 * MS)
    assert sent(made.decide(1)) == {where: ["a"]}


def test_a_step_that_no_device_can_run_is_refused_by_name_with_the_reason() -> None:
    runs, run = both("a", device="npu")
    made = brain(runs, "pool:0", "npu:0")
    made.devices["npu:0"].ready, made.devices["npu:0"].lost = False, "no provider"
    (event,) = made.decide(1).events
    assert isinstance(event, Failed) and event.error.kind == "unavailable" and "no provider" in event.error.message
    runs.apply(event)
    assert run.ended_ns


def test_a_device_that_still_starts_is_waited_for_and_not_refused() -> None:
    runs, _ = both("a", device="npu")
    made = brain(runs, "npu:0")
    made.devices["npu:0"].ready = False
    commands = made.decide(1)
    assert commands.send == {} and commands.events == [] and made.queued == 1


def test_a_cancelled_run_gives_up_its_queued_tasks_and_stops_the_placed_one() -> None:
    from hexrt.events import CancelRequested

    runs = table()
    run = submit(runs, workflow("a, b"))
    made = brain(runs, "pool:0")
    assert sent(made.decide(1)) == {"pool:0": ["a"]}
    runs.apply(CancelRequested(run.id, 1, 1, 2, ""))
    made.devices["pool:0"].drop(task_of(run, "a").command)
    commands = made.decide(3)
    assert commands.stop == [task_of(run, "a")] and commands.send == {}


def test_the_binding_of_a_large_output_carries_only_the_part_that_is_referred_to() -> None:
    runs = table()
    run = submit(runs, Workflow((StepSpec("a", "noop"), StepSpec("b", "noop", inputs={"value": {"$ref": "a.wanted"}}))))
    made = brain(runs, "pool:0")
    made.decide(1)
    a = task_of(run, "a")
    made.devices["pool:0"].drop(a.command)
    runs.apply(finished(a, {"wanted": 7, "rest": "x" * 10_000}))
    ((message,),) = made.decide(2).send.values()
    ((to, path, value, local),) = message[11]
    assert (to, path, bytes(value), local) == (("value",), (), b"\x07", 0)


def test_upward_ranks_are_the_longest_way_to_the_end() -> None:
    graph = check_workflow(workflow("a -> b -> d, a -> c -> d"), OPS, GraphLimits(), 600.0)
    costs: dict[str, float] = {"a": 1, "b": 10, "c": 2, "d": 5}
    by_name = dict(zip((n.id for n in graph.nodes), upward_ranks(graph, lambda n: costs[n.id]), strict=True))
    assert by_name == {"a": 16, "b": 15, "c": 7, "d": 5}


def test_the_cost_model_learns_by_size_and_survives_a_restart() -> None:
    cost = CostModel()
    assert cost.predict_ns("op", 0, "pool", 100) == PRIOR_NS
    for _ in range(20):
        cost.observe("op", 0, "pool", 100, 1000)
        cost.observe("op", 0, "pool", 100_000, 9000)
    again = CostModel()
    again.load(cost.dump())
    assert (again.predict_ns("op", 0, "pool", 120), again.predict_ns("op", 0, "pool", 10**9)) == (1000, 9000)


def test_the_cost_model_follows_a_change() -> None:
    cost: Any = CostModel()
    for took in [1000] * 10 + [2000] * 20:
        cost.observe("op", 0, "pool", 1, took)
    assert 1900 < cost.predict_ns("op", 0, "pool", 1) <= 2000


def test_a_cold_start_is_forgotten_as_soon_as_a_warm_run_was_seen() -> None:
    cost = CostModel()
    for took in (4000, 100, 3000, 110):
        cost.observe("op", 0, "pool", 1, took)
    assert cost.predict_ns("op", 0, "pool", 1) == 110
