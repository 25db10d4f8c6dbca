"""The store on a disk that fails, fills up or loses power: what was acknowledged is there afterwards, in order."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from hexrt.errors import HexrtError
from hexrt.events import Event, Finished, Submitted
from hexrt.runtime import store_commit, store_journal
from hexrt.runtime.store_blobs import BlobFolder
from hexrt.runtime.store_commit import Committer, Retention
from hexrt.runtime.store_database import make_database, open_writer
from hexrt.runtime.store_records import LARGE_BYTES
from tests.seeds import seeds
from tests.store_help import Owner, check_lingering, ended, finished, plains, replayed, run_id, submitted
from tests.store_vfs import Faults, FaultyDisk, ForgetfulDisk

BIG = bytes(range(256)) * (LARGE_BYTES // 256 + 1)
RUNS = 6


def work(owner: Owner, rounds: int = 4) -> tuple[list[Event], list[bytes]]:
    """Hands in facts one commit at a time; returns the facts and the closed runs that were acknowledged, until a failure."""
    facts: list[Event] = []
    closed: list[bytes] = []
    for number in range(1, RUNS + 1):
        run = run_id(number)
        events: list[Event] = [submitted(run, BIG if number == 2 else b"")]
        events += [finished(run, step, BIG if step == 1 and number == 3 else step) for step in range(rounds)]
        for event in events:
            if not owner.wait(owner.store.append([event])):
                return facts, closed
            facts.append(event)
        if number % 2 == 0:
            if not owner.wait(owner.store.close_run(ended(run, BIG if number == 4 else "out"))):
                return facts, closed
            closed.append(run)
    return facts, closed


def check(directory: Path, facts: list[Event], closed: list[bytes]) -> None:
    """Every acknowledged fact of a run that is not closed is there, in order, and every acknowledged row."""
    owner = Owner(directory)
    found = list(owner.store.replay())
    assert owner.store.damaged == []
    rows = {summary.run for summary in owner.store.list_runs(None, None, 100)}
    for run in closed:
        ended_run = owner.store.find_run(run)
        assert ended_run is not None and set(ended_run.outputs) == {"answer"}
    kept = [event for event in facts if run_of(event) not in rows]
    assert plains([event for event in found if run_of(event) not in rows])[: len(kept)] == plains(kept)
    assert rows >= set(closed) and not rows & {run_of(event) for event in found}
    owner.wait(owner.store.append([submitted(run_id(99))]))
    owner.close()
    assert owner.failures == []
    check_lingering(directory)
    assert [event for event in replayed(directory) if run_of(event) == run_id(99)]


def run_of(event: Event) -> bytes:
    assert isinstance(event, Submitted | Finished)
    return event.run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and rewrites of the journal come so often that the faults meet them too."""
    monkeypatch.setattr(store_commit, "CHECKPOINT_BYTES", 100_000)
    monkeypatch.setattr(store_journal, "WASTE_BYTES", 10_000)


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize(
    ("kind", "error"), [("write", apsw.FullError), ("sync", apsw.IOError), ("open", apsw.CantOpenError)]
)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # SQLite closes in spite of a failing call
def test_whichever_call_fails_what_was_acknowledged_is_there(
    tmp_path: Path, kind: str, error: type[apsw.Error], is_lasting: bool
) -> None:
    at, struck = 0, True
    while struck:
        at += 1 if at < 10 else 9
        directory = tmp_path / str(at)
        faults = Faults(kind, at, error, is_lasting)
        disk = FaultyDisk("faulty", faults)
        facts: list[Event] = []
        closed: list[bytes] = []
        try:
            owner = Owner(directory, vfs="faulty", sync=faults.sync)
        except HexrtError as refusal:
            assert refusal.where == "daemon.state_dir" and faults.struck
        else:
            facts, closed = work(owner)
            commits = owner.store.commits
            owner.close()
            if faults.struck:
                assert len(owner.failures) == 1 and owner.store.failure is owner.failures[0]
                assert owner.store.commits == commits, "something was committed after the failure"
            else:
                assert owner.failures == []
        struck = faults.struck > 0
        disk.unregister()
        check(directory, facts, closed)
        shutil.rmtree(directory)
    assert at > 3


def test_after_a_failure_nothing_is_taken_and_the_owner_is_told_once(tmp_path: Path) -> None:
    faults = Faults("sync", 10**9, apsw.IOError)
    disk = FaultyDisk("failing", faults)
    owner = Owner(tmp_path, vfs="failing", sync=faults.sync)
    assert owner.wait(owner.store.append([submitted(run_id(1))]))
    faults.at = faults.seen + 1
    assert not owner.wait(owner.store.append([finished(run_id(1))]))
    assert not owner.wait(owner.store.append([finished(run_id(1))]))
    syncs = faults.seen
    owner.close()
    assert len(owner.failures) == 1 and isinstance(owner.failures[0], apsw.IOError)
    assert faults.seen == syncs, "a sync was tried again after one had failed"
    disk.unregister()
    check(tmp_path, [submitted(run_id(1))], [])


