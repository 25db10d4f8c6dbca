"""The trace as the real trace processor reads it, and the layout it is written from."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hexrt.core import RunState
from hexrt.errors import BadRequest
from hexrt.protocol.messages import AttemptRecord, RunTimeline
from hexrt.tracing.layout import Slice, lanes, lay_out
from tests.trace_reader import ERRORS, Query, opened

MS = 1_000_000
BASE = 5_000_000_000
WALL = 1_700_000_000_000_000_000


@pytest.fixture
def open_trace() -> Iterator[Callable[[Path], Query]]:
    """Opens traces that are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda path: stack.enter_context(opened(path))


def attempt(step: int, part: int = 0, **fields: Any) -> AttemptRecord:
    times = {name: BASE + fields.pop(name) * MS for name in ("ready", "placed", "start", "end") if name in fields}
    defaults: dict[str, Any] = {"part_name": "run", "attempt": 1, "device": "pool:0", "stream": 0, "state": "done"}
    ns = {f"{name}_ns": times.get(name, 0) for name in ("ready", "placed", "start", "end")}
    return AttemptRecord(step=step, part=part, **(defaults | ns | fields))


def timeline(
    steps: list[tuple[str, str]], edges: list[tuple[int, int]], attempts: list[AttemptRecord], **fields: Any
) -> RunTimeline:
    defaults: dict[str, Any] = {
        "name": "answer",
        "run": bytes(range(16)),
        "state": RunState.SUCCEEDED,
        "ended_ns": BASE + 99 * MS,
    }
    return RunTimeline(
        request=0, submitted_ns=BASE, submitted_wall_ns=WALL, steps=tuple(steps), edges=tuple(edges),
        attempts=tuple(attempts), **(defaults | fields),
    )  # fmt: skip


def agent() -> RunTimeline:
    """embed -> hits -> gen (prefill, decode), and code, which fails once and runs beside gen."""
    return timeline(
        [("embed", "embed.text"), ("hits", "search.vector"), ("gen", "llm.generate"), ("code", "code.python")],
        [(0, 1), (1, 2), (0, 3)],
        [
            attempt(0, ready=0, placed=1, start=2, end=5, device="npu:0", predicted_ns=4 * MS),
            attempt(1, ready=5, placed=5, start=6, end=8),
            attempt(2, 0, part_name="prefill", device="cpu:0", ready=8, placed=9, start=10, end=20),
            attempt(2, 1, part_name="decode", device="cpu:0", ready=20, placed=20, start=20, end=60, tokens=32),
            attempt(3, ready=5, placed=5, start=7, end=30, state="failed"),
            attempt(3, ready=30, placed=31, start=33, end=50, attempt=2),
        ],
    )


def written(timelines: Any, path: Path) -> Any:
    from hexrt.tracing.perfetto import write_trace

    return write_trace(timelines, path)


