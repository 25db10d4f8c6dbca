"""`hexrt memory` and what else an operator is shown of it: tables of eighty columns, JSON, words for every counter."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hexrt.cli.counters import ENDPOINT, ENGINE, MEMORY, meaning
from hexrt.cli.machine import about, facts_text
from hexrt.cli.memory import count, print_report, size
from hexrt.cli.output import plain
from hexrt.client import AsyncClient
from hexrt.core import Peer, RunState
from hexrt.llm.endpoint import EndpointStatistics
from hexrt.llm.outcome import EngineStatistics
from hexrt.memory.traffic import TrafficStatistics
from hexrt.protocol import messages as m
from tests.memory_backend import MemoryBackend
from tests.serving import connected, serving, step, workflow
from tests.test_cli import Cli, cli, written

__all__ = ["cli"]
MOST = 2**62


def large() -> m.MemoryReport:
    """With numbers and names as long as they get."""
    tiers = tuple(
        m.TierStatus(name, level, "degraded", "it hangs " * 40, MOST, 1023 << 20, 102_350 << 10, MOST, 1.0, *(99_999,) * 4, 0, 0, MOST, MOST, *(99_999,) * 3)
        for name, level in (("host", "host"), ("nvme", "nvme"), ("cuda:15", "device"))
    )  # fmt: skip
    links = (m.LinkStatus("cuda:15", "host", 1e15, 9_999_999_000.0, MOST),)
    holder = m.Holder(
        b"\xab" * 16, "a name that has no end\x1b", 2**32 - 2, RunState.SUCCEEDED, 99_999, 102_350 << 10, 99_999, MOST
    )
    moved = m.Moved(*(MOST,) * 10)
    return m.MemoryReport(0, tiers, links, moved, m.TensorTotals(*(MOST,) * 6), "transparent", "x " * 100, (holder,) * 20)  # fmt: skip


async def test_memory_shows_tiers_links_moves_tensors_and_holders(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step(), name="answer"))
        code, out, err = await cli("memory")
        assert (code, err) == (0, "")
        rows = [line.split() for line in out.splitlines()]
        assert "host host 1.0 GiB 512 MiB 512 MiB 100 40 3 ok".split() in rows
        assert "host 256 MiB 50% 1.0 GiB 2.0 GiB 8 7 2 0".split() in rows
        assert "host cpu:0 8.4 GiB/s 1.5 us 12".split() in rows
        assert "cpu:0 host 1.9 GiB/s 20.0 us none, a guess".split() in rows
        assert f"{run[:8]} answer succeeded".split() == rows[-1][:3]
        text = " ".join(out.split())
        for said in (
            "cpu:0 is degraded: 5 pages could not be moved",
            "nvme starts when it is needed",
            "host has plain pages (shmem_enabled is never)",
            "loaded 90 pages of 1.0 GiB; stored 40 pages of 512 MiB; moved together 0 pages; copied for a second writer 1 page of 4.0 KiB",
            "5 faults; 1 move under way",
            "tensors: 3 of 14.6 KiB: 1 of 4.9 KiB where they were put out, 2 of 9.8 KiB in host",
        ):  # fmt: skip
            assert said in text, said


async def test_memory_as_json_has_every_field_by_its_name(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        _, run, _ = await cli("submit", written(tmp_path, step()))
        found = json.loads((await cli("memory", "--json"))[1])
        assert found == json.loads(msgspec.json.encode(plain(here.backend.memory(Peer(0, 0)))))
        assert found["holders"][0]["run"] == run.strip() and found["tiers"][1]["state"] == "unstarted"


async def test_memory_comes_over_the_wire_and_through_both_clients(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(tmp_path / "s") as raw:
        answer = await raw.ask(m.Memory(7))
        assert isinstance(answer, m.MemoryReport) and answer.request == 7
        async with AsyncClient(tmp_path / "s") as client:
            report = await client.memory()
            await client.run(msgspec.convert(workflow(), m.Workflow))
        assert report.tiers == here.backend.memory(Peer(0, 0)).tiers


def test_a_report_of_the_longest_numbers_and_names_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(large())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out, out


def test_a_report_of_a_daemon_that_has_done_nothing_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    report = MemoryBackend().memory(Peer(0, 0))
    print_report(msgspec.structs.replace(report, links=(), tensors=m.TensorTotals(), holders=()))
    out = capsys.readouterr().out
    assert "tensors: none\n" in out and "bandwidth" not in out and "uid" not in out


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_348, "99.9 KiB"), (1 << 20, "1.0 MiB"), (1023 << 20, "1.0 GiB"),
        (1536 << 20, "1.5 GiB"), (1 << 62, "4096 PiB"),
    ],
)  # fmt: skip
def test_sizes_are_short(number: int, text: str) -> None:
    assert size(number) == text and len(text) <= 8


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (99_999, "99999"), (100_000, "100K"), (9_999_999, "9999K"), (10_000_000, "10M")])  # fmt: skip
def test_counts_are_short(number: int, text: str) -> None:
    assert count(number) == text


def test_a_device_whose_memory_is_in_trouble_says_so_first() -> None:
    facts = {"threads": 2, "links": {"copy_bytes_per_s": 1.0}}
    device = m.DeviceStatus("disk:0", "disk", "ready", facts=facts, memory="nvme degraded: it is full")
    assert about(device) == "memory: nvme degraded: it is full; threads 2"
    assert about(m.DeviceStatus("npu:0", "npu", "absent", why="none is here")) == "none is here"
    assert facts_text(facts) == "threads 2"


def test_every_counter_of_memory_and_engines_has_words() -> None:
    assert tuple(MEMORY) == TrafficStatistics.__struct_fields__
    assert tuple(ENGINE) == EngineStatistics.__struct_fields__
    assert tuple(ENDPOINT) == EndpointStatistics.__struct_fields__
    assert meaning("endpoint:far_answers") == "answers that the server gave (the server of far)"
    assert meaning("memory_loaded_pages") == MEMORY["loaded_pages"]
    assert meaning("cpu:0_smol_lm_frames_free") == "of those, the free ones, now (smol_lm on cpu:0)"
    assert meaning("done_pool:0") == "tasks that ended on pool:0"
    assert meaning("of another version") == meaning("memory_of_another") == ""


async def test_status_says_what_a_step_waits_for(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step(op="hold"), step("b")))
        _, out, _ = await cli("status", run.strip())
        assert out.splitlines()[2].endswith("waits for a release") and "waits" not in out.splitlines()[3]
        steps = json.loads((await cli("status", "--json", run.strip()))[1])["steps"]
        assert [s["waits"] for s in steps] == ["a release", ""]