@pytest.mark.parametrize("seed", seeds(12, 1000))
def test_a_power_loss_leaves_every_acknowledged_fact(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    disk = ForgetfulDisk("forgetful")
    is_later = seed % 2 == 1
    owner = Owner(tmp_path / "before", vfs="forgetful", kept_runs=100 if is_later else 2, lag_s=0.0)
    facts: list[Event] = [submitted(run_id(1))]
    closed: list[bytes] = []
    for number in range(1, rng.randrange(2, 40)):
        run = run_id(number)
        facts.append(finished(run_id(1), 100 + number))  # run 1 goes on all the time, so that others' facts are waste
        if number > 1:
            facts.append(submitted(run))
        owner.wait(owner.store.append(facts[-2:]))
        for step in range(rng.randrange(4)):
            facts.append(finished(run, step, os.urandom(rng.randrange(40_000))))
            owner.wait(owner.store.append([facts[-1]]))
        if number > 1 and rng.random() < 0.5:
            closed.append(run)
            if is_later:
                owner.store.close_run_later(ended(run))
            else:
                owner.wait(owner.store.close_run(ended(run)))
    owner.store.append([finished(run_id(1), 9, "perhaps")])  # not waited for
    after = tmp_path / "after"
    after.mkdir(0o700)
    disk.write_after_power_loss(after, rng)
    owner.close()
    disk.unregister()
    owner = Owner(after)
    rows = {summary.run for summary in owner.store.list_runs(None, None, 100)}
    owner.close()
    assert rows <= set(closed) if is_later else rows == set(closed[-2:])
    rest = [fact for fact in facts if run_of(fact) not in (rows if is_later else closed)]
    found = [event for event in replayed(after) if not (isinstance(event, Finished) and event.step == 9)]
    assert plains(found) == plains(rest)
    check_lingering(after)


def test_a_file_is_on_disk_before_the_commit_that_names_it(tmp_path: Path) -> None:
    order: list[str] = []

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        order.append(str(path.relative_to(tmp_path)) if path != tmp_path else "state")
        os.fsync(fd)

    faults = Faults("none", 0, apsw.IOError)
    note: Callable[[str], None] = lambda kind: order.append("commit") if kind == "sync" else None  # noqa: E731
    faults.meet = note  # type: ignore[method-assign]
    disk = FaultyDisk("noting", faults)
    owner = Owner(tmp_path, vfs="noting", sync=sync)
    owner.wait(owner.store.append([submitted(run_id(1))]))
    order.clear()
    owner.wait(owner.store.append([finished(run_id(1), 0, BIG)]))
    first = order.index("commit")
    (name,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    shard = f"blobs/{name.parent.name}"
    assert order[:first] == [f"{shard}/{name.name}.new", shard, "blobs", "state"]
    owner.close()
    disk.unregister()


def test_a_log_made_larger_beforehand_is_read_as_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir(0o700)
    after.mkdir(0o700)
    make_database(before, "", os.fsync)
    connection = open_writer(before, "")
    log = before / "hexrt.db-wal"
    committer = Committer(connection, log, BlobFolder(before / "blobs"), Retention(10, 1 << 20), os.fsync)
    facts: list[Event] = [submitted(run_id(1)), finished(run_id(1), 1), finished(run_id(1), 2)]
    committer.commit([facts[:2]])
    committer.grow_log()
    committer.commit([facts[2:]])
    assert log.stat().st_size == store_commit.WAL_BYTES
    for name in ("hexrt.db", "hexrt.db-wal"):  # as a kill leaves them
        shutil.copy(before / name, after / name)
    assert plains(replayed(after)) == plains(facts)
    committer.close()
    assert os.listdir(before) == ["hexrt.db"] and plains(replayed(before)) == plains(facts)


def test_a_file_that_cannot_be_written_fails_the_commit_that_needs_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    assert owner.wait(owner.store.append([submitted(run_id(1))]))
    (tmp_path / "blobs").write_text("in the way")
    assert not owner.wait(owner.store.append([finished(run_id(1), 0, BIG)]))
    owner.close()
    assert isinstance(owner.failures[0], OSError) and owner.failures[0].errno in (errno.EEXIST, errno.ENOTDIR)
    (tmp_path / "blobs").unlink()
    check(tmp_path, [submitted(run_id(1))], [])


def test_an_unclean_close_is_checked_and_damage_is_refused_untouched(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.store.append([submitted(run_id(1))])
    for step in range(200):
        owner.wait(owner.store.append([finished(run_id(1), step, os.urandom(3_000))]))
    owner.close()
    path = tmp_path / "hexrt.db"
    content = bytearray(path.read_bytes())
    content[8192:12288] = os.urandom(4096)
    path.write_bytes(content)
    (tmp_path / "hexrt.db-wal").touch()
    with pytest.raises(HexrtError, match="is damaged"):
        Owner(tmp_path)
    assert path.read_bytes() == content