def test_durations_nesting_and_args_come_back_as_the_timeline_has_them(open_trace: Any, tmp_path: Path) -> None:
    summary = written(agent(), tmp_path / "agent.pftrace")
    query = open_trace(summary.path)
    assert query(ERRORS) == []
    ran = query(
        "select s.name, s.ts, s.dur, t.name as thread, p.name as process, extract_arg(s.arg_set_id, 'debug.attempt') as attempt,"
        " extract_arg(s.arg_set_id, 'debug.state') as state, extract_arg(s.arg_set_id, 'debug.op') as op,"
        " extract_arg(s.arg_set_id, 'debug.tokens') as tokens, extract_arg(s.arg_set_id, 'debug.predicted_ns') as predicted,"
        " extract_arg(s.arg_set_id, 'debug.measured_ns') as measured"
        " from slice s join thread_track tt on s.track_id = tt.id join thread t using (utid) join process p using (upid)"
        " where s.category = 'running' order by s.ts"
    )
    assert [(r["name"], r["process"], r["ts"] - BASE, r["dur"], r["attempt"], r["state"]) for r in ran] == [
        ("embed", "npu:0", 2 * MS, 3 * MS, 1, "done"),
        ("hits", "pool:0", 6 * MS, 2 * MS, 1, "done"),
        ("code", "pool:0", 7 * MS, 23 * MS, 1, "failed"),
        ("gen.prefill", "cpu:0", 10 * MS, 10 * MS, 1, "done"),
        ("gen.decode", "cpu:0", 20 * MS, 40 * MS, 1, "done"),
        ("code", "pool:0", 33 * MS, 17 * MS, 2, "done"),
    ]
    assert (ran[0]["op"], ran[0]["predicted"], ran[0]["measured"]) == ("embed.text", 4 * MS, 3 * MS)
    assert [r["tokens"] for r in ran] == [None, None, None, None, 32, None]
    assert {r["thread"] for r in ran if r["name"] in ("hits", "code")} == {"stream 0", "stream 0, lane 2"}
    waits = query(
        "select c.category, c.ts, c.dur from slice c join slice p on c.parent_id = p.id"
        " where p.name = 'gen.prefill' and p.category = 'waiting' order by c.ts"
    )
    assert [(w["category"], w["ts"] - BASE, w["dur"]) for w in waits] == [
        ("queued", 8 * MS, MS),
        ("staged", 9 * MS, MS),
    ]


def test_pages_brought_up_for_a_task_are_told_of_that_task_alone(open_trace: Any, tmp_path: Path) -> None:
    steps = [("gen", "llm.generate"), ("then", "llm.generate")]
    attempts = [
        attempt(0, part_name="prefill", device="cpu:0", ready=0, start=1, end=5),
        attempt(1, part_name="prefill", device="cpu:0", ready=5, start=7, end=9, pages_migrated=3, migration_bytes=3 << 20),
    ]  # fmt: skip
    query = open_trace(written(timeline(steps, [(0, 1)], attempts), tmp_path / "moved.pftrace").path)
    assert query(ERRORS) == []
    rows = query(
        "select s.name, extract_arg(s.arg_set_id, 'debug.pages_migrated') as pages,"
        " extract_arg(s.arg_set_id, 'debug.migration_bytes') as bytes from slice s where s.category = 'running' order by s.ts"
    )
    assert [(r["name"], r["pages"], r["bytes"]) for r in rows] == [("gen", None, None), ("then", 3, 3 << 20)]


def test_flows_follow_the_edges_of_the_graph(open_trace: Any, tmp_path: Path) -> None:
    summary = written(agent(), tmp_path / "agent.pftrace")
    query = open_trace(summary.path)
    flows = query(
        "select o.name as producer, i.name as consumer, o.category as category from flow f"
        " join slice o on f.slice_out = o.id join slice i on f.slice_in = i.id order by o.ts, i.ts"
    )
    assert [(f["producer"], f["consumer"]) for f in flows] == [
        ("embed", "hits"), ("embed", "code"), ("hits", "gen.prefill"), ("gen.prefill", "gen.decode"),
    ]  # fmt: skip
    assert {f["category"] for f in flows} == {"running"}
    assert summary.flows == 4


def test_the_run_and_its_steps_have_tracks_of_their_own_and_the_wall_clock_is_known(
    open_trace: Any, tmp_path: Path
) -> None:
    query = open_trace(written(agent(), tmp_path / "agent.pftrace").path)
    rows = query(
        "select s.name, s.ts, s.dur, s.category, p.name as process from slice s join process_track t on s.track_id = t.id"
        " join process p using (upid) where s.category in ('run', 'step') order by s.category, s.ts, s.name"
    )
    assert [(r["name"], r["ts"] - BASE, r["dur"]) for r in rows] == [
        ("answer", 0, 99 * MS), ("embed", 0, 5 * MS), ("code", 5 * MS, 45 * MS), ("hits", 5 * MS, 3 * MS), ("gen", 8 * MS, 52 * MS),
    ]  # fmt: skip
    assert {r["process"] for r in rows} == {"run answer 00010203"}
    clocks = query("select clock_name, clock_value from clock_snapshot")
    assert {c["clock_name"]: c["clock_value"] for c in clocks} == {"MONOTONIC": BASE, "REALTIME": WALL}


