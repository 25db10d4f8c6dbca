"""The weights of one device: which models are there, which get loaded next, and which make way for them.

Owns what each model's weights take of a budget that is fixed at start, when each was used last, and which loads failed. While a model is loaded or unloaded its
bytes are taken. Whoever calls carries the plan out and says how it went. Pure: the time is passed in.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from hexrt.errors import ErrorRecord

UNLIMITED = 1 << 62
LEAST_PATIENCE_NS = 1_000_000_000
"""How long a task waits at least before a model that is in use makes way for its own."""
GUESSED_BYTES_PER_NS = 0.5
"""How fast weights load as long as nothing was loaded."""
AGAIN_NS = 5_000_000_000
"""How long after a load that failed, and not for the first time, the next one is tried."""


class Stand(enum.Enum):
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(eq=False, slots=True)
class Weights:
    """`bytes` is an estimate until the host has said what they are."""

    model: str
    bytes: int
    stand: Stand
    used_ns: int
    loaded_ns: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """A model that is not there, and since when the oldest task waits for it."""

    model: str
    bytes: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class Refusal:
    error: ErrorRecord
    at_ns: int
    times: int  # in a row
    until_ns: int  # it is not tried before


@dataclass(slots=True)
class Plan:
    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)


class Shelf:
    def __init__(self, budget_bytes: int = UNLIMITED) -> None:
        self.budget_bytes = budget_bytes
        self._weights: dict[str, Weights] = {}
        self._refusals: dict[str, Refusal] = {}
        self._sizes: dict[str, int] = {}  # as hosts said
        self._load_ns: dict[str, int] = {}
        self._used_ns: dict[str, int] = {}  # of any model that was used, there or not
        self._bytes_per_ns = GUESSED_BYTES_PER_NS
        self.makes_way_for = ""  # the model that others drain or are unloaded for

    # --- looking in -----------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return sum(weights.bytes for weights in self._weights.values())

    @property
    def is_over(self) -> bool:
        """Whether models turned out larger than was thought."""
        return self.used_bytes > self.budget_bytes

    @property
    def is_draining(self) -> bool:
        return any(weights.draining for weights in self._weights.values())

    def find(self, model: str) -> Weights | None:
        return self._weights.get(model)

    def holders(self) -> list[Weights]:
        """The largest first."""
        return sorted(self._weights.values(), key=lambda w: -w.bytes)

    @property
    def why_making_way(self) -> str:
        if self.makes_way_for:
            return f"it makes way for {self.makes_way_for!r}"
        return "it makes way, as all models together take more than the budget"

    def size_of(self, model: str, estimate: int) -> int:
        return self._sizes.get(model, estimate)

    def fits(self, model: str, estimate: int) -> bool:
        """Whether it could ever be loaded."""
        return self.size_of(model, estimate) <= self.budget_bytes

    def refusal(self, model: str, now_ns: int) -> Refusal | None:
        """Why it is not to be loaded now."""
        refusal = self._refusals.get(model)
        return refusal if refusal is not None and now_ns < refusal.until_ns else None

    def last_refusal(self, model: str) -> Refusal | None:
        """Of a model that was not loaded since."""
        return self._refusals.get(model)

    def last_used_ns(self, model: str) -> int:
        """0 for one that never was."""
        return self._used_ns.get(model, 0)

    def expected_ns(self, model: str, size: int) -> int:
        """How long it is expected to load."""
        return self._load_ns.get(model) or int(size / self._bytes_per_ns)

    def patience_ns(self, want: Want) -> int:
        return max(LEAST_PATIENCE_NS, 2 * self.expected_ns(want.model, want.bytes))

    # --- what happened --------------------------------------------------------------------------------------------

    def used(self, model: str, now_ns: int) -> None:
        self._used_ns[model] = now_ns
        if (weights := self._weights.get(model)) is not None:
            weights.used_ns = max(weights.used_ns, now_ns)

    def loaded(self, model: str, size: int, took_ns: int, now_ns: int) -> None:
        """A host said so. `size` 0: it does not know."""
        weights = self._weights[model]
        weights.stand, weights.loaded_ns, weights.used_ns = Stand.LOADED, now_ns, now_ns
        self._load_ns[model] = took_ns
        self._refusals.pop(model, None)
        if size:
            self._sizes[model] = weights.bytes = size
            self._bytes_per_ns = size / max(took_ns, 1)

    def failed(self, model: str, error: ErrorRecord, now_ns: int) -> None:
        """It could not be loaded."""
        del self._weights[model]
        before = self._refusals.get(model)
        times = before.times + 1 if before is not None else 1
        self._refusals[model] = Refusal(error, now_ns, times, now_ns + AGAIN_NS if times > 1 else now_ns)

    def unloaded(self, model: str) -> None:
        del self._weights[model]

    def lost(self) -> None:
        """The host is gone and with it all that was here."""
        self._weights.clear()
        self.makes_way_for = ""

    # --- what is to happen ----------------------------------------------------------------------------------------

    def plan(self, wants: Iterable[Want], idle: Container[str], now_ns: int) -> Plan:
        """What to load and unload now; which models drain is noted in `Weights.draining`.

        Idle models make way at once, the least recently used first, and no more of them than make the room. Where none is idle, a want is
        overdue once its oldest task has waited for `patience_ns`: then the least recently loaded models drain for it, each after it has served
        for as long as its own load took, and no later want gets room before it. So each want is met after finitely many loads: those before it
        in order of waiting, as long as what runs ends. Models that turned out larger than was thought are brought back under the budget likewise.
        """
        plan = Plan()
        draining: set[str] = set()
        self.makes_way_for = ""
        if self.is_over:
            draining = self._make_way(self.used_bytes - self.budget_bytes, idle, self._may_drain(idle, now_ns), plan) or set()  # fmt: skip
        for want in sorted(wants, key=lambda w: w.since_ns):
            short = self.used_bytes + want.bytes - self.budget_bytes
            if short <= 0:
                self._weights[want.model] = Weights(want.model, want.bytes, Stand.LOADING, now_ns)
                plan.load.append(want.model)
                continue
            overdue = now_ns - want.since_ns > self.patience_ns(want)
            busy = self._may_drain(idle, now_ns) if overdue else ()
            drain = self._make_way(short, idle, busy, plan)
            if drain is None and not overdue:
                continue  # a later one may fit into what is free
            draining |= drain or set()
            self.makes_way_for = want.model
            break
        for weights in self._weights.values():
            weights.draining = weights.model in draining
        return plan

    def _make_way(self, short: int, idle: Container[str], busy: Iterable[Weights], plan: Plan) -> set[str] | None:
        """Unloads idle models so that `short` bytes come free, and returns those of `busy` that must drain for it too; None where that is not to be had."""
        ways = self._ways(short, idle, busy)
        if ways is None:
            return None
        for weights in ways:
            if weights.model in idle:
                weights.stand = Stand.UNLOADING
                plan.unload.append(weights.model)
        return {w.model for w in ways if w.model not in idle}

    def _may_drain(self, idle: Container[str], now_ns: int) -> list[Weights]:
        """Models in use that may make way, those that do so already first."""
        busy = [
            w
            for w in self._weights.values()
            if w.stand is Stand.LOADED
            and w.model not in idle
            and (w.draining or now_ns - w.loaded_ns >= self.expected_ns(w.model, w.bytes))
        ]
        return sorted(busy, key=lambda w: (not w.draining, w.loaded_ns))

    def _ways(self, short: int, idle: Container[str], busy: Iterable[Weights]) -> list[Weights] | None:
        """The models that are to make way so that `short` bytes come free beyond those that do so already; None where that is not to be had."""
        short -= sum(w.bytes for w in self._weights.values() if w.stand is Stand.UNLOADING)
        unused = [w for w in self._weights.values() if w.stand is Stand.LOADED and w.model in idle]
        chosen: list[Weights] = []
        for weights in [*sorted(unused, key=lambda w: w.used_ns), *busy]:
            if short <= 0:
                break
            chosen.append(weights)
            short -= weights.bytes
        if short > 0:
            return None
        for weights in reversed(chosen[:]):
            if short + weights.bytes <= 0:  # the others are enough
                chosen.remove(weights)
                short += weights.bytes
        return chosen
