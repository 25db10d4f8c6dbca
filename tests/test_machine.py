"""What is told of the machine: devices and tiers in trouble, who holds pages and tensors, and what steps wait for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines
from hexrt.brain.models import ModelSource
from hexrt.brain.view import Device
from hexrt.cli.counters import meaning
from hexrt.cli.main import main
from hexrt.client import Client
from hexrt.core import DeviceKind, Peer
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Level
from hexrt.protocol.host import Copied, Copy, CopyFault, HostFinished, LoadModel
from hexrt.runtime.answers import status_of
from hexrt.runtime.entities import Run, Tensor
from hexrt.runtime.machine import MOST_HOLDERS, MOST_WHY, devices_of, memory_of
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import CostModel
from hexrt.workflow.build import WorkflowBuilder
from hexrt.workflow.model import Workflow
from tests.llm_desk import PAGE_BYTES, keeper_of
from tests.llm_support import model_config
from tests.notation import submit, table, workflow
from tests.running import Running
from tests.tensor_rig import ME, call, ref, rigged

MIB = 1 << 20
HOST, NVME, CPU = 0, 1, 2  # tiers
MODEL = msgspec.Raw(msgspec.msgpack.encode({"page_bytes": PAGE_BYTES, "context_tokens": 64}))


def brain(runs: RunTable, keeper: Keeper, disk: bool = False) -> Brain:
    made = Brain(runs, CostModel(), Engines({"m": ModelSource("m", "float32")}, keeper, 16, 1))
    made.add_device(Device("pool:0", DeviceKind.POOL, 64, "pool", ready=True))
    made.add_device(Device("cpu:0", DeviceKind.CPU, 64, "cpu:0", ready=True))
    if disk:
        made.add_device(Device("disk:0", DeviceKind.DISK, 64, "disk:0", ready=True))
    return made


def states(made: Brain) -> dict[str, tuple[str, str]]:
    return {tier.name: (tier.state, tier.why) for tier in memory_of(made, (), {}, None).tiers}


def tensors(run: Run, *given: Tensor) -> None:
    run.tensors = {tensor.handle: tensor for tensor in given}


# --- tiers and devices ------------------------------------------------------------------------------------------------


def test_a_tier_is_told_by_its_host_and_by_what_went_wrong_with_it() -> None:
    keeper = keeper_of(host=16, nvme=16)
    made = brain(table(), keeper)
    assert states(made) == {"host": ("ok", ""), "nvme": ("unstarted", ""), "cpu:0": ("ok", "")}
    keeper.wants_disk = True
    made.devices["cpu:0"].ready = False
    assert states(made) == {"host": ("ok", ""), "nvme": ("starting", ""), "cpu:0": ("starting", "")}
    made.add_device(Device("disk:0", DeviceKind.DISK, 64, "disk:0", ready=True))
    keeper.pool.tiers[NVME].degraded = "a page could not be read"
    made.devices["cpu:0"].lost = "it died thrice"
    assert states(made) == {"host": ("ok", ""), "nvme": ("degraded", "a page could not be read"), "cpu:0": ("lost", "it died thrice")}  # fmt: skip
    keeper.pool.tiers[NVME].closed = True
    assert states(made)["nvme"] == ("closed", "a page could not be read")


def test_devices_tell_of_the_tiers_that_they_move_pages_between() -> None:
    keeper = keeper_of(host=16, nvme=16)
    made = brain(table(), keeper, disk=True)
    told = {device.name: device.memory for device in devices_of(made).devices}
    assert told == {"pool:0": "", "cpu:0": "", "disk:0": ""}
    keeper.pool.tiers[NVME].degraded, keeper.pool.tiers[NVME].closed = "it is full", True
    keeper.pool.tiers[CPU].degraded = "x" * 10_000
    told = {device.name: device.memory for device in devices_of(made).devices}
    assert told == {"pool:0": "", "cpu:0": f"cpu:0 degraded: {'x' * MOST_WHY}", "disk:0": "nvme closed: it is full"}


def test_a_device_that_uses_pages_in_place_tells_of_the_hosts_memory() -> None:
    keeper = Keeper(keeper_of().pool, keeper_of().links)
    keeper.add_host(MIB)
    keeper.add_device("npu:0", 0)
    assert [tier.name for tier in keeper.carried_by("npu:0")] == ["host"]
    assert keeper.carried_by("pool:0") == ()


def test_copies_show_in_tiers_links_and_totals() -> None:
    keeper = keeper_of(host=16, nvme=16)
    made = brain(table(), keeper, disk=True)
    cls = keeper.tensor_class()
    pages = keeper.pool.create(cls, 3)
    keeper.pool.unpin(pages)
    keeper._try_background(pages, HOST, NVME, urgent=True)
    sent: dict[str, list[Any]] = {}
    keeper.decide(0, made.devices, sent)
    (copy,) = sent["disk:0"]
    assert isinstance(copy, Copy) and memory_of(made, (), {}, None).tiers[NVME].moving_pages == 3
    fault = CopyFault(1, "io", "EIO")
    keeper.copied("disk:0", Copied(copy.command, 0, 6000, 2 * 4096, (1, 2, 3), (fault,)))
    report = memory_of(made, (), {"pages": "plain", "why": "of a test"}, None)
    nvme = report.tiers[NVME]
    assert (nvme.pages, nvme.copies_in, nvme.bytes_in, nvme.faults, nvme.used_bytes) == (2, 2, 8192, 1, 8192)
    assert (nvme.state, nvme.why) == ("degraded", "1 pages could not be moved; the last could not be written: io: EIO")
    assert report.tiers[HOST].dirty_pages == 1 and report.tiers[HOST].copies_out == 2
    assert (report.moved.stored_pages, report.moved.stored_bytes, report.moved.faults) == (2, 8192, 1)
    assert [(link.source, link.target, link.copies) for link in report.links] == [("host", "nvme", 1)]
    assert (report.host_pages, report.host_pages_why) == ("plain", "of a test")


# --- who holds what ---------------------------------------------------------------------------------------------------


def test_tensors_are_counted_where_they_lie_and_named_to_their_owner_alone() -> None:
    runs, keeper = table(), keeper_of(host=16, nvme=16)
    made = brain(runs, keeper)
    high, low = keeper.pool.create(keeper.tensor_class(), 2)
    keeper.pool.unpin((low,))
    move = keeper.pool.begin([low], Level.NVME)
    keeper.pool.commit(move)
    keeper.pool.drop(low, Level.HOST)
    mine, other = submit(runs, workflow("a")), submit(runs, workflow("a"))
    other.uid = 1001
    tensors(mine, Tensor(1, 16, 0, 5000), Tensor(2, 1, 0, 7000, page=high))
    tensors(other, Tensor(1, 1, 0, 90_000, page=low))
    report = memory_of(made, runs.runs.values(), {}, None)
    found = report.tensors
    assert (found.segment_tensors, found.segment_bytes, found.host_tensors, found.host_bytes) == (1, 5000, 1, 7000)
    assert (found.nvme_tensors, found.nvme_bytes) == (1, 90_000)
    assert [(h.run, h.uid, h.tensors, h.tensor_bytes) for h in report.holders] == [(other.id, 1001, 1, 90_000), (mine.id, 1000, 2, 12_000)]  # fmt: skip
    own = memory_of(made, runs.runs.values(), {}, 1000)
    assert [h.run for h in own.holders] == [mine.id] and own.tensors == found and own.tiers == report.tiers


def test_the_largest_holders_are_named_and_no_more_than_so_many() -> None:
    runs = table()
    for i in range(MOST_HOLDERS + 5):
        tensors(submit(runs, workflow("a")), Tensor(1, 16, 0, 5000 + i))
    found = [h.tensor_bytes for h in memory_of(brain(runs, keeper_of()), runs.runs.values(), {}, None).holders]
    assert found == [5000 + i for i in reversed(range(5, MOST_HOLDERS + 5))]


def decode(tokens: int) -> Workflow:
    prefix = {"ids": list(range(20)), "prompt_tokens": 20}
    params = {"max_tokens": tokens}
    return workflow("a", a={"op": "llm.decode", "inputs": {"prefix": prefix}, "params": params})


def test_a_step_waits_for_its_model_and_then_for_pages_that_another_run_holds() -> None:
    runs, keeper = table(), keeper_of(frames=4)
    made = brain(runs, keeper)
    first, second = submit(runs, decode(40)), submit(runs, decode(20))  # 60 and 40 tokens: 4 and 3 pages

    def waits(run: Run) -> str:
        return status_of(run, 9, made.engines.waits_for).steps[0].waits

    commands = made.decide(1)
    for event in commands.events:
        runs.apply(event)
    (load,) = [message for message in commands.send["cpu:0"] if isinstance(message, LoadModel)]
    assert waits(first) == waits(second) == "the model 'm' to be loaded"
    made.engines.finished(made.devices["cpu:0"], HostFinished(load.command, 0, 2, 3, MODEL))
    made.decide(4)
    assert waits(first) == ""
    assert waits(second) == f"3 pages of 4 on cpu:0; held by run {first.id.hex()} step a: 4"
    report = memory_of(made, runs.runs.values(), {}, None)
    assert [(h.run, h.pages, h.page_bytes) for h in report.holders] == [(first.id, 4, 4 * PAGE_BYTES)]
    assert report.tiers[0].pinned_pages == 4 and report.tiers[0].free_bytes == 0


# --- a daemon ---------------------------------------------------------------------------------------------------------


def test_a_daemon_tells_an_admin_of_every_run_and_others_of_their_own(tmp_path: Path) -> None:
    with rigged(tmp_path) as (rig, runner):
        steps = (call("a", "make", 50_000), call("b", "twice", ref("a")))
        runner.run(rig.run(Workflow(steps, outputs={"b": ref("b"), "a": ref("a")})))
        report = rig.service.memory(ME)
        assert report.tensors.segment_tensors == rig.tensors.statistics()["tensors"] == 2
        assert [(h.tensors, h.tensor_bytes) for h in report.holders] == [(2, 400_000)]
        others = rig.service.memory(Peer(54321, 54321))
        assert others.holders == () and others.tensors == report.tensors
        assert report.host_pages in ("reserved", "transparent", "plain")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("transformers")
    with Running(tmp_path_factory.mktemp("m"), model_config()) as running:
        yield running


@pytest.mark.timeout(200)  # the first step waits for torch and the model
def test_a_real_daemon_has_words_for_every_counter_and_keeps_its_links_over_a_restart(
    daemon: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    w = WorkflowBuilder()
    w.step("llm.generate", id="a", inputs={"prompt": "Say yes."}, params={"max_tokens": 4})
    with daemon.client() as client:
        client.run(w.build()).check()
        assert not [name for name in client.statistics() if not meaning(name)]
        links = {(link.source, link.target): link for link in client.memory().links}
        assert links["host", "cpu:0"].copies > 0
    assert main(["--socket", str(daemon.socket), "memory"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "nvme starts when it is needed" in " ".join(out.split())
    assert daemon.stop() == 0
    daemon.start()  # its host, which measures, takes seconds to come up
    with Client(daemon.socket) as client:
        before = {device.name: device.state for device in client.devices()}["cpu:0"]
        again = {(link.source, link.target): link for link in client.memory().links}
    assert before == "starting" and again.keys() == links.keys()
    assert again["cpu:0", "host"].bytes_per_s == pytest.approx(links["cpu:0", "host"].bytes_per_s)
    assert main(["--socket", str(daemon.socket), "devices", "--json"]) == 0
    assert all("memory" in device for device in json.loads(capsys.readouterr().out))
