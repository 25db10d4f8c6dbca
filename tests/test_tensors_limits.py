"""Small tensors that are named often, and clients' memory: what they count, and what they cannot be blown up to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.core import Durability, RunState
from hexrt.errors import BadRequest, TaskFailed
from hexrt.protocol.host import Made
from hexrt.runtime.answers import ended_of
from hexrt.workflow.model import StepSpec, Workflow
from tests.tensor_bodies import make
from tests.tensor_rig import Rig, call, named, ref, rigged

MIB = 1 << 20
LIMITS = {"max_output_mib": 4, "max_run_mib": 8, "max_graph_mib": 1}
Scene = tuple[Rig, asyncio.Runner]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with rigged(tmp_path, limits=LIMITS) as found:
        yield found
        found[0].check_empty()


def held(rig: Rig) -> int:
    return rig.table.holding.held_bytes


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.SYNC])
def test_an_ended_run_holds_its_clients_memory_no_longer_than_anything_names_it(scene: Scene, durability: Durability) -> None:  # fmt: skip
    rig, runner = scene
    a = make(MIB // 4)
    run = runner.run(rig.submit(Workflow((call("sum", "total", named(1, a)),)), durability, {1: a}))
    assert run.ended_ns or run.held_bytes > MIB
    runner.run(rig.result(run))
    rig.check()
    assert run.held_bytes == held(rig) < 10_000


def test_an_ended_run_whose_result_names_a_part_of_its_clients_memory_holds_all_of_it(scene: Scene) -> None:
    rig, runner = scene
    a, b = make(MIB // 4), make(2000)
    steps = (call("sum", "total", named(1, a)), call("back", "same", named(2, b)))
    run = runner.run(rig.submit(Workflow(steps), arrays={1: a, 2: b}))
    _, found = runner.run(rig.result(run))
    np.testing.assert_array_equal(found["back"], b)
    rig.check()
    assert MIB + 16_000 < run.held_bytes == held(rig) < MIB + 30_000
    rig.forget_ended()
    assert held(rig) == rig.table.holding.ended_bytes == 0


def often(array: Any, count: int) -> Workflow:
    return Workflow((StepSpec("s", "noop", inputs={"value": [named(1, array)] * count}),), outputs={"n": ref("s.0")})


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.SYNC])
def test_a_workflow_that_names_one_small_tensor_too_often_is_refused_by_the_limit(scene: Scene, durability: Durability) -> None:  # fmt: skip
    rig, runner = scene
    a = make(MIB // 4)
    with pytest.raises(BadRequest, match=r"8388608 that limits\.max_run_mib allows") as caught:
        runner.run(rig.submit(often(a, 10_000), durability, {1: a}))
    assert caught.value.where == "steps.s.inputs.value[7]"
    assert not rig.table.runs and held(rig) == 0


def test_a_workflow_that_was_taken_with_more_bytes_of_tensors_than_a_graph_may_have_goes_on_after_a_restart(tmp_path: Path) -> None:  # fmt: skip
    a = make(MIB // 4)
    (tmp_path / "1").mkdir()
    with rigged(tmp_path / "1", limits=LIMITS) as (rig, runner):
        rig.daemon.brain.paused = True
        run = runner.run(
            rig.submit(Workflow((call("back", "same", [named(1, a), named(1, a)]),)), Durability.SYNC, {1: a})
        )
    with rigged(tmp_path / "1", limits=LIMITS) as (rig, runner):
        result, found = runner.run(rig.result(rig.table.runs[run.id]))
        assert result.state is RunState.SUCCEEDED, result.errors
        np.testing.assert_array_equal(found["back"][1], a)


def test_an_output_that_names_one_tensor_too_often_fails_its_step(scene: Scene) -> None:
    rig, runner = scene
    steps = (call("a", "make", MIB // 4), call("b", "often", ref("a"), count=3), call("c", "often", ref("a"), count=4))
    run = runner.run(rig.submit(Workflow(steps, outputs={"b": ref("b")}), Durability.SYNC))
    result, _ = runner.run(rig.result(run))
    assert result.state is RunState.FAILED and set(result.errors) == {"c"}
    assert "more than the 4194304" in result.errors["c"].message


def test_a_host_that_does_not_count_is_found_out_before_anything_is_copied(scene: Scene) -> None:
    rig, runner = scene
    a = make(MIB // 4)
    rig.daemon.brain.paused = True
    run = runner.run(rig.submit(often(a, 1), arrays={1: a}))
    output = msgspec.Raw(values.encode([named(1, a)] * 1000))
    with pytest.raises(TaskFailed, match=r"limits\.max_output_mib"):
        rig.tensors.accept(None, run, 0, output, (Made(1, -1, 0, a.nbytes),))
    rig.check()
    rig.daemon.brain.paused = False
    rig.service.owner.wake()
    runner.run(rig.result(run))


def test_a_tensor_counts_at_each_place_that_names_it(scene: Scene) -> None:
    rig, runner = scene
    steps = (call("a", "make", MIB // 4), call("b", "often", ref("a"), count=3))
    run = runner.run(rig.submit(Workflow(steps, outputs={"b": ref("b")})))
    runner.run(rig.result(run))
    assert 3 * MIB < run.held_bytes < 3 * MIB + 10_000


def test_what_is_kept_of_an_ended_run_has_no_more_bytes_than_the_run_may_hold(scene: Scene) -> None:
    rig, runner = scene
    names = {f"n{i}": ref("a") for i in range(10)}
    run = runner.run(rig.submit(Workflow((call("a", "make", MIB // 4),), outputs=names)))
    _, found = runner.run(rig.result(run))
    assert len(found) == 10
    ended = ended_of(run, rig.tensors.inliner())
    assert len(ended.outputs) == 8 and len(ended.errors) == 2
    assert "limits.max_run_mib" in ended.errors["outputs.n9"].message
