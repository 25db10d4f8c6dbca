"""Random graphs of tensors against the same functions called in a row, with and without a worker that is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexrt.core import Durability, RunState
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests import tensor_bodies as bodies
from tests.seeds import seeds
from tests.tensor_rig import Rig, call, named, ref, rigged

Scene = tuple[Rig, asyncio.Runner]
FUNCTIONS = ("add", "same", "half", "both", "twice", "split", "mean", "map", "total")
KINDS_OF_LOSS = {"worker_died", "device_lost", "skipped"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with rigged(tmp_path_factory.mktemp("rig")) as found:
        yield found


class Graph:
    """A random workflow, and what each step must give. `arrays` are the paths that lead to arrays."""

    def __init__(self, draw: random.Random, count: int) -> None:
        self.draw = draw
        self.steps: list[StepSpec] = []
        self.values: dict[str, Any] = {}
        self.arrays: list[tuple[str, Any]] = []
        self.given: dict[int, Any] = {}
        for i in range(count):
            self._add(f"s{i}")

    def _add(self, name: str) -> None:
        draw = self.draw
        kind = draw.choice(FUNCTIONS) if self.arrays else "make"
        if draw.random() < 0.2:
            kind = draw.choice(("make", "client"))
        always = draw.random() < 0.7  # idempotent
        if kind == "make":
            size, seed = draw.randrange(100, 6000), draw.randrange(1000)
            self._done(call(name, "make", size, always, seed=seed), bodies.make(size, seed))
        elif kind == "client":
            array = bodies.make(draw.randrange(10, 6000), draw.randrange(1000))
            handle = draw.randrange(1, 1 << 32)
            self.given[handle] = array
            self._done(call(name, "same", named(handle, array), always), array)
        elif kind == "mean":
            path, array = draw.choice(self.arrays)
            alike = [p for p, a in self.arrays if len(a) == len(array)]
            chosen = [draw.choice(alike) for _ in range(draw.randrange(1, 4))]
            values = [dict(self.arrays)[p] for p in chosen]
            self._done(call(name, "mean", [ref(p) for p in chosen], always), bodies.mean(values))
        elif kind == "map":
            lists = [n for n, v in self.values.items() if isinstance(v, list)]
            if lists:
                source = draw.choice(lists)
                step = StepSpec(
                    name, "map.python", {"function": "tests.tensor_bodies:add"}, {"value": {"$item": ""}},
                    map=MapSpec(ref(source), draw.choice((None, 1))), idempotent=always,
                )  # fmt: skip
                self._done(step, [bodies.add(v) for v in self.values[source]])
        else:
            path, array = draw.choice(self.arrays)
            self._done(call(name, kind, ref(path), always), getattr(bodies, kind)(array))

    def _done(self, step: StepSpec, value: Any) -> None:
        self.steps.append(step)
        self.values[step.id] = value
        if isinstance(value, np.ndarray) and len(value) > 3:
            self.arrays.append((step.id, value))
        elif isinstance(value, list):
            self.arrays += [(f"{step.id}.{i}", v) for i, v in enumerate(value) if len(v) > 3]
        elif isinstance(value, dict):
            self.arrays += [(f"{step.id}.{k}", v) for k, v in value.items() if isinstance(v, np.ndarray) and len(v) > 3]

    def workflow(self) -> Workflow:
        wanted = self.draw.sample(list(self.values), self.draw.randrange(1, len(self.values) + 1))
        return Workflow(tuple(self.steps), outputs={name: ref(name) for name in wanted})


def check_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            check_equal(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            check_equal(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


def run_graphs(scene: Scene, draw: random.Random, count: int) -> None:
    """Runs a few graphs at the same time."""
    rig, runner = scene

    async def one(graph: Graph, durability: Durability) -> None:
        found = await rig.run(graph.workflow(), durability, graph.given)
        for name, value in found.items():
            check_equal(value, graph.values[name])

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                graph = Graph(draw, draw.randrange(1, 12))
                tasks.create_task(one(graph, draw.choice((Durability.NONE, Durability.NONE, Durability.SYNC))))

    runner.run(all_of_them())
    rig.check()


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_graphs_give_what_plain_calls_give(scene: Scene, seed: int) -> None:
    run_graphs(scene, random.Random(seed), 4)
    scene[0].check_empty()


@pytest.mark.campaign
@given(st.integers(0, 2**32))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_many_random_graphs_give_what_plain_calls_give(scene: Scene, seed: int) -> None:
    run_graphs(scene, random.Random(seed), 8)
    scene[0].check_empty()


async def kill_at(rig: Rig, turn: int, pick: int) -> None:
    """Kills one worker at the start of the owner's turn of that number from now: whatever it is filling, has filled or reads."""
    owner = rig.service.owner
    goal = owner.turns + turn
    await rig.until(lambda: owner.turns >= goal or not rig.table.open_runs)
    devices = rig.daemon.brain.devices
    await rig.until(lambda: any(devices[link.device].ready for link in rig.links))
    ready = [link for link in rig.links if devices[link.device].ready]
    os.kill(ready[pick % len(ready)].pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_a_worker_killed_at_any_turn_costs_no_answer_and_leaks_nothing(scene: Scene, seed: int) -> None:
    rig, runner = scene
    draw = random.Random(seed)

    async def scenario() -> None:
        graphs = [Graph(draw, 10) for _ in range(3)]
        for graph in graphs:
            graph.steps = [_always(step) for step in graph.steps]
        runs = [
            await rig.submit(g.workflow(), draw.choice((Durability.NONE, Durability.SYNC)), g.given) for g in graphs
        ]
        await kill_at(rig, seed % 20, seed)
        for graph, run in zip(graphs, runs, strict=True):
            result, found = await rig.result(run)
            if result.state is not RunState.SUCCEEDED:
                assert {error.kind for error in result.errors.values()} <= KINDS_OF_LOSS
            for name, value in found.items():
                check_equal(value, graph.values[name])

    runner.run(scenario())
    rig.check()
    rig.check_empty()


def _always(step: StepSpec) -> StepSpec:
    return StepSpec(step.id, step.op, step.params, step.inputs, map=step.map, idempotent=True)


@pytest.mark.parametrize("function", ["die_while_filling", "die_while_reading"])
@pytest.mark.parametrize("durability", [Durability.NONE, Durability.SYNC])
def test_a_worker_that_dies_in_the_middle_of_a_tensor_is_replaced_and_the_step_done_again(
    scene: Scene, tmp_path: Path, function: str, durability: Durability
) -> None:
    rig, runner = scene
    steps = (
        call("a", "make", 9000),
        call("b", function, ref("a"), mark=str(tmp_path / "mark")),
        call("c", "same", ref("b")),
    )
    found = runner.run(rig.run(Workflow(steps), durability))["c"]
    a = bodies.make(9000)
    check_equal(found, [a + np.float32(1), np.ones(2000, np.float32)] if function == "die_while_filling" else a + a[:4500].sum())  # fmt: skip
    rig.check()
    rig.check_empty()
