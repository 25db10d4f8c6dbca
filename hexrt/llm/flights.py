"""The chunks of one engine that are with the host: at most one that runs and one that is queued behind it.

Owns them and what of each sequence is counted as sent. Pure; called by `llm.batch` only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from hexrt.llm.chunk import row_of
from hexrt.llm.sequence import Flight, Share, State
from hexrt.protocol.host import Chunk

MOST = 2


class Flights:
    def __init__(self, model: str, token_budget: int) -> None:
        self._model = model
        self._token_budget = token_budget
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def has_place(self) -> bool:
        """Whether another chunk may be sent now: not while one is being recalled, since what is left to send is not known."""
        return len(self._flights) < MOST and not any(flight.recalled for flight in self._flights)

    def send(self, command: int, passes: int, shares: list[Share]) -> Chunk:
        """Counts a chunk as sent and writes its message."""
        rows = tuple(row_of(share) for share in shares)
        for share in shares:
            share.state.depart(share)
        self._flights.append(Flight(command, passes, shares))
        return Chunk(command, self._model, passes, rows)

    def recallable(self, live: Sequence[State]) -> Flight | None:
        """The queued chunk, where it names a sequence that is to stop, or where a prompt that no chunk carries yet would get a place in it."""
        if len(self._flights) < MOST or self._flights[1].recalled:
            return None
        queued = self._flights[1]
        if any(share.state.stopping for share in queued.shares):
            return queued
        late = [s.request.priority for s in live if not s.in_flight and s.unplanned]
        if not late:
            return None
        least = min((s.state.request.priority for s in queued.shares if s.prompt), default=0)
        return queued if queued.prompt_tokens < self._token_budget or least < max(late) else None

    def land(self, command: int) -> Flight | None:
        """Takes out a chunk that came back; None for one of another engine."""
        for flight in self._flights:
            if flight.command == command:
                self._flights.remove(flight)
                return flight
        return None

    def lose(self) -> None:
        """None of them comes back."""
        for flight in self._flights:
            for share in flight.shares:
                share.state.in_flight = 0
        self._flights.clear()