def test_what_has_not_ended_stays_open(open_trace: Any, tmp_path: Path) -> None:
    going_on = timeline(
        [("a", "noop"), ("b", "noop"), ("c", "noop")],
        [(0, 1)],
        [attempt(0, ready=0, placed=1, start=2, state="running"), attempt(1, ready=3, state="ready", device="")],
        state=RunState.RUNNING,
        ended_ns=0,
    )
    query = open_trace(written(going_on, tmp_path / "open.pftrace").path)
    assert query(ERRORS) == []
    rows = query("select name, category from slice where dur = -1 order by category, name")
    assert [(r["name"], r["category"]) for r in rows] == [
        ("queued", "queued"), ("answer", "run"), ("a", "running"), ("a", "step"), ("b", "step"), ("b", "waiting"),
    ]  # fmt: skip


def big_timeline(steps: int, seed: int) -> RunTimeline:
    """Layers of 50 with two predecessors each, run by eight workers, all overlapping freely."""
    draw = random.Random(seed)
    edges = [(p, s) for s in range(50, steps) for p in draw.sample(range(s // 50 * 50 - 50, s // 50 * 50), 2)]
    attempts = []
    for step in range(steps):
        ready = step // 50 * 40
        start = ready + draw.randrange(1, 20)
        end = start + draw.randrange(1, 20)
        device = f"pool:{draw.randrange(8)}"
        attempts.append(
            attempt(step, ready=ready, placed=ready, start=start, end=end, device=device, stream=draw.randrange(2))
        )
    return timeline([(f"step_{i}", "noop") for i in range(steps)], edges, attempts, ended_ns=BASE + 10_000 * MS)


def test_a_run_of_two_thousand_steps_comes_back_whole(open_trace: Any, tmp_path: Path) -> None:
    run = big_timeline(2_000, seed=7)
    summary = written(run, tmp_path / "big.pftrace")
    query = open_trace(summary.path)
    assert query(ERRORS) == []
    counts = {r["category"]: r["n"] for r in query("select category, count(*) as n from slice group by category")}
    assert counts == {"running": 2_000, "waiting": 2_000, "queued": 2_000, "staged": 2_000, "step": 2_000, "run": 1}
    assert sum(counts.values()) == summary.slices
    (total,) = query(
        "select sum(dur) as ns, min(depth) as low, max(depth) as high from slice where category = 'running'"
    )
    assert total == {"ns": sum(a.end_ns - a.start_ns for a in run.attempts), "low": 0, "high": 0}
    assert query("select count(*) as n from flow") == [{"n": len(run.edges)}] == [{"n": summary.flows}]


HOSTILE = ['quote " and \\ back', "tab\tand\nnewline", "emoji 🦊 e\u0301", "\x1b[31mred\x1b[0m", "null\x00byte", "'; drop table slice; --", "\u202ertl", "x" * 200, "%s%n", ""]  # fmt: skip


def test_hostile_names_come_back_readable_and_lose_nothing(open_trace: Any, tmp_path: Path) -> None:
    runs = [
        timeline([("a", "noop")], [], [attempt(0, ready=0, start=1, end=2)], name=name, run=os.urandom(16))
        for name in HOSTILE
    ]
    query = open_trace(written(runs, tmp_path / "hostile.pftrace").path)
    assert query(ERRORS) == []
    names = [r["name"] for r in query("select name from slice where category = 'run' order by id")]
    expected = [
        n.replace("\x1b", "␛").replace("\x00", "␀").replace("\t", "␉").replace("\n", "␊") or "workflow" for n in HOSTILE
    ]
    assert sorted(names) == sorted(expected)


def test_several_runs_share_the_tracks_of_their_devices(open_trace: Any, tmp_path: Path) -> None:
    second = timeline(
        [("late", "noop")], [], [attempt(0, ready=60, placed=61, start=70, end=80)], run=b"x" * 16, name="second"
    )
    query = open_trace(written([agent(), second], tmp_path / "two.pftrace").path)
    assert query(ERRORS) == []
    rows = query("select name from process where pid > 0 order by pid")
    assert [r["name"] for r in rows] == ["cpu:0", "npu:0", "pool:0", "run answer 00010203", "run second 78787878"]


def test_lanes_never_overlap_and_are_as_few_as_can_be() -> None:
    draw = random.Random(3)
    pieces = [Slice(str(i), "running", begin := draw.randrange(100), begin + draw.randrange(20)) for i in range(200)]
    pieces.append(Slice("open", "running", 50, None))
    out = lanes(pieces)
    assert sorted(p.name for lane in out for p in lane) == sorted(p.name for p in pieces)
    for lane in out:
        for before, after in pairwise(lane):
            assert before.end_ns is not None and before.end_ns <= after.begin_ns
    most = max(sum(p.begin_ns <= at and (p.end_ns is None or at < p.end_ns) for p in pieces) for at in range(100))
    assert len(out) <= most + sum(p.end_ns == p.begin_ns for p in pieces)


def test_a_task_that_starts_before_the_daemon_knows_it_is_ready_keeps_its_measured_time() -> None:
    ahead = timeline([("a", "noop"), ("b", "noop")], [(0, 1)], [
        attempt(0, ready=0, placed=0, start=1, end=3), attempt(1, ready=9, placed=0, start=3, end=5),
    ])  # fmt: skip
    pool = lay_out([ahead]).groups[0]
    ran = [s for track in pool.tracks if track.stream for s in track.slices]
    assert [(s.begin_ns - BASE, (s.end_ns or 0) - BASE) for s in ran] == [(1 * MS, 3 * MS), (3 * MS, 5 * MS)]
    waits = [s for track in pool.tracks if not track.stream for s in track.slices if s.name == "b"]
    assert [(s.begin_ns - BASE, s.end_ns) for s in waits] == [(3 * MS, BASE + 3 * MS)]


def test_a_map_names_its_elements_and_joins_every_task_by_a_flow() -> None:
    attempts = [attempt(0, i, ready=0, placed=0, start=1 + i, end=5 + i) for i in range(3)]
    attempts += [
        attempt(1, 2 * i + k, part_name=name, ready=9, placed=9, start=10 + 10 * k + i, end=15 + 10 * k + i)
        for i in range(3)
        for k, name in enumerate(("prefill", "decode"))
    ]
    picture = lay_out([timeline([("texts", "noop"), ("gen", "llm.generate")], [(0, 1)], attempts)])
    names = {s.name for s in (s for g in picture.groups for t in g.tracks for s in t.slices) if s.category == "running"}
    assert names == {f"texts[{i}]" for i in range(3)} | {
        f"gen[{i}].{p}" for i in range(3) for p in ("prefill", "decode")
    }
    assert picture.flows == 3 + 2 + 3  # last text to each prefill, the other texts to the first, prefill to decode


def test_a_trace_that_cannot_be_written_leaves_the_old_file_and_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"cannot be written to .*No such file or directory"):
        written(agent(), tmp_path / "missing" / "a.pftrace")
    (tmp_path / "folder.pftrace").mkdir()
    with pytest.raises(BadRequest, match="Is a directory"):
        written(agent(), tmp_path / "folder.pftrace")
    with pytest.raises(BadRequest, match="no run"):
        written([], tmp_path / "a.pftrace")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.pftrace"]


def test_importing_the_tracing_package_and_its_layout_brings_no_protobuf() -> None:
    code = "import sys, hexrt.tracing, hexrt.tracing.layout; print('google.protobuf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
