"""Tensors between steps: by where they lie, never twice on a socket, right under every way of passing them on, and freed to the last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexrt.core import Durability, RunId, RunState
from hexrt.errors import BadRequest
from hexrt.events import CancelRequested
from hexrt.memory.passed import Export
from hexrt.values import decode
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.tensor_bodies import make
from tests.tensor_rig import ME, Rig, call, is_in_flight, named, ref, rigged

Scene = tuple[Rig, asyncio.Runner]
MIB = 1 << 20


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with rigged(tmp_path_factory.mktemp("rig")) as found:
        yield found


@pytest.fixture(autouse=True)
def all_freed(scene: Scene) -> Iterator[None]:
    yield
    rig, _ = scene
    rig.check()
    rig.check_empty()


def outputs(scene: Scene, *steps: StepSpec, durability: Durability = Durability.NONE, arrays: Any = None, names: str = "") -> dict[str, Any]:  # fmt: skip
    rig, runner = scene
    wanted = {name: ref(name) for name in names.split()}
    return runner.run(rig.run(Workflow(steps, outputs=wanted), durability, arrays))


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_tensor_goes_through_a_chain(scene: Scene, durability: Durability, idempotent: bool) -> None:
    steps = [call("s0", "make", 1 << 16, idempotent)]
    steps += [call(f"s{i}", "add", ref(f"s{i - 1}"), idempotent, by=i) for i in range(1, 6)]
    found = outputs(scene, *steps, durability=durability)["s5"]
    np.testing.assert_allclose(found, make(1 << 16) + 15, rtol=1e-5)


def test_what_is_known_to_be_short_is_sent_ahead_and_finds_its_tensors_in_the_workers_own_ring(scene: Scene) -> None:
    for _ in range(5):  # the first times teach the cost model
        steps = [call("s0", "make", 2000)]
        steps += [call(f"s{i}", "both" if i % 2 else "add", ref(f"s{i - 1}" + ".part" * (i > 1 and i % 2 == 0))) for i in range(1, 4)]  # fmt: skip
        found = outputs(scene, *steps, call("end", "same", ref("s3.whole")))["end"]
        np.testing.assert_allclose(found, make(2000)[::2] + 1)


def test_an_input_that_is_returned_whole_is_not_copied(scene: Scene) -> None:
    rig, runner = scene
    steps = (call("a", "make", 50_000), call("b", "same", ref("a")), call("c", "same", ref("b")))
    run = runner.run(rig.submit(Workflow(steps, outputs={"a": ref("a"), "c": ref("c")})))
    runner.run(rig.result(run))
    assert run.tensors is not None and len(run.tensors) == 1
    assert rig.tensors.statistics()["tensor_bytes"] == 200_000


def test_an_array_that_is_named_twice_lies_in_one_place(scene: Scene) -> None:
    rig, runner = scene
    steps = (call("a", "make", 5000), call("b", "twice", ref("a")))
    run = runner.run(rig.submit(Workflow(steps, outputs={"b": ref("b")})))
    _, found = runner.run(rig.result(run))
    for array, wanted in zip(found["b"], [make(5000) + 3] * 2 + [make(5000)] * 2, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert run.tensors is not None and len(run.tensors) == 2


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.SYNC])
def test_a_map_goes_over_a_list_of_tensors_and_its_outputs_are_joined_and_picked(scene: Scene, durability: Durability) -> None:  # fmt: skip
    steps = (
        call("a", "make", 8000),
        call("list", "split", ref("a")),
        StepSpec("each", "map.python", {"function": "tests.tensor_bodies:add"}, {"value": {"$item": ""}, "arguments": {"by": 2}}, map=MapSpec(ref("list")), idempotent=True),
        call("one", "total", ref("each.2")),
        call("mean", "mean", [ref("each.0"), ref("each.2")]),
    )  # fmt: skip
    found = outputs(scene, *steps, durability=durability, names="each one mean")
    a = make(8000)
    for array, wanted in zip(found["each"], [a + 2, a[:4000] + 2, a * 2 + 2], strict=True):
        np.testing.assert_allclose(array, wanted)
    assert found["one"] == pytest.approx(float(np.sum(a * 2 + 2, dtype=np.float64)), abs=0.1)
    np.testing.assert_allclose(found["mean"], (a * 3 + 4) / 2, rtol=1e-4, atol=1e-5)


def test_bodies_cannot_write_what_they_are_given(scene: Scene) -> None:
    array = make(5000)
    found = outputs(scene, call("a", "make", 5000), call("b", "is_read_only", ref("a")), call("c", "is_read_only", named(1, array)), arrays={1: array}, names="b c")  # fmt: skip
    assert found == {"b": True, "c": True}


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.ASYNC, Durability.SYNC])
def test_what_a_client_passes_reaches_steps_listed_maps_and_the_result(scene: Scene, durability: Durability) -> None:
    a, b = make(300_000, 1), make(3000, 2)
    given = {1: a, 2: b}
    steps = (
        call("sum", "total", named(1, a)),
        call("back", "same", {"a": named(1, a), "b": [named(2, b)]}),
        StepSpec("each", "map.python", {"function": "tests.tensor_bodies:half"}, {"value": {"$item": ""}}, map=MapSpec([named(1, a), named(2, b)]), idempotent=True),
    )  # fmt: skip
    found = outputs(scene, *steps, durability=durability, arrays=given, names="sum back each")
    assert found["sum"] == pytest.approx(float(np.sum(a, dtype=np.float64)))
    np.testing.assert_array_equal(found["back"]["a"], a)
    np.testing.assert_array_equal(found["back"]["b"][0], b)
    np.testing.assert_array_equal(found["each"][0], a[:150_000])
    np.testing.assert_array_equal(found["each"][1], b[:1500])


def test_a_clients_memory_goes_when_the_run_has_ended_and_nothing_of_the_result_lies_in_it(scene: Scene) -> None:
    rig, runner = scene
    a = make(5000)
    run = runner.run(rig.submit(Workflow((call("sum", "total", named(1, a)),)), arrays={1: a}))
    runner.run(rig.result(run))
    assert rig.tensors.statistics()["segments"] == len(rig.links) and not run.tensors


@pytest.mark.parametrize(
    ("handle", "elements", "message", "where"),
    [
        (2, 5000, "names tensor 2, which did not come", "steps.s.inputs.value"),
        (1, 4999, "has 19996 bytes, and tensor 1 came with 20000", "steps.s.inputs.value"),
        (1 << 40, 5000, "which did not come", "steps.s.inputs.value"),
    ],
)
def test_a_workflow_that_names_what_its_client_did_not_pass_is_refused(scene: Scene, handle: int, elements: int, message: str, where: str) -> None:  # fmt: skip
    rig, runner = scene
    a = make(5000)
    step = call("s", "total", named(handle, a[:elements]))
    with pytest.raises(BadRequest, match=message) as refused:
        runner.run(rig.submit(Workflow((step, call("t", "total", named(1, a)))), arrays={1: a}))
    assert refused.value.where == where
    assert not rig.table.runs


def test_what_no_step_names_is_refused(scene: Scene) -> None:
    rig, runner = scene
    a = make(5000)
    with pytest.raises(BadRequest, match="does not name tensor 2"):
        runner.run(rig.submit(Workflow((call("t", "total", named(1, a)),)), arrays={1: a, 2: a}))


def test_a_workflow_cannot_name_the_tensor_of_another_run(scene: Scene) -> None:
    rig, runner = scene
    other = runner.run(rig.submit(Workflow((call("a", "make", 5000),))))
    runner.run(rig.result(other))
    assert other.tensors
    for handle in other.tensors:
        with pytest.raises(BadRequest, match="did not come"):
            runner.run(rig.submit(Workflow((call("s", "total", named(handle, make(5000))),))))


def test_a_tensor_in_params_is_refused_by_name(scene: Scene) -> None:
    rig, runner = scene
    step = StepSpec("s", "text.template", {"template": "x", "function": named(1, make(5000))})
    with pytest.raises(BadRequest, match="pass it in `inputs`"):
        runner.run(rig.submit(Workflow((step,)), arrays={1: make(5000)}))


def test_an_output_that_names_what_it_was_not_given_fails_its_step(scene: Scene) -> None:
    rig, runner = scene
    other = runner.run(rig.submit(Workflow((call("a", "make", 2000),))))
    runner.run(rig.result(other))
    assert other.tensors
    (handle,) = other.tensors
    result, _ = runner.run(rig.result(runner.run(rig.submit(Workflow((call("s", "forge", 1, handle=handle),))))))
    assert result.state is RunState.FAILED and "names a tensor that is not there" in result.errors["s"].message


def test_what_finds_no_room_in_the_ring_goes_inline(scene: Scene) -> None:
    found = outputs(scene, *(call(f"m{i}", "make", 1_200_000 >> (i % 2), seed=i) for i in range(6)))
    for i in range(6):
        np.testing.assert_array_equal(found[f"m{i}"], make(1_200_000 >> (i % 2), i))


def test_a_failing_step_that_is_tried_again_reads_its_input_each_time(scene: Scene) -> None:
    rig, runner = scene
    steps = (call("a", "make", 9000), StepSpec("b", "map.python", {"function": "tests.tensor_bodies:fail"}, {"value": ref("a")}, retries=2, idempotent=True))  # fmt: skip
    run = runner.run(rig.submit(Workflow(steps)))
    result, _ = runner.run(rig.result(run))
    assert "no more of these 9000" in result.errors["b"].message
    assert len(run.history) == 2


def test_a_task_that_is_cancelled_keeps_what_it_reads_until_its_worker_is_dead(scene: Scene) -> None:
    rig, runner = scene

    async def cancel() -> None:
        sleeper = StepSpec("b", "map.python", {"function": "tests.hostile:sleep_for_ever"}, {}, after=("a",))
        reader = call("c", "same", ref("a"))
        run = await rig.submit(Workflow((call("a", "make", 9000), sleeper, reader), outputs={"c": ref("c")}))
        await rig.until(lambda: is_in_flight(run, "b"))
        rig.service.owner.post(CancelRequested(run.id, 0, 1, rig.daemon._clock.now_ns(), ""))
        result, _ = await rig.result(run)
        assert result.state is RunState.CANCELLED

    runner.run(cancel())
    runner.run(rig.until(lambda: all(d.ready for d in rig.daemon.brain.devices.values())))


def test_tensors_count_as_if_they_were_in_the_outputs(scene: Scene) -> None:
    rig, runner = scene
    run = runner.run(rig.submit(Workflow((call("a", "make", MIB // 4), call("b", "add", ref("a"))))))
    runner.run(rig.result(run))
    assert MIB < run.held_bytes < MIB + 10_000  # that of `a`, which was large and is read by nobody, is gone


def test_ended_runs_that_are_kept_leave_half_a_ring_free(scene: Scene) -> None:
    rig, runner = scene
    runs = []
    for i in range(24):
        runs.append(runner.run(rig.submit(Workflow((call("a", "make", 120_000, seed=i),)))))
        runner.run(rig.result(runs[-1]))
    rig.service.owner.close_ended()
    rings = [segment for segment in rig.tensors._segments.values() if segment.filling]
    runner.run(rig.until(lambda: all(segment.live_bytes <= segment.bytes // 2 for segment in rings)))
    rig.check()
    assert rig.tensors.statistics()["tensors"] == 24
    for i, run in enumerate(runs):
        _, found = runner.run(rig.result(run))
        np.testing.assert_array_equal(found["a"], make(120_000, i))


def test_a_result_is_still_there_after_its_run_was_let_go_of_meanwhile(scene: Scene) -> None:
    rig, runner = scene
    run = runner.run(rig.submit(Workflow((call("a", "make", 9000),)), Durability.SYNC))
    export = runner.run(rig.service.result(ME, RunId(run.id), True))
    assert isinstance(export, Export)
    rig.forget_ended()
    runner.run(rig.until(lambda: rig.daemon.store.pending_bytes == 0))
    result, fd = export.make()
    assert fd == -1
    np.testing.assert_array_equal(decode(result.outputs["a"]), make(9000))


def test_a_run_that_is_let_go_of_while_the_daemon_closes_is_no_error(tmp_path: Path) -> None:
    with rigged(tmp_path) as (rig, runner):
        run = runner.run(rig.submit(Workflow((call("a", "make", 9000),), outputs={"a": ref("a")})))
        runner.run(rig.result(run))

        async def close() -> None:
            rig.service.owner.close_ended()
            asyncio.get_running_loop().call_soon(rig.service._forget, run)
            rig.tensors.close()
            await asyncio.sleep(0)

        runner.run(close())
        assert rig.daemon.failure is None and run.id not in rig.table.runs
