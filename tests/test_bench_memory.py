"""`hexrt bench memory`, small: every row is there, says what it is held to, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexrt.cli import bench_ring
from hexrt.cli.bench import show
from hexrt.cli.bench_memory import guarded, ring_asked
from hexrt.errors import Unavailable

pytestmark = pytest.mark.timeout(120)

NAMES = (
    "host to device, one run", "device to host, one run", "host to NVMe", "NVMe to host", "fault alone, 1,000",
    "fault in 16s, 1,000", "fault in 16s, keeper, 1,000",
    "tables, a page of 1,000", "ring, 1 MiB in place", "ring, 1 MiB copied out", "ring, 64 B one way",
)  # fmt: skip


def test_each_row_has_its_value_its_limit_of_the_same_run_and_what_is_asked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hexrt.cli.main", "bench", "memory", "--json", "--path", str(tmp_path)]
    done = subprocess.run(
        [*command, "--size-mib", "8", "--most-pages", "1000"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    rows = {row["name"]: row for row in answer["rows"]}
    assert answer["bench"] == "memory" and set(NAMES) <= set(rows)
    for row in rows.values():
        assert row["value"] > 0, row
        assert (row["limit"] is None) == (row["ratio"] is None)
        assert (row["met"] is None) == (row["asked"] == "")
    assert rows["ring, 64 B one way"]["asked"] == "< 10"
    assert rows["host to NVMe"]["asked"] == ">= 90%"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_a_row_that_says_why() -> None:
    def act() -> list[dict[str, Any]]:
        raise Unavailable("no page file: name a folder that can be written")

    (row,) = guarded("host and NVMe", act, lambda row: row)
    assert (row["name"], row["value"], row["unit"], row["met"]) == ("host and NVMe", None, "absent", None)
    assert "name a folder" in row["note"]


def test_the_ring_s_measurement_leaves_neither_process_nor_descriptor_and_gives_its_cores_back() -> None:
    before = os.listdir("/proc/self/fd"), os.sched_getaffinity(0)
    rows = bench_ring.measure(tensors=4, messages=20, rounds=2)
    assert (os.listdir("/proc/self/fd"), os.sched_getaffinity(0)) == before
    assert [row["name"] for row in rows if ring_asked(row)["asked"]] == ["ring, 1 MiB in place", "ring, 64 B one way"]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_table_shows_what_is_asked_and_whether_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "ring", "value": 950.0, "unit": "MB/s", "limit": 1000.0, "ratio": 0.95, "asked": ">= 90%"}
    rows = [row | {"met": True, "note": "the same"}, row | {"name": "other", "met": False, "note": "the same"}]
    show("memory", {"cores": 2}, rows, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-3:] for line in lines if line.startswith((" ring", " other", "ring  ", "other  "))] == [
        [">=", "90%", "yes"],
        [">=", "90%", "no"],
    ]
    assert lines[-1] == "ring ... other: the same"
