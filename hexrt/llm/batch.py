"""Iteration-level batching: which sequences run in the next chunk, and which pages they hold.

Owns the state of one model on one device: the sequences, their pages (`llm.pages`) and the chunks that are with the host, at most
one running and one queued. The daemon calls it, carries `decide`'s messages to the host and hands the reports back in. Admission takes
all pages that a sequence can come to need, or none, so that an admitted sequence always ends; a more urgent one may have less urgent ones stopped
at the end of a chunk, which go on later from what is left of their pages. Batching at chunks follows Orca (Yu et al.,
OSDI 2022) and mixes prompt slices with decoding under a token budget as Sarathi-Serve does (Agrawal et al., OSDI 2024). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from hexrt.core import SequenceId
from hexrt.errors import ErrorRecord, InvariantViolation
from hexrt.llm.admission import LOOKAHEAD, PATIENCE, WAITS, Admission
from hexrt.llm.chunk import compose, count_passed_over
from hexrt.llm.flights import Flights
from hexrt.llm.holds import Holds
from hexrt.llm.outcome import Counters, Emitted, Ended, EngineStatistics, Outcome, Prefilled, Refused
from hexrt.llm.pages import SequencePages, Took
from hexrt.llm.progress import is_prefilled, progress
from hexrt.llm.sequence import Need, SequenceRequest, Share, Stage, State
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Page
from hexrt.protocol.host import BindPages, Cancel, Chunked, Release, ToHost, Token

__all__ = ["Emitted", "Ended", "Engine", "EngineStatistics", "Outcome", "Prefilled", "Refused", "SequenceRequest"]

UNENDED = frozenset({Stage.WAITING, Stage.LOADING, Stage.LIVE, Stage.PARKED})


class Engine:
    """The sequences of one model on one device."""

    def __init__(
        self, model: str, device: str, keeper: Keeper, page_bytes: int, page_tokens: int, context_tokens: int,
        token_budget: int, passes: int,
    ) -> None:  # fmt: skip
        if token_budget < 1 or passes < 1:
            raise InvariantViolation(f"an engine of {token_budget} tokens and {passes} passes a chunk")
        self.model = model
        self.context_tokens = context_tokens
        self.token_budget = token_budget
        self.passes = passes
        self.pages = SequencePages(keeper, keeper.page_class(device, page_bytes), device, page_tokens, self._arrived)
        self._admission = Admission(self.pages)
        self._sequences: dict[Hashable, State] = {}
        self._leaving: set[State] = set()  # ended or cancelled, yet named by a chunk on its way
        self._holds = Holds(self.pages)
        self._flights = Flights(model, token_budget)
        self._outbox: list[ToHost] = []
        self._counters = Counters()
        self._numbers = 0
        self._admission_due = False
        self._now_ns = 0

    # --- what the daemon asks for -----------------------------------------------------------------------------------

    def add(self, request: SequenceRequest, now_ns: int) -> None:
        """Queues a request. Raises BadRequest or OutOfMemory, with nothing changed, where it can never run here."""
        if request.key in self._sequences:
            raise InvariantViolation(f"the sequence {request.key!r} was added twice")
        limit, pages = self._admission.size(request, self.model, self.context_tokens)
        self._numbers += 1
        self._sequences[request.key] = State(request, SequenceId(self._numbers), limit, pages, now_ns)
        self._admission_due = True

    def cancel(self, key: Hashable) -> None:
        """Gives up a sequence in whatever state; unknown keys are ignored. Its frames are free after the last chunk that names it."""
        state = self._sequences.get(key)
        if state is not None:
            self._end(state, retain=False)

    def is_leaving(self, key: Hashable) -> bool:
        """Whether a chunk on its way still names a sequence of this key that has ended or was cancelled."""
        return any(state.request.key == key for state in self._leaving)

    def release(self, key: Hashable) -> None:
        """Nobody will continue this sequence any more; unknown keys are ignored."""
        state = self._sequences.get(key)
        if state is None:
            return
        state.retain = False
        if state.stage is Stage.RETAINED:
            self._forget(state)

    def preempt(self, key: Hashable) -> None:
        """Stops a live sequence at the end of the chunk that names it; it goes on by itself when it gets its pages again. Others are left as they are."""
        state = self._sequences.get(key)
        if state is not None and state.stage is Stage.LIVE:
            self._stop(state)

    def device_lost(self) -> list[Hashable]:
        """Forgets all but retained sequences whose pages lie elsewhere too; the keeper knows of the loss already.

        Returns the keys of the sequences that had not ended, to be added again with what they `answered`.
        """
        lost = [s.request.key for s in self._sequences.values() if s.stage in UNENDED]
        self._flights.lose()
        for state in [*self._sequences.values(), *self._leaving]:
            if state.stage is Stage.ENDED:
                self._settle(state)
            elif state.stage is not Stage.RETAINED:
                self._forget(state)
        self._trim()
        self._outbox.clear()
        self._admission_due = False
        return lost

    # --- what is sent -----------------------------------------------------------------------------------------------

    def decide(self, now_ns: int, next_command: Callable[[], int]) -> list[ToHost]:
        """Messages for the host, to be sent in this order; none where both places are taken or nothing is to do."""
        self._now_ns = now_ns
        self._admission_due |= self._holds.expire(now_ns)
        messages, self._outbox = self._outbox, []
        if self._admission_due:
            self._admission_due = False
            self._admit(messages)
        live = self._live()
        if (queued := self._flights.recallable(live)) is not None:
            queued.recalled = True
            messages.append(Cancel(queued.command))
        while self._flights.has_place:
            shares, passes = compose(live, self.token_budget, self.passes)
            if not shares:
                break
            count_passed_over(live, shares)
            messages.append(self._flights.send(next_command(), passes, shares))
            self._counters.chunks += 1
        return messages

    def _live(self) -> list[State]:
        """Those that chunks may name: the most urgent first, else in order of admission; nobody is passed over for ever."""
        live = [s for s in self._sequences.values() if s.stage is Stage.LIVE and not s.stopping]
        live.sort(key=lambda s: (s.passed_over < PATIENCE, -s.request.priority))
        return live

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, messages: list[ToHost]) -> None:
        waiting = self._admission.order(self._sequences.values())
        refused = 0
        for state in waiting:
            if self._admission.awaits(state):
                continue
            took = self._take(state)
            if took is not Took.NOTHING:
                del self._sequences[state.request.key]  # goes to the end: live sequences stand in order of admission
                self._sequences[state.request.key] = state
                state.stage = Stage.LOADING
                if took is Took.PAGES:
                    messages.append(self._begin(state))
                for other in waiting:
                    other.overtaken += other.number < state.number and other.stage in WAITS
            else:
                refused += 1
                for other in self._admission.stopped_for(state, self._sequences.values()):
                    self._stop(other)
                if (
                    state.overtaken >= PATIENCE
                    or refused > LOOKAHEAD
                    or self._admission.is_making_way(state, self._sequences.values())
                ):
                    return

    def _take(self, state: State) -> Took:
        """Takes all pages of a sequence, those that it shares first."""
        parent = self._sequences.get(state.request.parent) if state.request.parent is not None else None
        if parent is not None and parent.stage not in (Stage.ENDED, Stage.RETAINED):
            parent = None
        if parent is not None and parent.stage is Stage.RETAINED:
            self.pages.touch(parent)
        took = self.pages.take(state, parent)
        if took is not Took.NOTHING and parent is not None:
            self._holds.end(parent)
        if self.pages.discarded():
            self._trim()
        return took

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _stop(self, state: State) -> None:
        if not state.stopping:
            state.stopping = True
            self._settle(state)

    def _park(self, state: State) -> None:
        """No chunk names the sequence any more: what it has computed may move, or go."""
        self._outbox.append(Release(self.model, state.number))
        self._admission.settle(state)
        self.pages.let_go(state)
        state.stage, state.stopping = Stage.PARKED, False
        self._counters.preemptions += 1
        self._admission_due = True

    def _begin(self, state: State) -> BindPages:
        """All pages of the sequence can be used: the next chunk may name it."""
        state.stage = Stage.LIVE
        self._admission.promise(state)
        self._counters.shared_tokens += state.planned
        return BindPages(
            self.model, state.number, 0, self.pages.frames(state.number), self.pages.tables.version(state.number)
        )

    def _arrived(self, state: State, good: bool) -> None:
        """What the sequence waited for is there; or is not, then it asks anew, and what was lost is computed."""
        if good:
            self._outbox.append(self._begin(state))
        else:
            self.pages.give_back(state)
            state.stage = Stage.WAITING
            state.begin_again(0)
            self._admission_due = True

    def _trim(self) -> None:
        """Cuts parked and retained sequences whose pages were given up."""
        for state in [s for s in self._sequences.values() if s.stage in (Stage.PARKED, Stage.RETAINED)]:
            if not self.pages.trim(state) and state.stage is Stage.RETAINED:
                self._counters.dropped_sequences += 1
                self._forget(state)

    def will_be_read(self, key: Hashable, need: Need) -> None:
        """A sequence that has ended is gone on from; unknown keys are ignored."""
        state = self._sequences.get(key)
        if state is not None and state.stage in (Stage.ENDED, Stage.RETAINED):
            state.need = need
            if state.stage is Stage.RETAINED:
                self._holds.settle(state, self._now_ns, self._others_wait)

    @property
    def _others_wait(self) -> bool:
        return any(s.stage in WAITS for s in self._sequences.values())

    def holds_until_ns(self) -> int:
        """When `decide` is to be called at the latest, to end a hold; 0 where there is none."""
        return self._holds.until_ns()

    def frames_freed(self) -> None:
        """Sequences that wait for room, or for pages, may try again."""
        self._admission_due = True

    # --- what comes back --------------------------------------------------------------------------------------------

    def chunked(self, report: Chunked, now_ns: int) -> list[Outcome]:
        """Takes in a chunk's report; returns what happened to its sequences, in order. A report on another engine's chunk is ignored."""
        flight = self._flights.land(report.command)
        if flight is None:
            return []
        self._now_ns = now_ns
        gained = {token.sequence: token for token in report.tokens}
        outcomes: list[Outcome] = []
        for share in flight.shares:
            state = share.state
            state.in_flight -= 1
            if state.stage is Stage.LIVE:
                outcomes += self._progress(share, gained.get(state.number), report)
            self._settle(state)
        return outcomes

    def chunk_failed(self, command: int, error: ErrorRecord) -> list[Outcome]:
        """The host refused or lost a whole chunk: one that was recalled is planned anew, of any other each sequence fails."""
        flight = self._flights.land(command)
        if flight is None:
            return []
        recalled = flight.recalled and error.kind == "cancelled"
        self._counters.recalled_chunks += recalled
        outcomes: list[Outcome] = []
        for share in flight.shares:
            state = share.state
            if recalled:
                state.come_back(share)
            else:
                state.in_flight -= 1
            if state.stage is Stage.LIVE and not recalled:
                outcomes.append(Refused(state.request.key, error))
                self._end(state, retain=False)
            self._settle(state)
        return outcomes

    def _progress(self, share: Share, token: Token | None, report: Chunked) -> list[Outcome]:
        state = share.state
        outcomes = progress(share, token, report)
        self._counters.prompt_tokens += share.prompt
        self._counters.answer_tokens += sum(len(o.ids) for o in outcomes if isinstance(o, Emitted))
        last = outcomes[-1] if outcomes else None
        if not isinstance(last, Refused):
            self._publish(state)
        if isinstance(last, Refused | Ended) or is_prefilled(state):
            self._end(state, state.retain and not isinstance(last, Refused))
        return outcomes

    def _publish(self, state: State) -> None:
        before = state.published
        if self.pages.publish(state):
            self._admission.published(state, before)
            self._admission_due = True

    # --- the end of a sequence --------------------------------------------------------------------------------------

    def _end(self, state: State, retain: bool) -> None:
        """No chunk will name the sequence any more; what it holds stays until those on their way are back."""
        if state.stage is Stage.LIVE:
            self._outbox.append(Release(self.model, state.number))
            self._admission.settle(state)
        state.stage, state.retain = Stage.ENDED, retain
        if not retain:
            del self._sequences[state.request.key]
            self._leaving.add(state)
        self._settle(state)

    def _settle(self, state: State) -> None:
        """Gives back what a sequence that has ended or is to stop does not need, once no chunk names it."""
        if state.in_flight:
            return
        if state.stage is Stage.LIVE and state.stopping:
            self._park(state)
        if state.stage is not Stage.ENDED:
            return
        if state.retain:
            self.pages.let_go(state)
            state.stage = Stage.RETAINED
            self._holds.settle(state, self._now_ns, self._others_wait)
            self._admission_due = True
        else:
            self._forget(state)

    def _forget(self, state: State) -> None:
        if self._sequences.get(state.request.key) is state:
            del self._sequences[state.request.key]
        self._leaving.discard(state)
        self._holds.end(state)
        self._admission.settle(state)
        self.pages.give_back(state)
        state.stage = Stage.GONE
        self._admission_due = True

    # --- looking in -------------------------------------------------------------------------------------------------

    def holders(self, key: Hashable) -> tuple[int, list[tuple[Hashable, int]]] | None:
        """How many pages a sequence waits for, and who holds the most of them; None for one that does not wait."""
        state = self._sequences.get(key)
        if state is None or state.stage not in WAITS:
            return None
        held = [(s.request.key, s.pages) for s in self._sequences.values() if s.stage in (Stage.LIVE, Stage.LOADING)]
        return state.pages, sorted(held, key=lambda entry: -entry[1])

    def bring_ns(self, key: Hashable) -> int | None:
        """What it takes to bring up what a sequence that may be gone on from holds; None where it holds nothing."""
        state = self._sequences.get(key)
        if state is None or state.stage not in (Stage.ENDED, Stage.RETAINED):
            return None
        keeper = self.pages.keeper
        absent = [
            p
            for p in self.pages.tables.table(state.number)
            if not keeper.pool.is_lost(p) and keeper.prices.below_top(p)
        ]
        return keeper.prices.load_ns(absent) if absent else 0

    def holdings(self) -> list[tuple[Hashable, Sequence[Page]]]:
        """The pages of each sequence that has any, those that it shares with others included."""
        tables = self.pages.tables
        return [(s.request.key, tables.table(s.number)) for s in self._sequences.values() if s.number in tables]

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is on its way; retained sequences may be there."""
        stages = {s.stage for s in self._sequences.values()}
        return not self._flights and not self._outbox and stages <= {Stage.RETAINED}

    def statistics(self) -> EngineStatistics:
        stages = [s.stage for s in self._sequences.values()]
        pages, counters = self.pages, self._counters
        return EngineStatistics(
            stages.count(Stage.WAITING), stages.count(Stage.LOADING), stages.count(Stage.LIVE), stages.count(Stage.PARKED),
            stages.count(Stage.RETAINED), stages.count(Stage.ENDED) + len(self._leaving), pages.capacity, pages.pool.room(pages.cls), len(pages.prefixes),
            counters.prompt_tokens, counters.shared_tokens, counters.answer_tokens, counters.chunks,
            counters.recalled_chunks, counters.dropped_sequences, counters.preemptions, self._holds.count,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless tables, sequences and chunks agree."""
        self.pages.keeper.check_integrity()
        self.pages.tables.check_integrity()
        states = [*self._sequences.values(), *self._leaving]
        holders = {s.number for s in states if s.stage is not Stage.WAITING}
        if self.pages.tables.sequences() != holders:
            raise InvariantViolation(f"page tables of {self.pages.tables.sequences()}, sequences {holders}")
        named = [share.state for flight in self._flights for share in flight.shares]
        for state in states:
            if named.count(state) != state.in_flight:
                raise InvariantViolation(
                    f"sequence {state.number} is in {named.count(state)} chunks, not {state.in_flight}"
                )
