"""Iteration-level batching: which sequences run in the next chunk, and which pages they hold.

Owns the state of one model on one device: the sequences, their page tables (`memory.pool`) and the chunks that are with the host, at most
one running and one queued. The daemon calls it, carries `decide`'s messages to the host and hands the reports back in. Admission reserves
all pages that a sequence can come to need, or none, so that an admitted sequence always ends. Batching at chunks follows Orca (Yu et al.,
OSDI 2022) and mixes prompt slices with decoding under a token budget as Sarathi-Serve does (Agrawal et al., OSDI 2024). Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from hexrt.core import SequenceId
from hexrt.errors import BadRequest, ErrorRecord, InvariantViolation, OutOfMemory
from hexrt.llm.outcome import Emitted, Ended, EngineStatistics, Outcome, Prefilled, Refused
from hexrt.llm.sequence import Flight, SequenceRequest, Share, Stage, State
from hexrt.memory.pool import PagePool
from hexrt.protocol.host import BindPages, Cancel, Chunk, Chunked, ChunkSequence, Release, ToHost, Token

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
        self, model: str, frames: int, page_tokens: int, context_tokens: int, token_budget: int, passes: int
    ) -> None:
        if token_budget < 1 or passes < 1:
            raise InvariantViolation(f"an engine of {token_budget} tokens and {passes} passes a chunk")
        self.model = model
        self.context_tokens = context_tokens
        self.token_budget = token_budget
        self.passes = passes
        self._pool = PagePool(frames, page_tokens)
        self._sequences: dict[Hashable, State] = {}
        self._leaving: set[State] = set()  # ended or cancelled, yet named by a chunk on its way
        self._flights: deque[Flight] = deque()
        self._outbox: list[ToHost] = []
        self._counters = _Counters()
        self._numbers = 0
        self._clock = 0  # counts uses of retained sequences
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
        pages = self._pool.pages_of(prompt + max(limit, len(request.answered)))
        if pages > self._pool.frames:
            raise OutOfMemory(
                f"prompt and answer need {pages} pages of {self._pool.page_tokens} tokens, and the device has "
                f"{self._pool.frames}: lower max_tokens or shorten the prompt",
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
        """Forgets everything; returns the keys of the sequences that had not ended, to be added again with what they `answered`."""
        lost = [s.request.key for s in self._sequences.values() if s.stage in (Stage.WAITING, Stage.LIVE)]
        self._pool = PagePool(self._pool.frames, self._pool.page_tokens)
        self._sequences.clear()
        self._leaving.clear()
        self._flights.clear()
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
            shares, passes = self._compose()
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

    def _compose(self) -> tuple[list[Share], int]:
        """The next chunk: prompt slices in order of admission as far as the budget goes, and every sequence that decodes."""
        budget, backlog = self.token_budget, False
        slices: list[tuple[State, int]] = []
        for state in self._live():
            take = min(state.unplanned, budget)
            budget -= take
            backlog |= take < state.unplanned
            if take or (not state.unplanned and state.undrawn):
                slices.append((state, take))
        # While prompts wait for budget, each pass carries slices; afterwards passes are spent on decoding alone.
        drawn = [state.undrawn for state, take in slices if take == state.unplanned]
        passes = 1 if backlog else min(self.passes, max([1, *drawn]))
        shares = []
        for state, take in slices:
            gain = min(passes, state.undrawn) if take == state.unplanned else 0
            shares.append(Share(state, state.planned, take, state.drawn, gain, not state.introduced))
        return shares, passes

    def _depart(self, flight: Flight) -> Chunk:
        """Counts the chunk as sent and writes its message."""
        rows = []
        for share in flight.shares:
            state, request = share.state, share.state.request
            end = share.position + share.prompt
            last = bool(share.prompt) and end == len(state.material) and request.sampling is not None
            sampling = replace(request.sampling, max_tokens=state.limit) if request.sampling else None
            rows.append(
                ChunkSequence(
                    state.number,
                    share.position if share.prompt else len(request.ids) + share.drawn - 1,
                    state.material[share.position : end],
                    last,
                    sampling if share.introduces else None,
                    request.answered if share.introduces else (),
                )
            )
            state.depart(share)
        self._flights.append(flight)
        self._counters.chunks += 1
        return Chunk(flight.command, self.model, flight.passes, tuple(rows))

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, messages: list[ToHost]) -> None:
        waiting = [s for s in self._sequences.values() if s.stage is Stage.WAITING]
        waiting.sort(key=lambda s: (s.overtaken < PATIENCE, -s.request.priority, s.number))
        refused = 0
        for state in waiting:
            if self._reserve(state):
                del self._sequences[state.request.key]  # goes to the end: live sequences stand in order of admission
                self._sequences[state.request.key] = state
                state.stage = Stage.LIVE
                frames = self._pool.table(state.number)
                messages.append(BindPages(self.model, state.number, 0, frames, self._pool.version(state.number)))
                for other in waiting:
                    other.overtaken += other.stage is Stage.WAITING and other.number < state.number
            else:
                refused += 1
                if state.overtaken >= PATIENCE or refused > LOOKAHEAD:
                    return

    def _reserve(self, state: State) -> bool:
        """Takes all pages of a sequence, those that its parent shares first, dropping retained sequences where that is enough."""
        pool, number = self._pool, state.number
        shared = 0
        parent = self._sequences.get(state.request.parent) if state.request.parent is not None else None
        if parent is not None and parent.stage in (Stage.ENDED, Stage.RETAINED):
            shared = parent.common(state.material) // pool.page_tokens
            pool.share(parent.number, number, shared)
            self._touch(parent)
        need = state.pages - shared
        if not pool.can_allocate(need):
            retained = sorted((s for s in self._sequences.values() if s.stage is Stage.RETAINED), key=lambda s: s.used)
            if pool.free + pool.reclaimable(s.number for s in retained) < need:
                if number in pool:
                    pool.release(number)
                return False
            for victim in retained:
                if pool.can_allocate(need):
                    break
                self._counters.dropped_sequences += 1
                self._forget(victim)
        pool.allocate(number, need)
        state.planned = state.computed = shared * pool.page_tokens
        self._counters.shared_tokens += state.planned
        return True

    def _touch(self, state: State) -> None:
        self._clock += 1
        state.used = self._clock

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
            yield Prefilled(key, state.prefill_start_ns, report.end_ns)
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
            self._pool.truncate(state.number, self._pool.pages_of(state.valid))
            state.stage = Stage.RETAINED
            self._touch(state)
            self._admission_due = True
        else:
            self._forget(state)

    def _forget(self, state: State) -> None:
        if self._sequences.get(state.request.key) is state:
            del self._sequences[state.request.key]
        self._leaving.discard(state)
        state.stage = Stage.GONE
        if state.number in self._pool:
            self._pool.release(state.number)
        self._admission_due = True

    # --- looking in -------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is on its way; retained sequences may be there."""
        stages = {s.stage for s in self._sequences.values()}
        return not self._flights and not self._outbox and not stages & {Stage.WAITING, Stage.LIVE, Stage.ENDED}

    def statistics(self) -> EngineStatistics:
        stages = [s.stage for s in self._sequences.values()]
        pool, counters = self._pool.statistics(), self._counters
        return EngineStatistics(
            stages.count(Stage.WAITING), stages.count(Stage.LIVE), stages.count(Stage.RETAINED), pool.frames, pool.free,
            counters.prompt_tokens, counters.shared_tokens, counters.answer_tokens, counters.chunks,
            counters.recalled_chunks, counters.dropped_sequences,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless tables, sequences and chunks agree."""
        self._pool.check_integrity()
        states = [*self._sequences.values(), *self._leaving]
        holders = {s.number for s in states if s.stage is not Stage.WAITING}
        if self._pool.sequences() != holders:
            raise InvariantViolation(f"page tables of {self._pool.sequences()}, sequences {holders}")
        named = [share.state for flight in self._flights for share in flight.shares]
        for state in states:
            if named.count(state) != state.in_flight:
                raise InvariantViolation(
                    f"sequence {state.number} is in {named.count(state)} chunks, not {state.in_flight}"
                )
