"""Tensors that outgrow their rings and HOST: they come back as they were, or are made again, or their run says what was lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt.core import DeviceKind, RunId, RunState
from hexrt.devices.link import HostLink
from hexrt.memory.pool import Level
from hexrt.runtime.entities import Run
from hexrt.workflow.model import StepSpec, Workflow
from tests.seeds import seeds
from tests.tensor_bodies import make, total
from tests.tensor_rig import ME, Rig, call, ref, rigged

Scene = tuple[Rig, asyncio.Runner]
MEMORY = {"ring_mib": 1, "host_mib": 4, "nvme_mib": 64}
NUMBERS = 96_000
"""Of one tensor: some more than a third of a ring."""
COUNT = 30
"""Of tensors that wait together: nearly three times as much as HOST holds."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with rigged(tmp_path, memory=MEMORY) as found:
        rig, runner = found
        rig.daemon.brain.engines.keeper.wants_disk = True  # else the first tensors go inline while its host starts
        rig.service.owner.wake()
        runner.run(rig.until(lambda: "disk:0" in rig.daemon.brain.devices and rig.daemon.brain.devices["disk:0"].ready))
        yield found
        runner.run(rig.until(lambda: not len(rig.daemon.brain.engines.keeper.traffic)))
        rig.daemon.brain.engines.keeper.check_integrity()
        rig.daemon.brain.staging.check_integrity(idle=True)
        rig.check_empty()
        assert rig.daemon.brain.engines.keeper.pool.tiers[0].pages == 0, "a page of HOST is left"


def many(idempotent: bool = True, **reader: Any) -> Workflow:
    """COUNT tensors, each read by a step of its own once all are there."""
    made = [call(f"make{i}", "make", NUMBERS, idempotent, seed=i) for i in range(COUNT)]
    made = [msgspec.structs.replace(step, after=(f"make{i - 1}",) if i else ()) for i, step in enumerate(made)]
    there = StepSpec("there", "noop", inputs={"value": 1}, after=tuple(step.id for step in made))
    read = [
        StepSpec(
            f"read{i}",
            "map.python",
            {"function": "tests.tensor_bodies:total"},
            {"value": ref(f"make{i}")},
            after=("there",),
        )
        for i in range(COUNT)
    ]
    return Workflow((*made, there, *read), outputs={f"read{i}": ref(f"read{i}") for i in range(COUNT)})


EXPECTED = {f"read{i}": total(make(NUMBERS, i)) for i in range(COUNT)}


def disk(rig: Rig) -> HostLink:
    return next(link for link in rig.links if link.device == "disk:0")


def in_nvme_alone(rig: Rig) -> int:
    pool = rig.daemon.brain.engines.keeper.pool
    return sum(pool.has(page, Level.NVME) and not pool.has(page, Level.HOST) for page in rig.daemon.brain.staging.paged)


def hold_back_readers(rig: Rig) -> Any:
    """Takes away the devices that steps run on once all tensors are made; returns what gives them back."""
    pools = [d for d in rig.daemon.brain.devices.values() if d.kind is DeviceKind.POOL]

    def set_ready(ready: bool) -> None:
        for device in pools:
            device.ready = ready
        rig.service.owner.wake()

    return set_ready


def made_all(run: Run, name: str) -> bool:
    return sum(step.state.name == "DONE" for step in run.steps if step.node.id.startswith(name)) == COUNT


async def held(rig: Rig, workflow: Workflow, name: str = "make") -> tuple[Run, Any]:
    """A run whose tensors are made and whose readers have no device yet; some of the tensors lie in NVME alone."""
    set_ready = hold_back_readers(rig)
    run = await rig.submit(workflow)
    await rig.until(lambda: made_all(run, name) or run.ended_ns > 0)
    set_ready(False)
    await rig.until(lambda: in_nvme_alone(rig) >= 3 and not len(rig.daemon.brain.engines.keeper.traffic))
    return run, set_ready


