"""kill -9 at any moment: whatever the process had been told to be durable is there when the store is opened again."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import pytest

from hexrt.events import Event
from hexrt.runtime.store import Store
from hexrt.runtime.store_records import LARGE_BYTES, EndedRun
from hexrt.runtime.store_writer import Wait
from tests.seeds import seeds
from tests.store_help import check_lingering, ended, finished, plains, replayed, run_id, submitted

LONG = run_id(0)


def script() -> Iterator[Event | EndedRun]:
    """What the process hands in, the same each time."""
    yield submitted(LONG)
    number = 0
    while True:
        number += 1
        run = run_id(number)
        size = LARGE_BYTES + number if number % 10 == 0 else number % 2_000
        yield submitted(run)
        yield finished(run, 0, bytes(size))
        yield finished(LONG, number)
        if number % 3:
            yield ended(run, bytes(size))


def is_urgent(number: int) -> bool:
    return number % 7 == 0


def ticketed() -> Iterator[Event | EndedRun]:
    """The nth has ticket n, counted from 1; runs that are closed later have none."""
    for number, item in enumerate(script()):
        if not isinstance(item, EndedRun) or is_urgent(number):
            yield item


def main(directory: Path) -> None:
    told: SimpleQueue[int] = SimpleQueue()

    def tell(ticket: int) -> None:
        print(ticket, flush=True)
        told.put(ticket)

    store = Store(directory, tell, print, lambda callback, what: callback(what), lag_s=0.001)
    ticket = durable = 0
    for number, item in enumerate(script()):
        if not isinstance(item, EndedRun):
            ticket = store.append([item], Wait.NOT if is_urgent(number) else Wait.LAG)
        elif is_urgent(number):
            ticket = store.close_run(item)
        else:
            store.close_run_later(item)
        while number % 50 == 0 and durable < ticket:
            durable = told.get()


@pytest.mark.parametrize("seed", seeds(10, 500))
def test_whatever_was_told_durable_survives_the_kill(tmp_path: Path, seed: int) -> None:
    program = f"from pathlib import Path; from tests.test_store_kill import main; main(Path({str(tmp_path)!r}))"
    root = Path(__file__).parents[1]
    told = 0
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        for _ in range(random.Random(seed).randrange(1, 60)):
            told = int(process.stdout.readline())
        process.kill()
        told = max([told, *map(int, process.stdout.read().split("\n")[:-1])])
    items = list(islice(ticketed(), told))
    gone = {item.summary.run for item in items if isinstance(item, EndedRun)}
    expected = [item for item in items if not isinstance(item, EndedRun) and item.run not in gone]  # type: ignore[union-attr]
    check(tmp_path, gone, expected)


def check(directory: Path, gone: set[bytes], expected: list[Event]) -> None:
    store = Store(directory, lambda ticket: None, lambda error: None, lambda callback, what: callback(what))
    found = list(store.replay())
    rows = {summary.run for summary in store.list_runs(None, None, 100_000)}
    assert store.damaged == [] and rows >= gone
    ordered = plains([event for event in expected if event.run not in rows])  # type: ignore[union-attr]
    assert plains(found)[: len(ordered)] == ordered
    store.close()
    check_lingering(directory)
    assert plains(replayed(directory)) == plains(found)
