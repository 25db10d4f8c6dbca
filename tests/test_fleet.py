"""The fleet: what the death of a host, and a stop at the wrong moment, mean for each task that was with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines, Entry
from hexrt.brain.view import Device
from hexrt.clock import SystemClock
from hexrt.config import Memory
from hexrt.core import DeviceKind
from hexrt.devices.link import HostLink
from hexrt.events import Failed
from hexrt.protocol.host import Ping
from hexrt.runtime.arenas import Arenas
from hexrt.runtime.entities import Task
from hexrt.runtime.fleet import Fleet, Member
from hexrt.runtime.state import RunTable
from hexrt.runtime.tensors import Tensors
from hexrt.scheduling.cost import CostModel
from tests.llm_desk import keeper_of
from tests.notation import place, submit, table, workflow

SECOND = 1_000_000_000


class DeadLink(HostLink):
    """What is left of a host: what its cell said, what it was sent, and whether it was killed."""

    def __init__(self, last_command: int, last_begun: int) -> None:
        self.device = "pool:0"
        self._last_command, self._last_begun = last_command, last_begun
        self.sent: list[Any] = []
        self.killed = False

    @property
    def running_command(self) -> int:
        return self._last_command

    def kill(self) -> None:
        self.killed = True

    def send(self, messages: list[Any]) -> None:
        self.sent += messages

    def close(self) -> None:
        self.sent.clear()


@dataclass(eq=False)
class Scene:
    fleet: Fleet
    runs: RunTable
    device: Device
    link: DeadLink
    engines: Engines
    events: list[Any]

    def placed(self, names: str, idempotent: bool = False) -> list[Task]:
        """Steps of one run that are with the device as commands 1, 2, ..."""
        run = submit(
            self.runs,
            workflow(names, **{n: {"idempotent": idempotent, "timeout_s": 3600.0} for n in names.split(", ")}),
        )
        tasks = [place(self.runs, run, name) for name in names.split(", ")]
        for command, task in enumerate(tasks, 1):
            task.command = command
            self.device.window[command] = task
        return tasks

    def die(self) -> dict[str, str]:
        """The host dies: the kind of each task's failure."""
        self.fleet._on_death(self.link, "SIGKILL")
        failed = [event for event in self.events if isinstance(event, Failed)]
        for event in failed:
            self.runs.apply(event)
        run = next(iter(self.runs.runs.values()))
        return {run.steps[event.step].node.id: event.error.kind for event in failed}


def no_more_hosts(device: str, epoch: int) -> Any:
    raise AssertionError("the fleet is closed before it gets to that")


async def scene(last_command: int = 0, last_begun: int = 0, kind: DeviceKind = DeviceKind.POOL) -> Scene:
    runs, events = table(), []  # type: ignore[var-annotated]
    engines = Engines({}, keeper_of(), 16, 1)
    brain = Brain(runs, CostModel(), engines)
    arenas = Arenas(Memory(host_mib=1), engines.keeper, no_more_hosts)
    fleet = Fleet(
        asyncio.get_running_loop(), brain, engines, SystemClock(), events.append, lambda: None, lambda: None,
        no_more_hosts, 1, {}, Tensors(runs.holding, 1 << 20, brain.staging, arenas), arenas,
    )  # fmt: skip
    device = Device("pool:0", kind, 64, "pool", ready=True)
    link = DeadLink(last_command, last_begun)
    brain.add_device(device)
    fleet._members["pool:0"] = Member(device, "pool", link)
    return Scene(fleet, runs, device, link, engines, events)


@pytest.mark.parametrize(
    ("last_command", "last_begun", "kinds", "states"),
    [
        (2, 2, "device_lost worker_died dropped", "unknown unknown ready"),  # a ended, its report was lost; b ran
        (0, 2, "device_lost worker_died dropped", "unknown unknown ready"),  # b had just ended
        (1, 1, "worker_died dropped dropped", "unknown ready ready"),
        (0, 0, "not_begun not_begun not_begun", "ready ready ready"),  # it read nothing of what it was sent
    ],
)
async def test_only_what_a_dead_worker_had_not_begun_is_begun_again(
    last_command: int, last_begun: int, kinds: str, states: str
) -> None:
    here = await scene(last_command, last_begun)
    tasks = here.placed("a, b, c")
    assert here.die() == dict(zip("abc", kinds.split(), strict=True))
    assert [task.state.name.lower() for task in tasks] == states.split()
    await here.fleet.close()


