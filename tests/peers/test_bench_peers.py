"""The floor and the peers that overhead is compared with: the same graphs for all, nothing left running, absence said with its reason."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from hexrt.cli import bench_peers
from hexrt.cli.bench_peers import layered_predecessors, measure_floor, measure_peer, measure_peers

MODULES = {"ray": "ray", "dask": "distributed"}
ABSENT = [peer for peer, module in MODULES.items() if importlib.util.find_spec(module) is None]


def test_the_layered_graph_is_the_same_for_the_same_seed() -> None:
    assert layered_predecessors(7) == layered_predecessors(7)
    assert layered_predecessors(7) != layered_predecessors(8)


def test_each_task_of_a_layer_waits_for_three_distinct_tasks_of_the_layer_before() -> None:
    graph = layered_predecessors(0)
    assert len(graph) == 100 * 100 and graph[:100] == [()] * 100
    for number, predecessors in enumerate(graph[100:], 100):
        assert len(set(predecessors)) == 3
        assert {predecessor // 100 for predecessor in predecessors} == {number // 100 - 1}


def test_the_floor_is_measured_and_leaves_no_process_and_no_file(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    floor = measure_floor(tasks=500, chain=50, round_trips=50)
    assert set(floor) == {"independent", "chain", "round trip"}
    assert all(0 < value < 1e6 for value in floor.values())
    assert psutil.Process().children() == []
    assert set(os.listdir("/proc/self/fd")) == before
    assert capfd.readouterr() == ("", "")


def noted(budget_s: float) -> tuple[list[bench_peers.Row], list[int]]:
    """The rows of a peer that does nothing, and how many tasks it was given at a time; each predecessor comes first."""
    sizes: list[int] = []

    def run(tasks: Sequence[tuple[int, ...]]) -> None:
        assert all(before < number for number, predecessors in enumerate(tasks) for before in predecessors)
        sizes.append(len(tasks))

    return bench_peers._measure("peer", run, 0, budget_s), sizes


def test_a_quick_peer_is_given_every_task() -> None:
    rows, sizes = noted(1e6)
    assert [row["name"] for row in rows] == ["peer independent", "peer chain", "peer layered", "peer round trip"]
    assert [row["unit"] for row in rows] == ["us/task", "us/task", "us/task", "us"]
    assert sizes == [200, 200, 10_000, 200, 2_000, 200, 10_000, *[1] * 200]
    assert not any("note" in row for row in rows)


def test_a_slow_peer_is_given_fewer_tasks_and_its_rows_say_so() -> None:
    rows, sizes = noted(1e-12)
    assert sizes[:7] == [200] * 7
    assert [row.get("note") for row in rows] == [
        "200 tasks, not 10000", "200 tasks, not 2000", "200 tasks, not 10000", None,
    ]  # fmt: skip


@pytest.mark.skipif(not ABSENT, reason="every peer is installed")
def test_a_peer_that_is_not_installed_is_reported_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in measure_peers(budget_s=0.1) if row["name"] in ABSENT]
    assert [(row["name"], row["value"], row["unit"]) for row in rows] == [(peer, None, "absent") for peer in ABSENT]
    assert all(f"No module named '{MODULES[row['name']]}'" in row["note"] for row in rows)
    assert capfd.readouterr() == ("", "")


def test_an_interpreter_that_is_not_there_is_reported(tmp_path: Path) -> None:
    (row,) = measure_peer("ray", str(tmp_path / "python"), 0, 1.0, 10.0)
    assert row["value"] is None and "No such file" in row["note"]


def test_a_peer_that_never_ends_is_ended_and_reported(tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text(f"#!{sys.executable}\nimport signal\nsignal.pause()\n")
    stuck.chmod(0o700)
    (row,) = measure_peer("dask", str(stuck), 0, 1.0, 0.2)
    assert row == {"name": "dask", "value": None, "unit": "absent", "note": "it took longer than 0.2 s"}
    assert psutil.Process().children() == []


@pytest.mark.parametrize("peer", MODULES)
def test_an_installed_peer_gives_its_four_rows(peer: str) -> None:
    if peer in ABSENT:
        pytest.skip(f"{MODULES[peer]} is not installed: pip install 'hexrt[peers]'")
    rows = measure_peer(peer, sys.executable, 0, 0.5, 100.0)
    assert [row["name"] for row in rows] == [
        f"{peer} {name}" for name in ("independent", "chain", "layered", "round trip")
    ]
    assert all(row["value"] > 0 for row in rows)