def test_more_tensors_than_host_holds_come_back_as_they_were(scene: Scene) -> None:
    rig, runner = scene
    assert runner.run(rig.run(many())) == EXPECTED
    moved = rig.daemon.brain.engines.keeper.statistics()
    assert moved.stored_pages > 0 and moved.loaded_pages > 0
    attempts = runner.run(rig.service.timeline(*_newest(rig))).attempts
    assert sum(a.pages_migrated for a in attempts) > 0
    assert all((a.migration_bytes == 4 * NUMBERS) == (a.pages_migrated == 1) for a in attempts)


def _newest(rig: Rig) -> tuple[Any, Any]:
    return ME, list(rig.table.runs)[-1]


def test_what_one_step_reads_together_and_host_cannot_hold_stays_where_it_was(scene: Scene) -> None:
    rig, runner = scene
    made = [call(f"make{i}", "make", NUMBERS, seed=i) for i in range(COUNT)]
    made = [msgspec.structs.replace(step, after=(f"make{i - 1}",) if i else ()) for i, step in enumerate(made)]
    mean = call("mean", "mean", [ref(f"make{i}") for i in range(COUNT)])
    found = runner.run(rig.run(Workflow((*made, mean), outputs={"mean": ref("mean")})))
    np.testing.assert_allclose(found["mean"], sum(make(NUMBERS, i) for i in range(COUNT)) / COUNT, atol=1e-5)


def test_results_that_host_cannot_hold_leave_room_for_what_steps_read(scene: Scene) -> None:
    rig, runner = scene
    base = many()
    steps = tuple(msgspec.structs.replace(step) for step in base.steps)
    outputs = {f"make{i}": ref(f"make{i}") for i in range(0, COUNT, 2)} | dict(base.outputs)
    found = runner.run(rig.run(Workflow(steps, outputs=outputs)))
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    for i in range(0, COUNT, 2):
        np.testing.assert_array_equal(found[f"make{i}"], make(NUMBERS, i))


def scribble(rig: Rig) -> None:
    """Spoils every page in the file of the NVME tier."""
    for entry in Path(f"/proc/{disk(rig).pid}/fd").iterdir():
        if str(entry.readlink()).startswith(str(rig.daemon._directory)) and entry.stat().st_size == 64 << 20:
            fd = os.open(entry, os.O_RDWR)
            os.pwrite(fd, os.urandom(64 << 20), 0)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            return
    raise AssertionError("the page file was not found")


def test_what_a_spoilt_disk_gives_back_is_noticed_and_made_again(scene: Scene) -> None:
    rig, runner = scene
    run, set_ready = runner.run(held(rig, many()))
    scribble(rig)
    set_ready(True)
    _, found = runner.run(rig.result(run))
    assert found == EXPECTED
    tier = rig.daemon.brain.engines.keeper.pool.tiers[1]
    assert "checksum" in tier.degraded
    assert any(record.state == "lost" for record in run.history)


def test_a_step_says_that_it_waits_for_tensors_from_nvme_or_for_room_in_host(scene: Scene) -> None:
    rig, runner = scene
    staging = rig.daemon.brain.staging
    run, set_ready = runner.run(held(rig, many()))

    def waits() -> set[str]:
        return {step.waits for step in runner.run(rig.service.status(ME, RunId(run.id))).steps}

    assert waits() == {""}
    pid = disk(rig).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        set_ready(True)
        runner.run(rig.until(lambda: len(staging._waits) > 0 and len(staging._unstarted) > 0))
        assert waits() == {"", f"1 tensor ({4 * NUMBERS >> 10} KiB) from nvme", "room in host for 1 tensor"}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert runner.run(rig.result(run))[1] == EXPECTED
    assert waits() == {""}