async def test_what_kills_every_worker_before_it_begins_is_not_sent_for_ever() -> None:
    here = await scene()
    (task,) = here.placed("a")
    for _ in range(10):
        here.device.ready, here.device.window = True, {1: task}
        here.die()
        here.events.clear()
        if task.state.name != "READY":
            break
        here.runs.place(task, "pool:0", 1, 1, 1)
    assert task.state.name == "FAILED" and task.attempt == 3
    await here.fleet.close()


async def test_hosts_may_die_again_and_again() -> None:
    here = await scene()
    for _ in range(5):
        here.device.ready = True
        here.fleet._on_death(here.link, "SIGKILL")
    await here.fleet.close()


async def test_a_launch_that_was_stopped_while_its_record_was_on_the_way_to_disk_never_begins() -> None:
    here = await scene()
    stopped, other = here.placed("a, b")
    here.fleet.stop(stopped)
    here.link.sent.clear()
    here.fleet.begin("pool:0", "launch of a", stopped)
    here.fleet.begin("pool:0", "launch of b", other)
    assert here.link.sent == ["launch of b"] and list(here.device.window.values()) == [other]
    (event,) = here.events
    assert event.error.kind == "cancelled" and event.attempt == stopped.attempt
    await here.fleet.close()


def watch(here: Scene, from_s: int, to_s: int, answers: bool = False) -> None:
    """The fleet looks after its hosts once a second; a host that `answers` does so at once."""
    for second in range(from_s, to_s + 1):
        here.fleet.check_timeouts(second * SECOND)
        if answers and Ping() in here.link.sent:
            here.link.sent.clear()
            here.device.last_report_ns = second * SECOND


@pytest.mark.parametrize(
    ("kind", "running", "answers", "killed"),
    [
        (DeviceKind.POOL, 0, False, True),  # it holds work and runs none of it
        (DeviceKind.POOL, 0, True, False),
        (DeviceKind.POOL, 1, False, False),  # a body runs on its loop: the step's timeout ends that
        (DeviceKind.CPU, 1, False, True),  # its loop is free whatever it computes
        (DeviceKind.CPU, 1, True, False),
        (DeviceKind.NPU, 1, False, True),
    ],
)
async def test_a_host_that_gives_no_sign_of_life_when_asked_is_replaced(
    kind: DeviceKind, running: int, answers: bool, killed: bool
) -> None:
    here = await scene(running, kind=kind)
    here.placed("a")
    watch(here, 1, 29, answers)
    assert not here.link.killed
    watch(here, 30, 100, answers)
    assert here.link.killed is killed
    await here.fleet.close()


async def test_a_host_is_not_blamed_for_the_time_in_which_the_daemon_itself_did_not_run() -> None:
    here = await scene(kind=DeviceKind.CPU)
    here.placed("a")
    watch(here, 1, 29)
    watch(here, 200, 210)
    assert not here.link.killed
    watch(here, 211, 240)
    assert here.link.killed
    await here.fleet.close()


@pytest.mark.parametrize(("slowest_s", "limit_s"), [(0.0, 600), (0.01, 30), (1.0, 200)])
async def test_a_host_whose_chunk_does_not_end_is_replaced_and_its_steps_are_run_again(
    slowest_s: float, limit_s: int
) -> None:
    here = await scene(7, kind=DeviceKind.CPU)
    task = here.placed("a", idempotent=True)[0]
    here.engines._entries["pool:0"] = {"m": Entry("m", chunks={7: 10}, slowest_ns=slowest_s * SECOND)}
    watch(here, 1, limit_s, answers=True)
    assert not here.link.killed
    watch(here, limit_s + 1, limit_s + 2, answers=True)
    assert here.link.killed and here.die() == {"a": "device_lost"}
    (lost,) = [event for event in here.events if isinstance(event, Failed)]
    assert f"after {limit_s} s" in lost.error.message and task.state.name == "READY"
    await here.fleet.close()


async def test_a_host_that_does_not_get_ready_is_replaced() -> None:
    here = await scene()
    here.device.ready = False
    watch(here, 1, 120)
    assert not here.link.killed
    watch(here, 121, 121)
    assert here.link.killed
    await here.fleet.close()
