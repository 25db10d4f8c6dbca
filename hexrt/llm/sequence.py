"""What the batcher remembers of one sequence, and of one chunk that is with the host.

Changed by `llm.batch` only. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from hexrt.core import SequenceId, TokenLogprob
from hexrt.llm.prefix import next_key
from hexrt.protocol.host import Sampling


class Stage(enum.Enum):
    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # holds all its pages, some of which are on their way; no chunk names it
    LIVE = "live"  # holds all its pages; chunks name it
    PARKED = "parked"  # stopped for a more urgent one: holds the pages of what it has computed, which may move or be given up
    ENDED = "ended"  # no new chunk names it, one on its way may
    RETAINED = "retained"  # holds the pages of what it has computed, until released or dropped
    GONE = "gone"


class SequenceRequest(msgspec.Struct, frozen=True):
    """`ids` is the whole prompt. Without `sampling` the prompt is only prefilled.

    `answered` are answer ids from before a restart, `answered_text` and `answered_logprobs` what was given out with them. `parent` is the key of
    a retained sequence whose ids these begin with: its full pages are shared where they are still there. `root` begins the chain of prefix keys
    (`llm.prefix`); empty where pages are shared with nobody else.
    """

    key: Hashable
    ids: tuple[int, ...]
    sampling: Sampling | None
    answered: tuple[int, ...] = ()
    parent: Hashable | None = None
    retain: bool = False
    priority: int = 0
    answered_text: str = ""
    answered_logprobs: tuple[TokenLogprob, ...] = ()
    root: bytes = b""


class Need(msgspec.Struct, frozen=True):
    """When a sequence that has ended is gone on from: in so many steps, at about that time. `most_hold_ns`: how long its pages may be pinned till then."""

    steps: int
    at_ns: float
    most_hold_ns: int


@dataclass(eq=False, slots=True)
class State:
    """`material` is what must be in the pages before the next draw after it was admitted: the prompt and what was answered before.

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
    stopping: bool = False  # it is parked once no chunk names it
    progressed: bool = False  # a chunk of it came back since it was admitted
    passed_over: int = 0  # chunks in a row that had no budget left for its prompt
    pinned: bool = False  # its pages are
    need: Need | None = None
    held_until_ns: int = 0  # of a retained one: how long its pages stay pinned
    lacks: int = 0  # pages that were not to be had when it was last to be admitted
    awaited: int = 0  # moves of its pages that are on their way
    missing: int = 0  # pages that did not arrive
    lifts: int = 0  # how often its parent's pages were fetched from NVME for it
    pages_loaded: int = 0
    prefill_start_ns: int = 0
    prefill_end_ns: int = 0
    material: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # keys of its full pages, as far as they were needed
    published: int = 0  # so many of its first pages are known to others by their keys

    def __post_init__(self) -> None:
        request = self.request
        self.retain = request.retain
        self.answer = list(request.answered)
        self.texts = [request.answered_text]
        self.logprobs = list(request.answered_logprobs)
        self.begin_again(0)

    def begin_again(self, computed: int) -> None:
        """From the pages of its first `computed` tokens, as the host will be told of it anew."""
        self.material = (*self.request.ids, *self.answer)
        self.planned = self.computed = computed
        self.drawn = len(self.answer)
        self.introduced = self.stopping = self.progressed = False
        self.passed_over = 0

    def keys(self, pages: int, page_tokens: int) -> Sequence[bytes]:
        """The prefix keys of its first `pages` pages, all of which prompt and answer must fill; none without a root."""
        if not self.request.root:
            return ()
        while len(self.chain) < pages:
            parent = self.chain[-1] if self.chain else self.request.root
            start = len(self.chain) * page_tokens
            self.chain.append(next_key(parent, self._tokens(start, start + page_tokens)))
        return self.chain[:pages]

    def _tokens(self, start: int, end: int) -> Sequence[int]:
        prompt = self.request.ids
        if end <= len(prompt):
            return prompt[start:end]
        return (*prompt[start:], *self.answer[max(0, start - len(prompt)) : end - len(prompt)])

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
        own = (*self.request.ids, *self.answer)[: min(self.valid, len(material) - 1)]
        if own == tuple(material[: len(own)]):
            return len(own)
        return next(i for i, (mine, other) in enumerate(zip(own, material, strict=False)) if mine != other)

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