def test_a_run_may_be_forgotten_while_its_tensors_leave_the_ring_of_a_dead_host(scene: Scene) -> None:
    rig, runner = scene
    traffic = rig.daemon.brain.engines.keeper.traffic
    pid, workers = disk(rig).pid, [link.pid for link in rig.links if link.device.startswith("pool")]
    os.kill(pid, signal.SIGSTOP)
    try:
        run = runner.run(rig.submit(Workflow(tuple(call(f"make{i}", "make", 5000, seed=i) for i in range(8)))))
        runner.run(rig.result(run))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        runner.run(rig.until(lambda: len(traffic) == 8))
        rig.service.owner.close_ended()
        rig.table.forget(run)
        rig.tensors.collect()
    finally:
        os.kill(pid, signal.SIGCONT)
    runner.run(rig.until(lambda: not len(traffic)))
    assert rig.daemon.failure is None
    runner.run(rig.until(lambda: all(d.ready for d in rig.daemon.brain.devices.values())))
    assert rig.tensors.statistics()["segments"] == len(rig.links)


def test_what_is_lost_is_made_again_from_what_is_lost_too(scene: Scene) -> None:
    rig, runner = scene
    made = many()
    steps = {step.id: step for step in made.steps}
    chain = [call(f"add{i}", "add", ref(f"make{i}"), by=1.0) for i in range(COUNT)]
    there = msgspec.structs.replace(steps["there"], after=tuple(step.id for step in chain))
    read = [msgspec.structs.replace(steps[f"read{i}"], inputs={"value": ref(f"add{i}")}) for i in range(COUNT)]
    read += [call(f"again{i}", "total", ref(f"make{i}")) for i in range(COUNT)]
    read = [msgspec.structs.replace(step, after=("there",)) for step in read]
    makes = [steps[f"make{i}"] for i in range(COUNT)]
    workflow = Workflow((*makes, *chain, there, *read), outputs={f"again{i}": ref(f"again{i}") for i in range(COUNT)})
    run, set_ready = runner.run(held(rig, workflow, "add"))
    scribble(rig)
    set_ready(True)
    result, found = runner.run(rig.result(run))
    assert result.state is RunState.SUCCEEDED, result.errors
    assert found == {f"again{i}": total(make(NUMBERS, i)) for i in range(COUNT)}
    assert {run.steps[record.step].node.id[:3] for record in run.history if record.state == "lost"} == {"mak", "add"}


def test_with_no_page_file_tensors_still_move_to_host_and_the_tier_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with rigged(tmp_path, memory=MEMORY | {"host_mib": 64, "nvme_path": str(tmp_path / "file" / "below")}) as (
        rig,
        runner,
    ):
        assert runner.run(rig.run(many())) == EXPECTED
        runner.run(rig.until(lambda: rig.daemon.brain.engines.keeper.pool.tiers[1].closed))
        tier = rig.daemon.brain.engines.keeper.pool.tiers[1]
        assert "memory.nvme_path" in tier.degraded and str(tmp_path) not in tier.degraded
        assert runner.run(rig.run(many())) == EXPECTED
        assert rig.daemon.brain.engines.keeper.statistics().loaded_pages > 0
        rig.check_empty()


def test_a_run_whose_lost_tensor_may_not_be_made_twice_ends_by_its_name(scene: Scene) -> None:
    rig, runner = scene
    run, set_ready = runner.run(held(rig, many(idempotent=False)))
    scribble(rig)
    set_ready(True)
    result, _ = runner.run(rig.result(run))
    assert result.state is RunState.FAILED
    (error,) = {(e.kind, e.where[:4]) for e in result.errors.values() if e.kind == "device_lost"}
    assert error == ("device_lost", "make")
    assert any("may not run twice" in e.message for e in result.errors.values())


@pytest.mark.parametrize("seed", seeds(3, 200))
def test_a_disk_host_killed_while_pages_move_costs_no_answer(scene: Scene, seed: int) -> None:
    rig, runner = scene
    keeper = rig.daemon.brain.engines.keeper

    async def story() -> dict[str, Any]:
        run = await rig.submit(many())
        moves = 1 + seed * 7 % 40  # kill after so many pages have moved
        await rig.until(
            lambda: keeper.statistics().stored_pages + keeper.statistics().loaded_pages >= moves or run.ended_ns > 0
        )
        if any(link.device == "disk:0" for link in rig.links):
            os.kill(disk(rig).pid, signal.SIGKILL)
        result, found = await rig.result(run)
        assert result.state is RunState.SUCCEEDED, result.errors
        return found

    assert runner.run(story()) == EXPECTED
