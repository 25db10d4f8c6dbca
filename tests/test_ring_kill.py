"""kill -9 of either end of a ring at each of its steps: no record is torn, none that was committed is lost, and all room returns."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hexrt.memory.ring import Ring, RingReader, RingWriter, wake_fd
from hexrt.memory.ring_memory import WRITER_WAITS
from tests.ring_peers import WAIT_S, content, start
from tests.seeds import seeds

COUNT = 1_000_000  # more than either end lives for
MANY = 10_000
pytestmark = pytest.mark.timeout(60)


@contextmanager
def ring_and_wakes(slots: int = 16, most: int = 4) -> Iterator[tuple[Ring, int, int]]:
    """A ring and its two eventfds, and the proof that nothing of them is left."""
    fds, shared = open_fds(), os.listdir("/dev/shm")
    with Ring.create(100_000, slots, most) as ring:
        filled, freed = wake_fd(), wake_fd()
        try:
            yield ring, filled, freed
        finally:
            os.close(filled)
            os.close(freed)
    assert open_fds() == fds
    assert os.listdir("/dev/shm") == shared


def open_fds() -> list[str]:
    """What this process has open, but for the eyes that look."""
    return sorted(os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists() and "/fd" not in os.readlink(link))  # fmt: skip


@contextmanager
def peer(process: subprocess.Popen[str]) -> Iterator[int]:
    """The pidfd of the other end, which is gone in the end."""
    pidfd = os.pidfd_open(process.pid)
    try:
        with process:
            yield pidfd
    finally:
        os.close(pidfd)


def wait(*fds: int) -> None:
    ready, _, _ = select.select(fds, [], [], WAIT_S)
    assert ready, "the other end neither does anything nor ends"


def check_whole(ring: Ring, seed: int, number: int) -> None:
    """All room is there, and the next record goes through as if nothing had been."""
    writer, reader = RingWriter(ring.fd), RingReader(ring.fd)
    writer.check_integrity()
    assert writer.statistics().held == 0
    assert reader.occupied() == ()
    slot = writer.reserve_nowait(writer.capacity_bytes)
    assert slot is not None
    slot.view[:4] = b"next"
    writer.commit(slot)
    taken = reader.take_nowait()
    assert taken is not None and bytes(taken.view[:4]) == b"next"
    reader.release(taken.slot)
    del slot, taken
    writer.close()
    reader.close()


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_what_a_killed_writer_had_committed_is_read_and_nothing_else(seed: int) -> None:
    with ring_and_wakes() as (ring, filled, freed):
        reader = RingReader(ring.fd, filled, freed)
        number = 0
        process = start("write", ring, filled, freed, seed, COUNT, kill_at=seed + 1)
        with peer(process) as ended:
            alive = True
            while alive:
                wait(filled, ended)
                alive = not select.select([ended], [], [], 0)[0]
                while (taken := reader.take_nowait()) is not None:
                    assert bytes(taken.view) == content(seed, number), f"record {number} is torn"
                    number += 1
                    reader.release(taken.slot)
        assert process.returncode == -signal.SIGKILL
        assert reader.recover() == 0
        check_whole(ring, seed, number)
        del taken
        reader.close()


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_what_a_killed_reader_held_is_freed_and_the_rest_is_read(seed: int) -> None:
    with ring_and_wakes() as (ring, filled, freed):
        writer = RingWriter(ring.fd, filled, freed)
        written = 0
        process = start("read", ring, filled, freed, seed, COUNT, kill_at=seed + 1)
        with peer(process) as ended:
            while not select.select([ended], [], [], 0)[0]:
                slot = writer.reserve_nowait(len(content(seed, written)))
                if slot is None:
                    wait_for_room(writer, freed, ended)
                    continue
                slot.view[:] = content(seed, written)
                writer.commit(slot)
                written += 1
        assert process.returncode == -signal.SIGKILL, "the reader found a torn record"
        reader = RingReader(ring.fd, filled, freed)
        held = len(reader.occupied())
        assert reader.recover() <= 3
        left = []
        while (taken := reader.take_nowait()) is not None:
            left.append(bytes(taken.view))
            reader.release(taken.slot)
        assert left == [content(seed, number) for number in range(written - len(left), written)]
        assert len(left) >= held - 3
        writer.check_integrity()
        assert writer.statistics().held == 0
        slot = taken = None
        writer.close()
        check_whole(ring, seed, written)
        reader.close()


def wait_for_room(writer: RingWriter, freed: int, ended: int) -> None:
    """Asks to be woken as `wait_reserve` does, but for the other end's death too."""
    writer._words[WRITER_WAITS] = 1
    writer._fence()
    if writer.statistics().held == writer.most:
        wait(freed, ended)
        try:
            os.eventfd_read(freed)
        except BlockingIOError:
            pass  # it died
    writer._words[WRITER_WAITS] = 0


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_ends_killed_at_any_time_leave_a_ring_that_the_next_ones_use(seed: int) -> None:
    chance = random.Random(seed)
    with ring_and_wakes() as (ring, filled, freed):
        for _ in range(2):
            with peer(start("write", ring, filled, freed, seed, COUNT)) as writes:
                reader = RingReader(ring.fd, filled, freed)
                reader.recover()
                for _ in range(chance.randrange(1, 400)):
                    taken = reader.wait_take(WAIT_S)
                    assert taken is not None
                    reader.release(taken.slot)
                os.kill(pid_of(writes), signal.SIGKILL)
                wait(writes)
            while (taken := reader.take_nowait()) is not None:
                reader.release(taken.slot)
            check_whole(ring, seed, 0)
            reader.close()


def pid_of(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))


def test_ten_thousand_records_of_any_size_pass_between_two_processes_in_order_and_whole() -> None:
    chance = random.Random(1)
    with ring_and_wakes() as (ring, filled, freed):
        reader = RingReader(ring.fd, filled, freed)
        kept = []
        process = start("write", ring, filled, freed, 7, MANY)
        with peer(process):
            for number in range(MANY):
                taken = reader.wait_take(WAIT_S)
                assert taken is not None and bytes(taken.view) == content(7, number), f"record {number}"
                kept.append(taken.slot)
                while len(kept) > 3 or (kept and chance.random() < 0.5):
                    reader.release(kept.pop(chance.randrange(len(kept))))
            for slot in kept:
                reader.release(slot)
        assert process.returncode == 0
        assert reader.take_nowait() is None
        check_whole(ring, 7, MANY)
        del taken
        reader.close()
