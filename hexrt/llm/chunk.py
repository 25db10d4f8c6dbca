"""What goes into the next chunk, and how it is written down for the host. Pure; called by `llm.batch` only."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from hexrt.llm.sequence import Share, State
from hexrt.protocol.host import ChunkSequence


def compose(live: Iterable[State], token_budget: int, most_passes: int) -> tuple[list[Share], int]:
    """Prompt slices in the order of `live` as far as the budget goes, and every sequence that decodes; and the number of passes."""
    budget, backlog = token_budget, False
    slices: list[tuple[State, int]] = []
    for state in live:
        take = min(state.unplanned, budget)
        budget -= take
        backlog |= take < state.unplanned
        if take or (not state.unplanned and state.undrawn):
            slices.append((state, take))
    # While prompts wait for budget, each pass carries slices; afterwards passes are spent on decoding alone.
    drawn = [state.undrawn for state, take in slices if take == state.unplanned]
    passes = 1 if backlog else min(most_passes, max([1, *drawn]))
    shares = []
    for state, take in slices:
        gain = min(passes, state.undrawn) if take == state.unplanned else 0
        shares.append(Share(state, state.planned, take, state.drawn, gain, not state.introduced))
    return shares, passes


def row_of(share: Share) -> ChunkSequence:
    """A sequence's part in a chunk, before it is counted as sent."""
    state, request = share.state, share.state.request
    end = share.position + share.prompt
    last = bool(share.prompt) and end == len(state.material) and request.sampling is not None
    sampling = replace(request.sampling, max_tokens=state.limit) if request.sampling else None
    return ChunkSequence(
        state.number,
        share.position if share.prompt else len(request.ids) + share.drawn - 1,
        state.material[share.position : end],
        last,
        sampling if share.introduces else None,
        state.material[len(request.ids) :] if share.introduces else (),
        request.ids if share.introduces and sampling is not None and sampling.repetition_penalty != 1 else (),
    )


def count_passed_over(live: Iterable[State], shares: Iterable[Share]) -> None:
    """Remembers whose prompt got no budget in a chunk that is sent: nobody is passed over for ever."""
    took = {share.state for share in shares if share.prompt}
    for state in live:
        if state in took:
            state.passed_over = 0
        elif state.unplanned:
            state.passed_over += 1
