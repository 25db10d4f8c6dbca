"""One tensor through hosts of every program, spoken to as the fleet does; and through a daemon that is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.brain.staging import Staging
from hexrt.config import Memory
from hexrt.devices.link import HostLink
from hexrt.protocol.host import VERSION, Binding, FromHost, Hello, HostFailed, HostFinished, Located, Ready
from hexrt.runtime.arenas import Arenas
from hexrt.runtime.entities import Run
from hexrt.runtime.fleet import host_environ
from hexrt.runtime.holding import tensors_of
from hexrt.runtime.tensors import Tensors
from hexrt.workflow.model import StepSpec, Workflow
from tests.bodies import MODELS
from tests.bodies import launch as launch_of
from tests.llm_desk import keeper_of
from tests.notation import submit, table, workflow
from tests.running import CONFIG, Running
from tests.tensor_bodies import make
from tests.tensor_rig import Rig, call, ref

MIB = 1 << 20
PROGRAMS = {"pool": "pool:0", "npu": "npu:0", "cpu": "cpu:0"}


def no_disk(device: object) -> None:
    raise AssertionError("nothing is to be moved")


class Hosts:
    """A host of each program with its ring; what goes over their sockets is counted."""

    def __init__(self, directory: Path, programs: Sequence[str]) -> None:
        self.runs = table()
        self.run: Run = submit(self.runs, workflow("a"))
        keeper = keeper_of()
        self.tensors = Tensors(
            self.runs.holding, 4 * MIB, Staging(keeper, self.runs.holding), Arenas(Memory(host_mib=1), keeper, no_disk)
        )
        self.links: dict[str, HostLink] = {}
        self.reports: dict[str, asyncio.Queue[FromHost]] = {p: asyncio.Queue() for p in programs}
        self.deaths: asyncio.Queue[str] = asyncio.Queue()
        self.sent_bytes = self.received_bytes = 0
        settings = {
            "max_output_bytes": 32 * MIB,
            "ops": {"map.python": {"modules": ["tests.tensor_bodies"]}},
            "npu": {"provider": "CPUExecutionProvider"},
        }
        for epoch, program in enumerate(programs, 1):
            link = HostLink(
                asyncio.get_running_loop(), program, Hello(VERSION, epoch, PROGRAMS[program], str(directory), str(MODELS), settings),
                self._on_reports, lambda link, reason: self.deaths.put_nowait(reason), host_environ(os.environ, directory),
            )  # fmt: skip
            self.links[program] = link
            self.tensors.host_started(link)

    def _on_reports(self, link: HostLink, reports: list[FromHost]) -> None:
        program = link.device.partition(":")[0]
        for report in reports:
            if isinstance(report, HostFinished | HostFailed | Ready):
                self.reports[program].put_nowait(report)

    async def ready(self) -> None:
        for reports in self.reports.values():
            assert isinstance(await reports.get(), Ready)

    async def call(self, program: str, function: str, value: msgspec.Raw, command: int) -> msgspec.Raw:
        """The output of a function on a value that an earlier call gave."""
        link, read = self.links[program], tensors_of(self.run, value)
        self.tensors.map(link, {tensor.place for tensor in read})
        launch = msgspec.structs.replace(
            launch_of("map.python", {"function": f"tests.tensor_bodies:{function}"}, command=command),
            bindings=(Binding(("value",), (), value),),
            tensors=tuple(Located(t.handle, t.place, t.offset, t.bytes) for t in read),
        )
        self.sent_bytes += len(msgspec.msgpack.encode(launch))
        link.send([launch])
        report = await self.reports[program].get()
        assert isinstance(report, HostFinished), report
        self.received_bytes += len(msgspec.msgpack.encode(report))
        self.tensors.accept(link, self.run, 0, report.output, report.tensors)
        return report.output.copy()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
            self.tensors.host_gone(link)
        self.tensors.close()


@pytest.mark.timeout(120)
async def test_a_mebibyte_goes_through_pool_npu_and_cpu_and_no_byte_of_it_through_a_socket(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hosts = Hosts(tmp_path, list(PROGRAMS))
    try:
        await hosts.ready()
        value = await hosts.call("pool", "make", msgspec.Raw(values.encode(MIB // 4)), 1)
        for command, program in enumerate(("npu", "cpu", "pool", "cpu", "npu"), 2):
            value = await hosts.call(program, "add", value, command)
        whole = values.decode(hosts.tensors.inline(hosts.run, value))
        np.testing.assert_array_equal(whole, make(MIB // 4) + np.float32(1) + 1 + 1 + 1 + 1)
        assert len(hosts.run.tensors or ()) == 6
        assert hosts.sent_bytes + hosts.received_bytes < 3000
        hosts.tensors.settle()  # the reports are over, and nothing holds their outputs
        assert hosts.run.tensors == {} and hosts.tensors.statistics()["tensor_bytes"] == 0
        hosts.tensors.check_integrity([hosts.run], idle=True)
    finally:
        hosts.close()


async def test_the_ring_of_a_dead_host_lives_until_its_last_tensor_is_gone(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, ["pool"])
    try:
        await hosts.ready()
        value = await hosts.call("pool", "make", msgspec.Raw(values.encode(5000)), 1)
        link = hosts.links.pop("pool")
        link.close()
        hosts.tensors.host_gone(link)
        np.testing.assert_array_equal(values.decode(hosts.tensors.inline(hosts.run, value)), make(5000))
        assert hosts.tensors.statistics()["segments"] == 1
        hosts.tensors.settle()
        assert hosts.tensors.statistics()["segments"] == 0
    finally:
        hosts.close()


async def test_a_report_that_nobody_waits_for_gives_its_slots_back(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, ["pool"])
    try:
        await hosts.ready()
        launch = launch_of("map.python", {"function": "tests.tensor_bodies:make"}, {"value": 5000})
        hosts.links["pool"].send([launch])
        report = await hosts.reports["pool"].get()
        assert isinstance(report, HostFinished) and len(report.tensors) == 1
        with pytest.raises(AssertionError, match="slots"):
            hosts.tensors.check_integrity([hosts.run], idle=True)
        hosts.tensors.refuse(hosts.links["pool"], report.tensors)
        hosts.tensors.check_integrity([hosts.run], idle=True)
    finally:
        hosts.close()


@pytest.mark.parametrize("by", ["ctypes", "torch"])
@pytest.mark.timeout(60)
async def test_a_body_that_writes_to_its_input_dies_and_the_output_of_its_own_worker_stays(tmp_path: Path, by: str) -> None:  # fmt: skip
    if by == "torch":
        pytest.importorskip("torch")
    rig = Rig(tmp_path, pool={"workers": 1})
    try:
        steps = (
            call("a", "make", 5000),
            call("b", "scribble", ref("a"), by == "ctypes", by=by),
            call("c", "same", ref("a")),
        )
        for _ in range(1 if by == "torch" else 2):
            result, found = await rig.result(await rig.submit(Workflow(steps, outputs={"a": ref("a"), "c": ref("c")})))
            (error,) = result.errors.values()
            assert error.kind == "worker_died" and "SIGSEGV; it may have written to an input" in error.message
            assert found
            for output in found.values():
                np.testing.assert_array_equal(output, make(5000))
            rig.forget_ended()
    finally:
        await rig.close()


@pytest.mark.timeout(60)
async def test_a_body_that_writes_to_what_it_takes_from_its_own_worker_dies_and_the_output_stays(tmp_path: Path) -> None:  # fmt: skip
    hosts = Hosts(tmp_path, ["pool"])
    try:
        await hosts.ready()
        first = launch_of("map.python", {"function": "tests.tensor_bodies:make"}, {"value": 5000})
        then = launch_of(
            "map.python", {"function": "tests.tensor_bodies:scribble"}, {"arguments": {"by": "ctypes"}}, command=2
        )
        hosts.links["pool"].send(
            [
                first,
                msgspec.structs.replace(then, bindings=(Binding(("value",), (), values.NIL, 1),), report_start=True),
            ]
        )
        report = await hosts.reports["pool"].get()
        assert isinstance(report, HostFinished) and report.command == 1, report
        assert await hosts.deaths.get() == "SIGSEGV"
        hosts.tensors.accept(hosts.links["pool"], hosts.run, 0, report.output, report.tensors)
        np.testing.assert_array_equal(values.decode(hosts.tensors.inline(hosts.run, report.output)), make(5000))
    finally:
        hosts.close()


def test_a_recorded_run_with_tensors_goes_on_after_the_daemon_was_killed(tmp_path: Path) -> None:
    mark = tmp_path / "marks"
    a = make(200_000, 9)
    config = CONFIG.replace('"tests.hostile"', '"tests.hostile", "tests.tensor_bodies"')
    steps = (
        StepSpec("a", "map.python", {"function": "tests.tensor_bodies:add"}, {"value": a}),  # once, never again
        call("b", "both", ref("a")),
        StepSpec("wait", "map.python", {"function": "tests.hostile:mark"}, {"value": "x", "arguments": {"path": str(mark), "wait_s": 600}}, after=("b",), idempotent=True),
        call("c", "total", ref("b.part")),
    )  # fmt: skip
    daemon = Running(tmp_path, config).start()
    with daemon.client() as client:
        run = client.submit(Workflow(steps, outputs={"b": ref("b"), "c": ref("c")}))
        for update in client.watch(run):
            if getattr(update, "event", "") == "started" and getattr(update, "step", "") == "wait":
                break
    daemon.kill()
    with Running(tmp_path, config) as daemon, daemon.client() as client:
        client.cancel(run)
        outcome = client.result(run)
        np.testing.assert_array_equal(outcome.outputs["b"]["whole"], a + np.float32(1))
        np.testing.assert_array_equal(outcome.outputs["b"]["part"], (a + np.float32(1))[::2])
        assert client.run(Workflow((call("t", "total", a),))).outputs["t"] == pytest.approx(
            float(a.sum(dtype=np.float64))
        )


def test_no_part_of_shared_memory_is_left_in_the_file_system(tmp_path: Path) -> None:
    before: Any = set(os.listdir("/dev/shm"))
    config = CONFIG.replace('"tests.hostile"', '"tests.tensor_bodies"')
    daemon = Running(tmp_path, config).start()
    with daemon.client() as client:
        assert len(client.run(Workflow((call("a", "make", 100_000),))).outputs["a"]) == 100_000
    daemon.kill()
    assert set(os.listdir("/dev/shm")) <= before
