"""In which order sequences that wait get pages, for whom they wait, and who makes way for a more urgent one.

Owns which prompt pages live sequences are about to publish: a request with the same beginning waits for them instead of computing them beside. Decides,
and lets `llm.batch` carry it out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from hexrt.errors import BadRequest, OutOfMemory
from hexrt.llm.pages import SequencePages
from hexrt.llm.sequence import SequenceRequest, Stage, State
from hexrt.scheduling.retention import Candidate, victims

PATIENCE = 16
"""How often later requests may be admitted before a waiting one; then nobody passes it any more."""
LOOKAHEAD = 16
"""How many waiting requests that do not fit are looked past at a time."""
WORTH_WAITING_TOKENS = 16
"""Of a beginning that another sequence is computing right now: for less, a request does not wait."""
WAITS = frozenset({Stage.WAITING, Stage.PARKED})


class Admission:
    def __init__(self, pages: SequencePages) -> None:
        self._pages = pages
        self._promised: dict[bytes, State] = {}  # prefix key -> the live sequence whose prompt will fill that page

    def size(self, request: SequenceRequest, model: str, context_tokens: int) -> tuple[int, int]:
        """Answer tokens at most, and pages for all of it. Raises BadRequest or OutOfMemory where it can never be admitted."""
        prompt = len(request.ids)
        if not prompt:
            raise BadRequest("the prompt is empty", "prompt")
        if prompt >= context_tokens:
            raise BadRequest(
                f"the prompt has {prompt} tokens; with an answer it must fit the {context_tokens} of "
                f"{model!r}: shorten it to at most {context_tokens - 1}",
                "prompt",
            )
        limit = min(request.sampling.max_tokens, context_tokens - prompt) if request.sampling else 0
        pages = self._pages.pages_of(prompt + max(limit, len(request.answered)))
        if pages > self._pages.capacity:
            raise OutOfMemory(
                f"prompt and answer need {pages} pages of {self._pages.page_tokens} tokens, and the device has "
                f"{self._pages.capacity}: lower max_tokens or shorten the prompt",
                "max_tokens",
            )
        return limit, pages

    def order(self, states: Iterable[State]) -> list[State]:
        """Those that wait, in the order in which they are offered pages."""
        waiting = [s for s in states if s.stage is Stage.WAITING or s.stage is Stage.PARKED]
        waiting.sort(key=lambda s: (s.overtaken < PATIENCE, -s.request.priority, s.number))
        return waiting

    # --- beginnings that are being computed ---------------------------------------------------------------------------

    def promise(self, state: State) -> None:
        """The sequence became live: its prompt's full pages will be known by their keys."""
        size = self._pages.page_tokens
        for key in state.keys(len(state.request.ids) // size, size)[state.published :]:
            self._promised.setdefault(key, state)

    def settle(self, state: State) -> None:
        """What it promised is there, or will never be."""
        for key in state.chain:
            if self._promised.get(key) is state:
                del self._promised[key]

    def published(self, state: State, before: int) -> None:
        """Its pages from number `before` on are known now."""
        for key in state.chain[before : state.published]:
            if self._promised.get(key) is state:
                del self._promised[key]

    def awaits(self, state: State) -> bool:
        """Whether most of what the sequence would compute first is being computed by another one that is no less urgent."""
        if not self._promised or not state.request.root:
            return False
        size = self._pages.page_tokens
        keys = state.keys((len(state.request.ids) - 1) // size, size)
        first = next((i for i, key in enumerate(keys) if key not in self._pages.prefixes), len(keys))
        holder = self._promised.get(keys[first]) if first < len(keys) else None
        if holder is None or holder.request.priority < state.request.priority:
            return False
        count = next(
            (i for i, key in enumerate(keys[first:]) if self._promised.get(key) is not holder), len(keys) - first
        )
        return count * size >= WORTH_WAITING_TOKENS

    # --- making way -------------------------------------------------------------------------------------------------------

    def stopped_for(self, state: State, states: Iterable[State]) -> list[State]:
        """Live sequences to stop so that a more urgent one, which got no pages, gets them; none where that would not do.

        One that has not come on since it was admitted is let be. Holds of less urgent conversations end at once.
        """
        pages, priority = self._pages, state.request.priority
        others = list(states)
        for other in others:
            if other.stage is Stage.RETAINED and other.pinned and other.request.priority < priority:
                pages.end_hold(other)
        live = [s for s in others if s.stage is Stage.LIVE and s.request.priority < priority]
        if not live:
            return []
        coming = sum(pages.own_pages(s) for s in live if s.stopping)
        short = pages.keeper.short_of(pages.cls, state.lacks) - coming
        by_key = {s.number: s for s in live if s.progressed and not s.stopping}
        candidates = [
            Candidate(s.number, s.request.priority, pages.own_pages(s), pages.stop_ns(s)) for s in by_key.values()
        ]
        return [by_key[c.key] for c in victims(candidates, priority, short)]  # type: ignore[index]

    def is_making_way(self, state: State, states: Iterable[State]) -> bool:
        """Whether less urgent ones are being stopped: what comes free is for this one, or for one before it."""
        return any(s.stopping and s.request.priority < state.request.priority for s in states)
