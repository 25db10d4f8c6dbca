"""The other process of the ring's tests: `python -m tests.ring_peers ROLE RING FILLED FREED SEED COUNT KILL_AT`.

Records are numbered from 0; size and bytes follow from seed and number. With KILL_AT > 0 the process kills itself before that step, a
step being one store to the ring's words, one half of a record's bytes, or one wake-up.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from hexrt.memory.ring import ReadSlot, Ring, RingReader, RingWriter

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 30.0


def content(seed: int, number: int) -> bytes:
    chance = random.Random(seed << 32 | number)
    return chance.randbytes(chance.choice((1, 64, chance.randrange(4096), chance.randrange(20_000))))


class Steps:
    """The words of a ring, as a process sees them that ends before a given step."""

    def __init__(self, words: memoryview, kill_at: int) -> None:
        self.words = words
        self.left = kill_at

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, word: int) -> None:
        self.step()
        self.words[index] = word

    def release(self) -> None:
        self.words.release()


class MortalWriter(RingWriter):
    def __init__(self, memory: int, filled_fd: int, freed_fd: int, kill_at: int) -> None:
        super().__init__(memory, filled_fd, freed_fd)
        self.steps = self._words = Steps(self._words, kill_at)  # type: ignore[assignment]

    def _wake(self, fd: int) -> None:
        self.steps.step()
        super()._wake(fd)


class MortalReader(RingReader):
    def __init__(self, memory: int, filled_fd: int, freed_fd: int, kill_at: int) -> None:
        super().__init__(memory, filled_fd, freed_fd)
        self.steps = self._words = Steps(self._words, kill_at)  # type: ignore[assignment]

    def _wake(self, fd: int) -> None:
        self.steps.step()
        super()._wake(fd)


def write(ring: int, filled: int, freed: int, seed: int, count: int, kill_at: int) -> None:
    writer = MortalWriter(ring, filled, freed, kill_at)
    for number in range(count):
        data = content(seed, number)
        half = len(data) // 2
        slot = writer.wait_reserve(len(data), WAIT_S)
        if number % 7 == 3:
            writer.abort(slot)
            slot = writer.wait_reserve(len(data), WAIT_S)
        writer.steps.step()
        slot.view[:half] = data[:half]
        writer.steps.step()
        slot.view[half:] = data[half:]
        writer.commit(slot)


def read(ring: int, filled: int, freed: int, seed: int, count: int, kill_at: int) -> None:
    """Keeps up to two records while it takes the next, and gives them back in any order."""
    reader = MortalReader(ring, filled, freed, kill_at)
    chance = random.Random(seed)
    kept: list[ReadSlot] = []
    for number in range(count):
        taken = reader.wait_take(WAIT_S)
        assert taken is not None and bytes(taken.view) == content(seed, number), f"record {number} is torn"
        kept.append(taken)
        while len(kept) > 2 or (kept and chance.random() < 0.5):
            reader.release(kept.pop(chance.randrange(len(kept))).slot)
    for slot in kept:
        reader.release(slot.slot)


def start(
    role: str, ring: Ring, filled: int, freed: int, seed: int, count: int, kill_at: int = 0
) -> subprocess.Popen[str]:
    fds = ring.fd, filled, freed
    command = [sys.executable, "-m", "tests.ring_peers", role, *map(str, (*fds, seed, count, kill_at))]
    return subprocess.Popen(command, pass_fds=fds, cwd=ROOT, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*map(int, sys.argv[2:]))
