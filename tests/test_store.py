"""The store: what is handed in comes back after a restart, in order, and only what is still needed is kept."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import apsw
import msgspec
import pytest

from hexrt import values
from hexrt.core import RunState
from hexrt.errors import BadRequest, ErrorRecord, Unavailable
from hexrt.events import CancelRequested, DeadlinePassed, DeviceUp, Emitted, Event, Failed, Recovered
from hexrt.runtime import store_writer
from hexrt.runtime.store import Store
from hexrt.runtime.store_database import lock_directory
from hexrt.runtime.store_records import LARGE_BYTES
from hexrt.runtime.store_writer import Bell, Wait, Writer
from tests.store_help import Owner, check_lingering, ended, finished, plains, replayed, run_id, started, submitted

A, B, C = run_id(1), run_id(2), run_id(3)
BIG = os.urandom(LARGE_BYTES + 1)


def every_kind() -> list[Event]:
    return [
        submitted(A),
        started(A),
        finished(A, 0, {"n": 1, "tensor": [1.5, 2.5]}),
        Failed(A, 1, 0, 1, "pool:0", 1, 2, ErrorRecord("task_failed", "no")),
        Emitted(A, 2, 0, 1, 0, (1, 2, 3), "abc", 9),
        DeadlinePassed(A, -1, 9),
        CancelRequested(A, 1000, 9, 9, "enough"),
        Recovered(1, 2),
    ]


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_facts_of_every_kind_come_back_in_order(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    ticket = 0
    for event in every_kind():
        ticket = owner.store.append([event])
    assert owner.wait(ticket)
    owner.close()
    assert plains(replayed(tmp_path)) == plains(every_kind())


def test_a_closed_store_leaves_nothing_but_the_database_readable_by_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    owner = Owner(directory)
    owner.store.append([submitted(A, BIG)])
    owner.store.close_run(ended(A))
    owner.close()
    assert files_of(directory) == ["hexrt.db"] and os.listdir(directory) == ["hexrt.db"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "hexrt.db").stat().st_mode) == 0o600
    assert "store" not in {thread.name for thread in threading.enumerate()}


async def test_the_loop_is_told_each_commit_through_call(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    durable: asyncio.Queue[int] = asyncio.Queue()
    store = Store(tmp_path, durable.put_nowait, lambda error: None, loop.call_soon_threadsafe)
    ticket = store.append([submitted(A)])
    while await durable.get() < ticket:
        pass
    assert store.committed == ticket and store.pending_bytes == 0
    store.close()


async def test_closing_after_the_loop_has_gone_still_writes_everything(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    store = Store(tmp_path, lambda ticket: None, lambda error: None, loop.call_soon_threadsafe)
    store.append([submitted(A)])
    store.close()
    assert store.failure is None and len(replayed(tmp_path)) == 1


def test_what_is_not_urgent_waits_for_company(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0)
    lone = owner.store.append([submitted(A)], Wait.LAG)
    with_it = owner.store.append([started(A)])
    assert owner.wait(with_it) and owner.store.commits == 1 and lone < with_it
    owner.store.append([finished(A)], Wait.LAG)
    owner.close()
    assert len(replayed(tmp_path)) == 3


def test_what_is_held_shares_the_commit_of_what_follows(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0)
    held = owner.store.append([submitted(A)], Wait.HELD)
    follows = owner.store.append([finished(A)])
    assert owner.wait(follows) and owner.store.commits == 1 and held < follows
    owner.store.append([submitted(B)], Wait.HELD)
    owner.close()
    assert plains(replayed(tmp_path)) == plains([submitted(A), finished(A), submitted(B)])


def test_what_is_held_is_committed_when_it_is_hastened(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0)
    first = owner.store.append([submitted(A)])
    assert owner.wait(first)
    held = owner.store.append([submitted(B)], Wait.HELD)
    owner.store.hasten(first)  # on disk already: the later one waits on
    assert owner.store.committed == first
    owner.store.hasten(held)
    assert owner.wait(held)
    owner.close()


def test_a_run_closed_later_is_in_nobodys_way_and_found_at_once(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0)
    owner.wait(owner.store.append([submitted(A), submitted(B)]))
    owner.wait(owner.store.close_run(ended(C, wall_ns=3)))
    owner.store.close_run_later(ended(A, {"n": 1}, wall_ns=4))
    assert owner.wait(owner.store.append([finished(B)])) and rows(tmp_path, "SELECT run FROM runs") == [(C,)]
    found = owner.store.find_run(A)
    assert found is not None and values.decode(found.outputs["answer"]) == {"n": 1}
    assert [summary.run for summary in owner.store.list_runs(None, None, 10)] == [A, C]
    assert [summary.run for summary in owner.store.list_runs(None, None, 1)] == [A]
    assert owner.store.list_runs(7, None, 10) == [] and owner.store.list_runs(None, RunState.FAILED, 10) == []
    owner.close()
    assert rows(tmp_path, "SELECT run FROM runs ORDER BY ordinal") == [(C,), (A,)]
    assert plains(replayed(tmp_path)) == plains([submitted(B), finished(B)])


def test_runs_closed_later_are_written_once_the_lag_has_passed_though_facts_go_on_coming(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=0.001)
    owner.wait(owner.store.append([submitted(A)]))
    for number in range(2, 80):
        owner.store.close_run_later(ended(run_id(number)))
    step = 0
    while rows(tmp_path, "SELECT count(*) FROM runs") != [(78,)]:
        step += 1
        assert owner.wait(owner.store.append([finished(A, step)]))
    assert owner.store.pending_bytes == 0
    assert len(owner.store.list_runs(None, None, 100)) == 78
    owner.close()
    assert len(replayed(tmp_path)) == 1 + step


def test_a_row_never_overtakes_the_facts_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path, lag_s=0.001)
    due_rows = Writer._due_rows
    told: list[int] = []

    def meanwhile(writer: Writer) -> object:
        """Everything of run B comes in while the writer makes up a commit."""
        if not told:
            told.append(owner.store.append([submitted(B), finished(B)]))
            owner.store.close_run_later(ended(B))
        return due_rows(writer)

    monkeypatch.setattr(Writer, "_due_rows", meanwhile)
    owner.store.close_run_later(ended(A))
    owner.wait(owner.store.append([submitted(C)], Wait.LAG))
    owner.wait(told[0])
    owner.close()
    assert plains(replayed(tmp_path)) == plains([submitted(C)])
    assert rows(tmp_path, "SELECT count(*) FROM runs") == [(2,)]


@pytest.mark.parametrize("wait", [Wait.NOT, Wait.HELD, Wait.LAG])
def test_what_falls_into_a_commit_does_not_keep_the_writer_asleep_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Wait
) -> None:
    due_rows, listen, asleep = Writer._due_rows, Bell.wait, threading.Event()
    told: list[int] = []

    def meanwhile(writer: Writer) -> object:
        """A fact that somebody waits for comes in while the writer makes up a commit, and is part of it."""
        if not told:
            told.append(owner.store.append([submitted(B)]))
        return due_rows(writer)

    def noted(bell: Bell, timeout_s: float) -> bool:
        if told and timeout_s == -1:
            asleep.set()
        return listen(bell, timeout_s)

    monkeypatch.setattr(store_writer, "QUIET_S", 0)
    owner = Owner(tmp_path, lag_s=0.001)
    monkeypatch.setattr(Writer, "_due_rows", meanwhile)
    monkeypatch.setattr(Bell, "wait", noted)
    owner.store.append([submitted(A)], Wait.LAG)
    assert asleep.wait(10)
    ticket = owner.store.append([submitted(C)], wait)
    owner.store.hasten(ticket)
    assert owner.wait(ticket)
    owner.close()
    assert {event.run for event in replayed(tmp_path)} == {A, B, C}  # type: ignore[union-attr]


def test_a_lag_that_has_passed_commits_what_is_not_urgent(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=0.001)
    assert owner.wait(owner.store.append([submitted(A)], Wait.LAG))
    owner.close()


def test_many_small_appends_share_commits(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.append([submitted(A)])
    for step in range(5_000):
        ticket = owner.store.append([finished(A, step)])
    assert owner.wait(ticket) and owner.store.commits < 500
    owner.close()
    assert [event.step for event in replayed(tmp_path)[1:]] == list(range(5_000))  # type: ignore[union-attr]


def test_pending_bytes_say_when_the_writer_is_behind(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0, max_pending_bytes=100_000)
    owner.store.append([submitted(A)], Wait.LAG)
    assert not owner.store.is_behind()
    owner.store.append([finished(A, 0, "x" * 100_000)], Wait.LAG)
    assert owner.store.is_behind() and owner.store.pending_bytes > 100_000
    assert owner.wait(owner.store.append([started(A)]))
    assert not owner.store.is_behind() and owner.store.pending_bytes == 0
    owner.close()


def test_a_fact_that_is_not_durable_is_refused_where_it_is_handed_in(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    with pytest.raises(TypeError, match="DeviceUp"):
        owner.store.append([DeviceUp("pool:0", 1, 1)])
    owner.close()


def test_a_closed_run_is_found_and_no_longer_replayed(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.append([submitted(A), submitted(B), started(A), started(B)])
    owner.wait(owner.store.close_run(ended(A, {"n": 1})))
    owner.wait(owner.store.append([finished(A), started(C)]))  # too late, and of no run
    owner.close()
    assert plains(replayed(tmp_path)) == plains([submitted(B), started(B)])
    owner = Owner(tmp_path)
    found = owner.store.find_run(A)
    assert found is not None and owner.store.find_run(B) is None
    assert values.decode(found.outputs["answer"]) == {"n": 1}
    assert (found.summary, found.steps, found.timeline) == (ended(A).summary, ended(A).steps, ended(A).timeline)
    owner.close()


def test_a_run_that_ends_within_one_commit_needs_only_its_row(tmp_path: Path) -> None:
    owner = Owner(tmp_path, lag_s=3600.0)
    owner.store.append([submitted(A), finished(A)], Wait.LAG)
    assert owner.wait(owner.store.close_run(ended(A))) and owner.store.commits == 1
    assert owner.store.find_run(A) is not None
    owner.close()
    assert rows(tmp_path, "SELECT count(*) FROM frames") == [(0,)] and replayed(tmp_path) == []


def test_a_second_row_for_a_run_changes_nothing(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.append([submitted(A)])
    owner.store.close_run(ended(A, BIG))
    owner.wait(owner.store.close_run(ended(A, "other")))
    found = owner.store.find_run(A)
    assert found is not None and values.decode(found.outputs["answer"]) == BIG
    owner.close()


def test_lists_are_by_owner_and_state_the_newest_first(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for number in range(1, 9):
        state = RunState.FAILED if number % 4 == 0 else RunState.SUCCEEDED
        ticket = owner.store.close_run(ended(run_id(number), uid=number % 2, state=state, wall_ns=number))
    owner.wait(ticket)

    def listed(uid: int | None, state: RunState | None, limit: int) -> list[int]:
        return [int.from_bytes(summary.run, "big") for summary in owner.store.list_runs(uid, state, limit)]

    assert listed(None, None, 3) == [8, 7, 6]
    assert listed(1, None, 100) == [7, 5, 3, 1]
    assert listed(None, RunState.FAILED, 100) == [8, 4]
    assert listed(0, RunState.FAILED, 1) == [8]
    assert listed(7, None, 100) == []
    owner.close()


def rows(directory: Path, query: str) -> list[tuple[object, ...]]:
    """By the store's own library: two of them in one process would undo each other's locks on an open database."""
    with closing(apsw.Connection(str(directory / "hexrt.db"))) as connection:
        return connection.execute(query).fetchall()


def test_the_oldest_ended_runs_go_when_there_are_too_many(tmp_path: Path) -> None:
    owner = Owner(tmp_path, kept_runs=3)
    for number in range(1, 6):
        owner.store.append([submitted(run_id(number))])
        ticket = owner.store.close_run(ended(run_id(number), bytes([number]) * (LARGE_BYTES + 1)))
    owner.wait(ticket)
    assert [owner.store.find_run(run_id(number)) is not None for number in range(1, 6)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    owner.close()
    assert len(files_of(tmp_path)) == 1 + 3


def test_ended_runs_are_bounded_in_bytes_and_the_newest_always_stays(tmp_path: Path) -> None:
    owner = Owner(tmp_path, kept_bytes=1)
    for number in (1, 2, 3):
        ticket = owner.store.close_run(ended(run_id(number)))
    owner.wait(ticket)
    assert [summary.run for summary in owner.store.list_runs(None, None, 10)] == [run_id(3)]
    owner.close()


def test_a_dropped_run_is_not_taken_for_open_by_a_restart(tmp_path: Path) -> None:
    owner = Owner(tmp_path, kept_runs=1, lag_s=3600.0)
    owner.wait(owner.store.append([submitted(A), submitted(B)]))  # one frame, which A keeps
    owner.store.close_run(ended(B))
    owner.wait(owner.store.close_run(ended(C)))
    assert owner.store.find_run(B) is None
    owner.close()
    assert plains(replayed(tmp_path)) == plains([submitted(A)])
    check_lingering(tmp_path)
    owner = Owner(tmp_path)
    owner.wait(owner.store.close_run(ended(A)))
    owner.close()
    assert rows(tmp_path, "SELECT count(*) FROM lingering_runs") == [(0,)] and replayed(tmp_path) == []


def test_frames_of_closed_runs_are_deleted(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for number in range(1, 40):
        owner.wait(owner.store.append([submitted(run_id(number)), started(run_id(number))]))
        owner.store.append([Recovered(number, number)])
        owner.wait(owner.store.close_run(ended(run_id(number))))
    owner.close()
    assert rows(tmp_path, "SELECT count(*) FROM frames") == [(0,)]


def test_a_long_run_does_not_keep_the_facts_of_the_others(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([submitted(A)]))
    payload = os.urandom(60_000)
    for number in range(2, 400):
        other = run_id(number)
        owner.store.append([submitted(other), finished(other, 0, payload), finished(A, number)])
        owner.wait(owner.store.append([started(other)]))
        owner.store.close_run(ended(other))
    owner.close()
    kept = rows(tmp_path, "SELECT sum(length(facts)), count(*) FROM frames")
    assert isinstance(kept[0][0], int) and kept[0][0] < 9 << 20
    check_lingering(tmp_path)
    expected = [submitted(A), *(finished(A, number) for number in range(2, 400))]
    assert plains(replayed(tmp_path)) == plains(expected)
    assert plains(replayed(tmp_path)) == plains(expected)


def test_large_parts_go_to_files_and_come_back_whole(tmp_path: Path) -> None:
    facts = [submitted(A, BIG), finished(A, 0, BIG), finished(A, 1, "small")]
    owner = Owner(tmp_path)
    owner.wait(owner.store.append(facts))
    assert len(files_of(tmp_path / "blobs")) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "blobs").rglob("*"))
    owner.close()
    assert rows(tmp_path, "SELECT max(length(facts)) < 2000 FROM frames") == [(1,)]
    assert plains(replayed(tmp_path)) == plains(facts)


def test_a_file_stays_as_long_as_some_run_needs_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path, kept_runs=1)
    owner.store.append([submitted(A), submitted(B), finished(A, 0, BIG), finished(B, 0, BIG)])
    owner.wait(owner.store.close_run(ended(A, "small")))
    assert len(files_of(tmp_path / "blobs")) == 1
    owner.wait(owner.store.close_run(ended(B, BIG)))
    found = owner.store.find_run(B)
    assert found is not None and values.decode(found.outputs["answer"]) == BIG
    head = owner.store.find_run(B, with_outputs=False)
    assert head is not None and head.outputs == {} and head.summary == found.summary
    owner.store.close_run(ended(C, "small"))  # B is one too many
    owner.close()
    assert os.listdir(tmp_path) == ["hexrt.db"]


@pytest.mark.parametrize("restarts", [False, True])
def test_files_that_only_facts_needed_go_with_them(tmp_path: Path, restarts: bool) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([submitted(A), finished(A, 0, BIG), submitted(B), finished(B, 0, BIG[1:] + b"!")]))
    if restarts:
        owner.close()
        owner = Owner(tmp_path)
    assert len(files_of(tmp_path / "blobs")) == 2
    owner.wait(owner.store.close_run(ended(A, "small")))
    owner.close()
    assert len(files_of(tmp_path / "blobs")) == 1
    assert plains(replayed(tmp_path)) == plains([submitted(B), finished(B, 0, BIG[1:] + b"!")])


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize("damage", [Path.unlink, spoil])
def test_a_lost_output_is_named_and_its_fact_absent_until_it_is_written_again(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([submitted(A), finished(A, 0, BIG), finished(A, 1)]))
    owner.close()
    (path,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    damage(path)  # type: ignore[operator]
    owner = Owner(tmp_path)
    assert plains(list(owner.store.replay())) == plains([submitted(A), finished(A, 1)])
    assert [(lost.run, lost.step, lost.part) for lost in owner.store.damaged] == [(A, 0, 0)]
    assert A.hex() in caplog.text and str(tmp_path) not in caplog.text
    owner.wait(owner.store.append([finished(A, 0, BIG)]))
    owner.close()
    assert plains([replayed(tmp_path)[-1]]) == plains([finished(A, 0, BIG)])


def test_a_run_whose_workflow_is_lost_is_left_out_until_it_is_closed(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([submitted(A, BIG), started(A), submitted(B)]))
    owner.close()
    (path,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    path.unlink()
    for _ in range(2):
        owner = Owner(tmp_path)
        assert plains(list(owner.store.replay())) == plains([submitted(B)])
        assert [(lost.run, lost.step) for lost in owner.store.damaged] == [(A, -1)]
        owner.close()
    owner = Owner(tmp_path)
    owner.wait(owner.store.close_run(ended(A, state=RunState.FAILED)))
    owner.close()
    owner = Owner(tmp_path)
    assert plains(list(owner.store.replay())) == plains([submitted(B)]) and owner.store.damaged == []
    owner.close()


def test_a_lost_output_of_an_ended_run_is_an_error_of_that_run(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.close_run(ended(A, BIG)))
    (path,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    path.unlink()
    found = owner.store.find_run(A)
    assert found is not None and found.outputs == {} and found.errors["answer"].kind == "unavailable"
    owner.close()


def test_files_that_a_crash_left_behind_are_removed(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([submitted(A, BIG)]))
    owner.close()
    (needed,) = files_of(tmp_path / "blobs")
    for name in ("ab/" + "ab" * 32, "ab/" + "ab" * 31 + "cd.new", "ab/a note of the owner"):
        path = tmp_path / "blobs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
    Owner(tmp_path).close()
    assert files_of(tmp_path / "blobs") == sorted([needed, "ab/a note of the owner"])


def test_small_values_are_kept_by_name(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.save("epoch", b"1")
    owner.wait(owner.store.save("epoch", b"2", Wait.NOT))
    assert owner.store.load("epoch") == b"2" and owner.store.load("nothing") is None
    owner.close()
    owner = Owner(tmp_path)
    assert owner.store.load("epoch") == b"2"
    owner.close()


def test_a_tensor_in_a_submitted_input_comes_back_as_it_was_on_the_wire(tmp_path: Path) -> None:
    fact = submitted(A)
    step = msgspec.structs.replace(
        fact.workflow.steps[0], inputs={"t": msgspec.msgpack.Ext(1, b"\x93"), "n": [None, 2**63]}
    )
    fact = msgspec.structs.replace(fact, workflow=msgspec.structs.replace(fact.workflow, steps=(step,)))
    owner = Owner(tmp_path)
    owner.wait(owner.store.append([fact]))
    owner.close()
    assert replayed(tmp_path) == [fact]


# --- what is refused at the start ---------------------------------------------------------------------------------


def test_a_second_daemon_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    with pytest.raises(BadRequest, match=r"daemon.state_dir: another hexrtd.* uses this state directory"):
        Owner(tmp_path)
    assert owner.wait(owner.store.append([submitted(A)]))
    owner.close()
    Owner(tmp_path).close()


def test_the_lock_holds_between_processes(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    program = (
        "import sys, pathlib\nfrom hexrt.runtime.store import Store\n"
        "try: Store(pathlib.Path(sys.argv[1]), print, print, print)\n"
        "except Exception as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert "uses this state directory" in result.stdout
    owner.close()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BadRequest, match="chmod"):
        Owner(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(BadRequest, match="cannot be used"):
            Owner(path)


def make_one(directory: Path) -> bytes:
    owner = Owner(directory)
    owner.wait(owner.store.append([submitted(A)]))
    owner.close()
    return (directory / "hexrt.db").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda good: b"", "is empty: restore a copy"),
        (lambda good: b"no database at all" * 1000, "is damaged"),
        (lambda good: good[:100] + b"\xff" * 4000 + good[4100:], "is damaged"),
    ],
)
def test_a_file_that_is_no_database_is_refused_with_what_to_do_and_kept(
    tmp_path: Path, content: object, message: str
) -> None:
    bad = content(make_one(tmp_path))  # type: ignore[operator]
    (tmp_path / "hexrt.db").write_bytes(bad)
    for _ in range(2):
        with pytest.raises(Unavailable, match=message) as refusal:
            Owner(tmp_path)
        assert str(tmp_path) not in str(refusal.value) and "move hexrt.db" in str(refusal.value)
    assert (tmp_path / "hexrt.db").read_bytes() == bad


def test_a_newer_schema_is_refused_by_number(tmp_path: Path) -> None:
    make_one(tmp_path)
    rows(tmp_path, "PRAGMA user_version = 7")
    with pytest.raises(BadRequest, match="schema version 7 and this hexrt knows 2"):
        Owner(tmp_path)
    assert rows(tmp_path, "PRAGMA user_version") == [(7,)]


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    rows(tmp_path, "CREATE TABLE mine (x)")
    with pytest.raises(BadRequest, match="not a database of hexrt"):
        Owner(tmp_path)
    assert rows(tmp_path, "SELECT name FROM sqlite_schema") == [("mine",)]


def test_a_log_without_its_database_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "hexrt.db-wal").write_bytes(b"facts")
    with pytest.raises(Unavailable, match=r"hexrt\.db is gone"):
        Owner(tmp_path)
    assert (tmp_path / "hexrt.db-wal").read_bytes() == b"facts"


def test_a_frame_with_a_flipped_bit_stops_the_replay_by_name(tmp_path: Path) -> None:
    make_one(tmp_path)
    rows(tmp_path, "UPDATE frames SET facts = CAST(substr(facts, 1, 30) || X'00' || substr(facts, 32) AS BLOB)")
    owner = Owner(tmp_path)
    with pytest.raises(Unavailable, match=r"frame 1 of hexrt\.db is damaged"):
        list(owner.store.replay())
    owner.close()


def test_a_database_that_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "hexrt.db.new").write_bytes(b"half")
    (tmp_path / "hexrt.db.new-journal").write_bytes(b"half")
    Owner(tmp_path).close()
    assert os.listdir(tmp_path) == ["hexrt.db"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_state_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(BadRequest, match="belongs to another user"):
        lock_directory(directory)
