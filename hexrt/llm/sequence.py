"""What the batcher remembers of one sequence, and of one chunk that is with the host.

Changed by `llm.batch` only. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from hexrt.core import SequenceId
from hexrt.protocol.host import Sampling


class Stage(enum.Enum):
    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # holds all its pages, some of which are on their way; no chunk names it
    LIVE = "live"  # holds all its pages; chunks name it
    ENDED = "ended"  # no new chunk names it, one on its way may
    RETAINED = "retained"  # holds the pages of what it has computed, until released or dropped
    GONE = "gone"


class SequenceRequest(msgspec.Struct, frozen=True):
    """`ids` is the whole prompt. Without `sampling` the prompt is only prefilled.

    `answered` are answer ids from before a restart, `answered_text` the text that was given out with them. `parent` is the key of a
    retained sequence whose ids these begin with: its full pages are shared where they are still there.
    """

    key: Hashable
    ids: tuple[int, ...]
    sampling: Sampling | None
    answered: tuple[int, ...] = ()
    parent: Hashable | None = None
    retain: bool = False
    priority: int = 0
    answered_text: str = ""


@dataclass(eq=False, slots=True)
class State:
    """`material` is what must be in the pages before the first draw: the prompt and what was answered before.

    material   [ computed ........ | planned: in a chunk on its way ... | unplanned ]
    answer     [ answer: reported  | drawn: in a chunk on its way ..... | undrawn   ] limit
    """

    request: SequenceRequest
    number: SequenceId
    limit: int  # of answer tokens
    pages: int
    added_ns: int
    stage: Stage = Stage.WAITING
    overtaken: int = 0
    retain: bool = False
    introduced: bool = False
    planned: int = 0
    computed: int = 0
    drawn: int = 0
    in_flight: int = 0
    used: int = 0
    pinned: bool = False  # its pages are
    awaited: int = 0  # moves of its pages that are on their way
    missing: int = 0  # pages that did not arrive
    lifts: int = 0  # how often its parent's pages were fetched from NVME for it
    pages_loaded: int = 0
    prefill_start_ns: int = 0
    prefill_end_ns: int = 0
    material: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retain = self.request.retain
        self.material = self.request.ids + self.request.answered
        self.answer = list(self.request.answered)
        self.texts = [self.request.answered_text]
        self.drawn = len(self.answer)

    @property
    def unplanned(self) -> int:
        return len(self.material) - self.planned

    @property
    def undrawn(self) -> int:
        return max(0, self.limit - self.drawn)

    @property
    def valid(self) -> int:
        """Tokens whose K and V are in the pages: of an answer all but the last drawn one, which no pass has read yet."""
        if self.computed < len(self.material) or self.request.sampling is None:
            return self.computed
        return max(self.computed, len(self.request.ids) + len(self.answer) - 1)

    def common(self, material: Sequence[int]) -> int:
        """How many leading tokens of `material` lie in these pages, short of its last one, which must be computed to draw from it."""
        own = (*self.request.ids, *self.answer)[: self.valid]
        pairs = zip(own, material[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def depart(self, share: Share) -> None:
        self.planned += share.prompt
        self.drawn += share.gain
        self.in_flight += 1
        self.introduced = True

    def come_back(self, share: Share) -> None:
        """Undoes `depart`, for a chunk that never began; it must be the last one sent."""
        self.planned -= share.prompt
        self.drawn -= share.gain
        self.in_flight -= 1
        self.introduced = not share.introduces


class Share(msgspec.Struct, frozen=True):
    """A sequence's part in one chunk: a slice of its material, and at most how many answer tokens."""

    state: State
    position: int
    prompt: int
    drawn: int  # before this chunk
    gain: int
    introduces: bool  # the first chunk that names it


@dataclass(eq=False, slots=True)
class Flight:
    """A chunk that is with the host. `recalled`: a Cancel was sent, and which came first is not known yet."""

    command: int
    passes: int
    shares: list[Share]
    recalled: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(share.prompt for share in self.shares)
