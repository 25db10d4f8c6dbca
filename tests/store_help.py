"""Facts, ended runs and a listening owner, for the tests of the store."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import apsw
import msgspec

from hexrt import values
from hexrt.core import Durability, RunState
from hexrt.events import Event, Finished, Started, Submitted
from hexrt.protocol.messages import AttemptRecord, RunSummary, RunTimeline, StepStatus
from hexrt.runtime.store import Store
from hexrt.runtime.store_database import NAME
from hexrt.runtime.store_records import EndedRun, decode_uses
from hexrt.workflow.model import StepSpec, Workflow


def run_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def submitted(run: bytes, payload: bytes = b"", uid: int = 1000) -> Submitted:
    workflow = Workflow(steps=(StepSpec(id="a", op="noop", inputs={"value": payload}),))
    return Submitted(run, uid, uid, Durability.SYNC, 5, 6, workflow)


def started(run: bytes, step: int = 0) -> Started:
    return Started(run, step, 0, 1, "pool:0", 7)


def finished(run: bytes, step: int = 0, output: object = None) -> Finished:
    return Finished(run, step, 0, 1, "pool:0", 7, 8, msgspec.Raw(values.encode(output)))


def ended(
    run: bytes, output: object = "out", uid: int = 1000, state: RunState = RunState.SUCCEEDED, wall_ns: int = 5
) -> EndedRun:
    steps = (StepStatus("a", "noop", "done", 1, 1, "pool:0"),)
    attempts = (AttemptRecord(0, 0, "", 1, "pool:0", 0, 1, 2, 3, 4, "done"),)
    timeline = RunTimeline(0, run, "workflow", state, 1, wall_ns, 9, (("a", "noop"),), (), attempts)
    summary = RunSummary(run, "workflow", uid, state, wall_ns, 0.5, 1, 1, Durability.SYNC)
    return EndedRun(summary, {"answer": msgspec.Raw(values.encode(output))}, {}, steps, timeline)


def plain(event: Event) -> object:
    """Something that compares by value: Raw does not."""
    return msgspec.to_builtins(event, builtin_types=(bytes,)) if not isinstance(event, Finished) else (
        event.run, event.step, event.part, event.attempt, event.device, event.start_ns, event.end_ns, bytes(event.output),
    )  # fmt: skip


def plains(events: Sequence[Event]) -> list[object]:
    return [plain(event) for event in events]


class Owner:
    """Opens a store as the daemon's loop would, and waits for what it is told."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.told: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self.acknowledged = 0
        self.failures: list[BaseException] = []
        self.store = Store(directory, self.told.put, self.told.put, _call, **options)  # type: ignore[arg-type]

    def wait(self, ticket: int) -> bool:
        """True once the ticket is durable, False once the store has failed."""
        while self.acknowledged < ticket and not self.failures:
            self._take(self.told.get(timeout=30))
        return self.acknowledged >= ticket

    def close(self) -> None:
        self.store.close()
        while not self.told.empty():
            self._take(self.told.get())

    def _take(self, news: int | BaseException) -> None:
        if isinstance(news, int):
            assert news > self.acknowledged, "a ticket was told twice or out of order"
            self.acknowledged = news
        else:
            self.failures.append(news)


def check_lingering(directory: Path) -> None:
    """Of a closed store: a run lingers if and only if it has its row, or had it, and some frame still holds facts of it."""
    with closing(apsw.Connection(str(directory / NAME))) as connection:
        lingering = {run for (run,) in connection.execute("SELECT run FROM lingering_runs")}
        held = {run for (uses,) in connection.execute("SELECT uses FROM frames") for run in decode_uses(uses)}
        ended_runs = {run for (run,) in connection.execute("SELECT run FROM runs")}
    assert lingering <= held, "a run lingers though no frame holds facts of it"
    assert held & ended_runs <= lingering, "a closed run would be taken for open"


def _call(callback: Callable[[object], None], what: object) -> None:
    callback(what)


def replayed(directory: Path) -> list[Event]:
    """The facts that a new store finds, and proof that it opens and closes clean."""
    owner = Owner(directory)
    events = list(owner.store.replay())
    owner.close()
    assert not owner.failures
    return events
