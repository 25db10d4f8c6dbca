"""Timelines of runs as tracks, slices and flows: what a trace shows, before any file format.

Owns the picture. A group is a device or a run; its tracks hold slices that never overlap, so what runs at the same time goes to
lanes of its own:

    cpu:0    stream 0   |  embed  | generate.decode    |        what runs; a second sequence of a batch is on the next lane
             queue      | embed: queued > staged |              from ready to started, one lane for each that waits at the same time
    run ab12 run        | whole run                       |
             steps      | embed | generate ...            |     first ready to last end of each step

What a host measured is shown as it is. What only the daemon saw is moved inside it where the two disagree: a task sent ahead to a worker
may start before the daemon knows that it is ready. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hexrt.protocol.messages import AttemptRecord, RunTimeline

Arg = tuple[str, str | int | float]
NOWHERE = "not placed"
"""The group of attempts that no device was chosen for."""


@dataclass(eq=False, slots=True)
class Slice:
    """`end_ns` None: it has not ended. `children` lie inside it, one after the other. Flow ids are unique in a Picture."""

    name: str
    category: str
    begin_ns: int
    end_ns: int | None
    args: tuple[Arg, ...] = ()
    children: tuple[Slice, ...] = ()
    leaves: list[int] = field(default_factory=list)
    arrives: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Track:
    """Slices in order of time, none overlapping another. `stream` says that it is one of the device's streams."""

    name: str
    stream: bool
    slices: list[Slice]


@dataclass(eq=False, slots=True)
class Group:
    name: str
    tracks: list[Track]


@dataclass(frozen=True, slots=True)
class Picture:
    groups: tuple[Group, ...]
    flows: int


