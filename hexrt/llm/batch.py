"""Iteration-level batching: which sequences run in the next chunk, and which pages they hold.

Owns the state of one model on one device: the sequences, their pages (`llm.pages`) and the chunks that are with the host, at most
one running and one queued. The daemon calls it, carries `decide`'s messages to the host and hands the reports back in. Admission takes
all pages that a sequence can come to need, or none, so that an admitted sequence always ends. Batching at chunks follows Orca (Yu et al.,
OSDI 2022) and mixes prompt slices with decoding under a token budget as Sarathi-Serve does (Agrawal et al., OSDI 2024). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from hexrt.core import SequenceId
from hexrt.errors import BadRequest, ErrorRecord, InvariantViolation, OutOfMemory
from hexrt.llm.chunk import compose, row_of
from hexrt.llm.outcome import Emitted, Ended, EngineStatistics, Outcome, Prefilled, Refused
from hexrt.llm.pages import SequencePages, Took
from hexrt.llm.sequence import Flight, SequenceRequest, Share, Stage, State
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Page
from hexrt.protocol.host import BindPages, Cancel, Chunk, Chunked, Release, ToHost, Token

__all__ = ["Emitted", "Ended", "Engine", "EngineStatistics", "Outcome", "Prefilled", "Refused", "SequenceRequest"]

PATIENCE = 16
"""How often later requests may be admitted before a waiting one; then nobody passes it any more."""
LOOKAHEAD = 16
"""How many waiting requests that do not fit are looked past at a time."""
ERROR = "error: "


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    shared_tokens: int = 0
    answer_tokens: int = 0
    chunks: int = 0
    recalled_chunks: int = 0
    dropped_sequences: int = 0


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
        self._sequences: dict[Hashable, State] = {}
        self._leaving: set[State] = set()  # ended or cancelled, yet named by a chunk on its way
        self._flights: deque[Flight] = deque()
        self._outbox: list[ToHost] = []
        self._counters = _Counters()
        self._numbers = 0
        self._admission_due = False

    # --- what the daemon asks for -----------------------------------------------------------------------------------

    def add(self, request: SequenceRequest, now_ns: int) -> None:
        """Queues a request. Raises BadRequest or OutOfMemory, with nothing changed, where it can never run here."""
        if request.key in self._sequences:
            raise InvariantViolation(f"the sequence {request.key!r} was added twice")
        prompt = len(request.ids)
        if not prompt:
            raise BadRequest("the prompt is empty", "prompt")
        if prompt >= self.context_tokens:
            raise BadRequest(
                f"the prompt has {prompt} tokens; with an answer it must fit the {self.context_tokens} of "
                f"{self.model!r}: shorten it to at most {self.context_tokens - 1}",
                "prompt",
            )
        limit = min(request.sampling.max_tokens, self.context_tokens - prompt) if request.sampling else 0
        pages = self.pages.pages_of(prompt + max(limit, len(request.answered)))
        if pages > self.pages.capacity:
            raise OutOfMemory(
                f"prompt and answer need {pages} pages of {self.pages.page_tokens} tokens, and the device has "
                f"{self.pages.capacity}: lower max_tokens or shorten the prompt",
                "max_tokens",
            )
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

    def device_lost(self) -> list[Hashable]:
        """Forgets all but retained sequences whose pages lie elsewhere too; the keeper knows of the loss already.

        Returns the keys of the sequences that had not ended, to be added again with what they `answered`.
        """
        lost = [
            s.request.key for s in self._sequences.values() if s.stage in (Stage.WAITING, Stage.LOADING, Stage.LIVE)
        ]
        for flight in self._flights:
            for share in flight.shares:
                share.state.in_flight = 0
        self._flights.clear()
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
        messages, self._outbox = self._outbox, []
        if self._admission_due:
            self._admission_due = False
            self._admit(messages)
        if (queued := self._recallable()) is not None:
            queued.recalled = True
            messages.append(Cancel(queued.command))
        while len(self._flights) < 2 and not any(flight.recalled for flight in self._flights):
            shares, passes = compose(self._live(), self.token_budget, self.passes)
            if not shares:
                break
            messages.append(self._depart(Flight(next_command(), passes, shares)))
        return messages

    def _live(self) -> Iterator[State]:
        return (s for s in self._sequences.values() if s.stage is Stage.LIVE)

    def _recallable(self) -> Flight | None:
        """The queued chunk, where a prompt that no chunk carries yet would fit into its place."""
        if len(self._flights) < 2 or self._flights[1].recalled:
            return None
        queued = self._flights[1]
        late = any(not s.in_flight and s.unplanned for s in self._live())
        return queued if late and queued.prompt_tokens < self.token_budget else None

    def _depart(self, flight: Flight) -> Chunk:
        """Counts the chunk as sent and writes its message."""
        rows = tuple(row_of(share) for share in flight.shares)
        for share in flight.shares:
            share.state.depart(share)
        self._flights.append(flight)
        self._counters.chunks += 1
        return Chunk(flight.command, self.model, flight.passes, rows)

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, messages: list[ToHost]) -> None:
        waiting = [s for s in self._sequences.values() if s.stage is Stage.WAITING]
        waiting.sort(key=lambda s: (s.overtaken < PATIENCE, -s.request.priority, s.number))
        refused = 0
        for state in waiting:
            took = self._take(state)
            if took is not Took.NOTHING:
                del self._sequences[state.request.key]  # goes to the end: live sequences stand in order of admission
                self._sequences[state.request.key] = state
                state.stage = Stage.LOADING
                if took is Took.PAGES:
                    messages.append(self._begin(state))
                for other in waiting:
                    other.overtaken += other.stage is Stage.WAITING and other.number < state.number
            else:
                refused += 1
                if state.overtaken >= PATIENCE or refused > LOOKAHEAD:
                    return

    def _take(self, state: State) -> Took:
        """Takes all pages of a sequence, those that its parent shares first."""
        parent = self._sequences.get(state.request.parent) if state.request.parent is not None else None
        if parent is not None and parent.stage not in (Stage.ENDED, Stage.RETAINED):
            parent = None
        if parent is not None and parent.stage is Stage.RETAINED:
            self.pages.touch(parent)
        took = self.pages.take(state, parent)
        if self.pages.discarded():
            self._trim()
        return took

    def _begin(self, state: State) -> BindPages:
        """All pages of the sequence can be used: the next chunk may name it."""
        state.stage = Stage.LIVE
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
            state.planned = state.computed = 0
            self._admission_due = True

    def _trim(self) -> None:
        """Cuts retained sequences whose pages were given up."""
        for state in [s for s in self._sequences.values() if s.stage is Stage.RETAINED]:
            if not self.pages.trim(state):
                self._counters.dropped_sequences += 1
                self._forget(state)

    def will_be_read(self, key: Hashable, steps: int) -> None:
        """So many steps from now a retained sequence is gone on from; unknown keys are ignored."""
        state = self._sequences.get(key)
        if state is not None and state.stage is Stage.RETAINED:
            self.pages.will_be_read(state, steps)

    def frames_freed(self) -> None:
        """Sequences that wait for room, or for pages, may try again."""
        self._admission_due = True

    # --- what comes back --------------------------------------------------------------------------------------------

    def chunked(self, report: Chunked, now_ns: int) -> list[Outcome]:
        """Takes in a chunk's report; returns what happened to its sequences, in order. A report on another engine's chunk is ignored."""
        flight = self._land(report.command)
        if flight is None:
            return []
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
        flight = self._land(command)
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

    def _land(self, command: int) -> Flight | None:
        for flight in self._flights:
            if flight.command == command:
                self._flights.remove(flight)
                return flight
        return None

    def _progress(self, share: Share, token: Token | None, report: Chunked) -> Iterator[Outcome]:
        state, key = share.state, share.state.request.key
        state.prefill_start_ns = state.prefill_start_ns or report.start_ns
        state.computed += share.prompt
        self._counters.prompt_tokens += share.prompt
        ids, text, finish = (token.ids, token.text, token.finish) if token is not None else ((), "", "")
        if not finish and len(ids) != share.gain:
            finish = f"{ERROR}the host gave {len(ids)} tokens where {share.gain} were due"
        if finish.startswith(ERROR):
            yield Refused(key, ErrorRecord("task_failed", finish[len(ERROR) :]))
            self._end(state, retain=False)
            return
        if not state.prefill_end_ns and (finish or state.computed == len(state.material)):
            state.prefill_end_ns = report.end_ns
            yield Prefilled(key, state.prefill_start_ns, report.end_ns, state.pages_loaded)
        if ids or text:
            yield Emitted(key, len(state.answer), ids, text)
            state.answer += ids
            state.texts.append(text)
            self._counters.answer_tokens += len(ids)
        if finish:
            answer = tuple(state.answer)
            yield Ended(key, finish, answer, "".join(state.texts), state.prefill_end_ns, report.end_ns)
        if finish or (state.prefill_end_ns and state.request.sampling is None):
            self._end(state, state.retain)

    # --- the end of a sequence --------------------------------------------------------------------------------------

    def _end(self, state: State, retain: bool) -> None:
        """No chunk will name the sequence any more; what it holds stays until those on their way are back."""
        if state.stage is Stage.LIVE:
            self._outbox.append(Release(self.model, state.number))
        state.stage, state.retain = Stage.ENDED, retain
        if not retain:
            del self._sequences[state.request.key]
            self._leaving.add(state)
        self._settle(state)

    def _settle(self, state: State) -> None:
        """Gives back what an ended sequence does not need, once no chunk names it."""
        if state.stage is not Stage.ENDED or state.in_flight:
            return
        if state.retain:
            self.pages.retain(state)
            state.stage = Stage.RETAINED
            self._admission_due = True
        else:
            self._forget(state)

    def _forget(self, state: State) -> None:
        if self._sequences.get(state.request.key) is state:
            del self._sequences[state.request.key]
        self._leaving.discard(state)
        self.pages.give_back(state)
        state.stage = Stage.GONE
        self._admission_due = True

    # --- looking in -------------------------------------------------------------------------------------------------

    def holders(self, key: Hashable) -> tuple[int, list[tuple[Hashable, int]]] | None:
        """How many pages a sequence waits for, and who holds the most of them; None for one that does not wait."""
        state = self._sequences.get(key)
        if state is None or state.stage is not Stage.WAITING:
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
            stages.count(Stage.WAITING), stages.count(Stage.LOADING), stages.count(Stage.LIVE), stages.count(Stage.RETAINED),
            pages.capacity, pages.pool.room(pages.cls),
            counters.prompt_tokens, counters.shared_tokens, counters.answer_tokens, counters.chunks,
            counters.recalled_chunks, counters.dropped_sequences,
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
