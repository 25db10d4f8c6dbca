"""The one owner of run state: takes events in, applies them, lets the brain decide, records what must last, carries the rest out.

Owns the mailbox and the order of things: in a turn facts are applied, then decided upon, then recorded; what must not be seen or begun
before it is on disk waits for the store's commit. Runs on the loop's thread; a turn never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from hexrt.brain.decide import Brain, Commands
from hexrt.clock import Clock
from hexrt.core import Durability
from hexrt.events import DURABLE, Event, Finished, Recovered, Started, Submitted
from hexrt.runtime.answers import ended_of
from hexrt.runtime.entities import Change, Run
from hexrt.runtime.fleet import Fleet
from hexrt.runtime.recount import Recount
from hexrt.runtime.state import RunTable
from hexrt.runtime.store import Store
from hexrt.runtime.store_writer import Wait
from hexrt.runtime.tensors import Tensors

log = logging.getLogger(__name__)
KEPT = frozenset(DURABLE)
CLOSE_S = 0.02
"""Ended runs are closed together, behind their replies."""
SHARE_S = 0.001
"""A run that takes no longer than this from its submission to its end has one commit in all."""
TURNS = 1000
"""Rounds of deciding in one turn before that is taken for a bug: each round's events come of the round before."""


class Owner:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: RunTable,
        brain: Brain,
        store: Store,
        clock: Clock,
        tensors: Tensors,
        on_changes: Callable[[list[Change]], None],
        on_ended: Callable[[Run], None],
        on_closed: Callable[[Run], None],
    ) -> None:
        """`on_ended` is called when a run's end may be shown, `on_closed` when the run's state is needed no more."""
        self._loop = loop
        self._table = table
        self._brain = brain
        self._store = store
        self._clock = clock
        self._tensors = tensors
        self._on_changes = on_changes
        self._on_ended = on_ended
        self._on_closed = on_closed
        self._mailbox: list[Event] = []
        self._ended: list[Run] = []  # and shown, but not closed
        self._due = False
        self._gated: deque[tuple[int, Callable[[], None]]] = deque()
        self.fleet: Fleet | None = None
        self.recount: Recount | None = None
        self.when_still: Callable[[], None] | None = None  # called once when nothing is in flight
        self.turns = 0
        brain.staging.when_freed(self.wake)  # which may be when a turn has decided

    def post(self, event: Event) -> None:
        """The event is applied in the next turn, which comes by itself."""
        self._mailbox.append(event)
        if not self._due:
            self._due = True
            self._loop.call_soon(self.turn_if_due)

    def wake(self) -> None:
        """Makes a turn happen without an event."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.turn_if_due)

    def is_due(self) -> bool:
        """Whether a turn is to come."""
        return self._due or bool(self._mailbox)

    def turn_if_due(self) -> None:
        """Takes the turn that is due now, rather than in the loop's next round."""
        if self._due:
            self.turn()

    def take(self, event: Event) -> None:
        """Applies an event, and whatever was posted before it, now."""
        self._mailbox.append(event)
        self.turn()

    def after(self, ticket: int, act: Callable[[], None]) -> None:
        """Calls `act` once `ticket` is on disk: now, if it is. Tickets must not fall between calls."""
        if ticket <= self._store.committed:
            act()
        else:
            self._gated.append((ticket, act))

    def committed(self, ticket: int) -> None:
        """The store has everything up to `ticket` on disk."""
        gated = self._gated
        while gated and gated[0][0] <= ticket:
            gated.popleft()[1]()

    def turn(self) -> None:
        self._due = False
        self.turns += 1
        table, now_ns = self._table, self._clock.now_ns()
        kept: list[Event] = []
        events, self._mailbox = self._mailbox, []
        for _ in range(TURNS):
            for event in events:
                self._apply(event, kept)
            commands = self._brain.decide(now_ns)
            for _, _, started, _ in commands.gated:
                self._apply(started, kept)
            self._carry_out(commands, kept, now_ns)
            kept = []
            events = commands.events
            if not events:
                break
        else:
            raise AssertionError(f"a turn does not end: {events[:3]}")
        ended, table.ended = table.ended, []
        for run in ended:
            self._brain.engines.run_ended(run.id)
        self._tell()
        if self._tensors.settle():
            self.wake()
        for run in ended:
            self.after(self.gate_of(run), lambda r=run: self._end(r))  # type: ignore[misc]
        if self.when_still is not None and not any(run.in_flight for run in table.runs.values()):
            act, self.when_still = self.when_still, None
            act()
        if self.recount is not None:
            self.recount.after_turn()

    def _apply(self, event: Event, kept: list[Event]) -> None:
        self._table.apply(event)
        if type(event) not in KEPT:
            return
        if isinstance(event, Recovered):
            kept.append(event)
            return
        run = self._table.runs.get(event.run)  # type: ignore[union-attr]  # KEPT says so
        if run is not None and run.durability is not Durability.NONE:
            if type(event) is Finished and run.tensors:
                kept.append(msgspec.structs.replace(event, output=self._tensors.inline(run, event.output)))
            elif type(event) is not Started or not run.steps[event.step].node.idempotent:
                kept.append(event)

    def _carry_out(self, commands: Commands, kept: list[Event], now_ns: int) -> None:
        fleet = self.fleet
        assert fleet is not None
        if kept:
            self._record(kept)
        for device, places in commands.places.items():
            fleet.map(device, places)
        for device, messages in commands.send.items():
            fleet.send(device, messages)
        for device, message, _, run in commands.gated:
            if run.durability is Durability.NONE:
                fleet.send(device, [message])
            else:
                self.after(run.ticket, lambda d=device, m=message: self._send_gated(d, m))  # type: ignore[misc]
        for task in commands.stop:
            fleet.stop(task)
        fleet.start_wanted()

    def _send_gated(self, device: str, message: tuple[object, ...]) -> None:
        """Sends a launch whose Started is on disk now, unless the device has had another life meanwhile."""
        fleet, view = self.fleet, self._brain.devices[device]
        task = view.window.get(message[1])  # type: ignore[call-overload]
        if fleet is not None and task is not None and task.run.id == message[5] and task.attempt == message[2]:
            fleet.begin(device, message, task)

    def _record(self, kept: list[Event]) -> None:
        """Hands facts to the store; each run remembers the ticket of its newest."""
        of = [self._table.runs.get(getattr(event, "run", b"")) for event in kept]
        awaited = {
            type(event)
            for event, run in zip(kept, of, strict=True)
            if run is not None and (run.durability is Durability.SYNC or type(event) is Started)
        }
        wait = Wait.LAG if not awaited else Wait.HELD if awaited == {Submitted} else Wait.NOT
        graphs = sum(
            run.graph.recorded_bytes
            for event, run in zip(kept, of, strict=True)
            if type(event) is Submitted and run is not None and run.graph is not None
        )
        ticket = self._store.append(kept, wait, graphs)
        if wait is Wait.HELD:
            self._loop.call_later(SHARE_S, self._store.hasten, ticket)
        for run in of:
            if run is not None:
                run.ticket = ticket

    def gate_of(self, run: Run) -> int:
        """The ticket that must be on disk before what is known of a run may be shown."""
        return run.ticket if run.durability is Durability.SYNC else 0

    def _tell(self) -> None:
        changes = self._table.changes
        if not changes:
            return
        self._table.changes = []
        now: list[Change] = []
        later: dict[int, list[Change]] = {}
        for change in changes:
            gate = self.gate_of(change.run)
            if gate > self._store.committed:
                later.setdefault(gate, []).append(change)
            else:
                now.append(change)
        if now:
            self._on_changes(now)
        for gate in sorted(later):
            self.after(gate, lambda c=later[gate]: self._on_changes(c))  # type: ignore[misc]

    def _end(self, run: Run) -> None:
        self._on_ended(run)
        self._ended.append(run)
        holding = self._table.holding
        if holding.held_bytes > holding.max_held_bytes:  # what is closed may be let go of
            self._loop.call_soon(self.close_ended)
        elif len(self._ended) == 1:
            self._loop.call_later(CLOSE_S, self.close_ended)

    def close_ended(self) -> None:
        """Puts rows in the place of the facts of ended runs. Nothing waits for it: the facts are enough to end a run again."""
        ended, self._ended = self._ended, []
        for run in ended:
            if run.durability is not Durability.NONE:
                self._store.close_run_later(ended_of(run, self._tensors.inliner()))
            self._on_closed(run)
        if self._tensors.relieve():
            self.wake()