def lay_out(timelines: Sequence[RunTimeline]) -> Picture:
    """The picture of `timelines`, devices first and in order of name, then the runs as given."""
    streams: dict[str, dict[int, list[Slice]]] = {}
    waits: dict[str, list[Slice]] = {}
    runs: list[Group] = []
    flows = 0
    for timeline in timelines:
        running: list[tuple[AttemptRecord, Slice]] = []
        labels = _labels(timeline)
        for attempt in timeline.attempts:
            label = labels[attempt.step, attempt.part]
            device = attempt.device or NOWHERE
            wait = _wait_slice(attempt, label)
            if wait is not None:
                waits.setdefault(device, []).append(wait)
            if attempt.start_ns:
                ran = _running_slice(timeline, attempt, label)
                streams.setdefault(device, {}).setdefault(attempt.stream, []).append(ran)
                running.append((attempt, ran))
        flows = _connect(timeline, running, flows)
        runs.append(_run_group(timeline))
    devices = [
        Group(device, _device_tracks(streams.get(device, {}), waits.get(device, [])))
        for device in sorted(streams.keys() | waits.keys(), key=lambda name: (name == NOWHERE, name))
    ]
    return Picture((*devices, *runs), flows)


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The fewest lists without an overlap inside one; each slice goes to the first list that is free when it begins."""
    out: list[list[Slice]] = []
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for piece in sorted(slices, key=lambda s: (s.begin_ns, math.inf if s.end_ns is None else s.end_ns)):
        while busy and busy[0][0] <= piece.begin_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(out)
            out.append([])
        out[lane].append(piece)
        heapq.heappush(busy, (math.inf if piece.end_ns is None else piece.end_ns, lane))
    return out


def _device_tracks(streams: dict[int, list[Slice]], waits: list[Slice]) -> list[Track]:
    tracks = [
        Track(f"stream {stream}" if lane == 0 else f"stream {stream}, lane {lane + 1}", True, slices)
        for stream in sorted(streams)
        for lane, slices in enumerate(lanes(streams[stream]))
    ]
    return tracks + [Track("queue", False, slices) for slices in lanes(waits)]


def _labels(timeline: RunTimeline) -> dict[tuple[int, int], str]:
    """What each task is called: the step, its place in a map, and the part where a step has several."""
    tasks: dict[int, dict[int, str]] = {}
    for attempt in timeline.attempts:
        tasks.setdefault(attempt.step, {})[attempt.part] = attempt.part_name
    labels: dict[tuple[int, int], str] = {}
    for step, parts in tasks.items():
        count, mapped = _parts_of_item(parts)
        several = len(set(parts.values())) > 1
        for part, part_name in parts.items():
            place = f"[{part // count}]" if mapped else ""
            suffix = f".{part_name}" if several else ""
            labels[step, part] = f"{timeline.steps[step][0]}{place}{suffix}"
    return labels


def _parts_of_item(parts: dict[int, str]) -> tuple[int, bool]:
    """How many parts each element of a map has, and whether there is more than one element, from the parts that were attempted."""
    by_name: dict[str, list[int]] = {}
    for part, name in parts.items():
        by_name.setdefault(name, []).append(part)
    stride = math.gcd(*(part - numbers[0] for numbers in by_name.values() for part in numbers))
    return max(stride, len(by_name), 1), stride > 0


def _wait_slice(attempt: AttemptRecord, label: str) -> Slice | None:
    """From ready to started, with `queued` (no device yet) and `staged` (sent to one) inside; None where nothing waited."""
    began = attempt.ready_ns or attempt.placed_ns
    if not began:
        return None
    ended: int | None = attempt.start_ns or attempt.end_ns or None
    if ended is not None:
        began = min(began, ended)
    placed = max(attempt.placed_ns, began) if attempt.placed_ns else None
    if placed is not None and ended is not None:
        placed = min(placed, ended)
    children = [Slice("queued", "queued", began, ended if placed is None else placed)]
    if placed is not None:
        children.append(Slice("staged", "staged", placed, ended))
    return Slice(label, "waiting", began, ended, (("attempt", attempt.attempt),), tuple(children))


def _end_ns(attempt: AttemptRecord) -> int | None:
    return max(attempt.end_ns, attempt.start_ns) if attempt.end_ns else None


def _running_slice(timeline: RunTimeline, attempt: AttemptRecord, label: str) -> Slice:
    step, op = timeline.steps[attempt.step]
    end_ns = _end_ns(attempt)
    args: list[Arg] = [("run", timeline.run.hex()), ("step", step), ("op", op), ("part", attempt.part_name)]
    args += [("attempt", attempt.attempt), ("state", attempt.state), ("device", attempt.device)]
    if attempt.predicted_ns:
        args.append(("predicted_ns", attempt.predicted_ns))
    if end_ns is not None:
        args.append(("measured_ns", end_ns - attempt.start_ns))
    if attempt.tokens:
        args.append(("tokens", attempt.tokens))
    if attempt.pages_migrated:
        args.append(("pages_migrated", attempt.pages_migrated))
    if attempt.migration_bytes:
        args.append(("migration_bytes", attempt.migration_bytes))
    return Slice(label, "running", attempt.start_ns, end_ns, tuple(args))


def _connect(timeline: RunTimeline, running: list[tuple[AttemptRecord, Slice]], flows: int) -> int:
    """Adds the flows of one run; returns how many there are then. Ids go on from `flows`.

    Between two steps: from the producer task that ended last to each task of the consumer, and from each other task of the producer to
    the consumer task that started first: every task takes part, and maps of n and m tasks give n + m - 1 flows and not n times m.
    Where a task has parts, such as prefill and decode, flows go in at its first part, through its parts and out at its last.
    """
    first: dict[int, dict[int, Slice]] = {}
    last: dict[int, dict[int, Slice]] = {}
    names: dict[int, dict[int, str]] = {}
    for attempt, ran in sorted(running, key=lambda pair: (pair[0].attempt, pair[0].start_ns)):
        names.setdefault(attempt.step, {})[attempt.part] = attempt.part_name
        first.setdefault(attempt.step, {}).setdefault(attempt.part, ran)
        if attempt.state == "done":
            last.setdefault(attempt.step, {})[attempt.part] = ran
    counts = {step: _parts_of_item(parts)[0] for step, parts in names.items()}
    pairs = [
        (source, first[step][part + 1])
        for step, parts in last.items()
        for part, source in parts.items()
        if (part + 1) % counts[step] and part + 1 in first[step]
    ]
    for producer, consumer in timeline.edges:
        sources = [s for part, s in last.get(producer, {}).items() if (part + 1) % counts[producer] == 0]
        targets = [s for part, s in first.get(consumer, {}).items() if part % counts[consumer] == 0]
        if sources and targets:
            gate = max(sources, key=lambda s: s.end_ns or 0)
            earliest = min(targets, key=lambda s: s.begin_ns)
            pairs += [(gate, target) for target in targets]
            pairs += [(source, earliest) for source in sources if source is not gate]
    for source, target in pairs:
        if source.begin_ns < target.begin_ns:  # a flow is drawn forward in time only
            flows += 1
            source.leaves.append(flows)
            target.arrives.append(flows)
    return flows


def _run_group(timeline: RunTimeline) -> Group:
    """The run as a whole, and each step from when its first task was ready until its last one ended."""
    args: tuple[Arg, ...] = (
        ("run", timeline.run.hex()),
        ("state", str(timeline.state)),
        ("steps", len(timeline.steps)),
        ("submitted_wall_ns", timeline.submitted_wall_ns),
    )
    ended = max(timeline.ended_ns, timeline.submitted_ns) if timeline.ended_ns else None
    whole = Slice(timeline.name or "workflow", "run", timeline.submitted_ns, ended, args)
    attempts: dict[int, list[AttemptRecord]] = {}
    for attempt in timeline.attempts:
        attempts.setdefault(attempt.step, []).append(attempt)
    steps = [piece for step in sorted(attempts) if (piece := _step_slice(timeline, step, attempts[step])) is not None]
    tracks = [Track("run", False, [whole])] + [Track("steps", False, slices) for slices in lanes(steps)]
    return Group(f"run {timeline.name} {timeline.run.hex()[:8]}", tracks)


def _step_slice(timeline: RunTimeline, step: int, attempts: list[AttemptRecord]) -> Slice | None:
    begins = [ns for a in attempts for ns in (a.ready_ns, a.placed_ns, a.start_ns) if ns]
    if not begins:
        return None
    ends = [_end_ns(attempt) for attempt in attempts]
    begin = min(begins)
    end = None if None in ends else max(begin, *(ns for ns in ends if ns is not None))
    name, op = timeline.steps[step]
    args: tuple[Arg, ...] = (
        ("op", op),
        ("tasks", len({a.part for a in attempts})),
        ("attempts", len(attempts)),
        ("state", max(attempts, key=lambda a: (a.attempt, a.part)).state),
    )
    return Slice(name, "step", begin, end, args)
