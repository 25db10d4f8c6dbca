"""Decode passes as captured CUDA graphs: a pass of hundreds of small kernels becomes one launch, and k passes follow each other on the device.

Owns the graphs, one for each bucket of rows, table width and kind of draw, the tensors they read and write, and their common memory pool.
A graph is one pass, its draws, and the step to the next pass; the host only puts a chunk's first pass in place and reads what was drawn at
the end. Rows that fill a bucket up belong to no sequence: nothing is written for them. What is not captured runs as it is, by the same
functions, and `statistics` says how often and why: prompt slices, penalties, grammars, log-probabilities, more rows than the largest bucket.
Used on the thread that owns the stream.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hexrt.kernels.attention import PassTensors
from hexrt.llm.engine_pass import Pass
from hexrt.llm.engine_sampling import Drawn, Draws

GREEDY, RANDOM, CUT = "greedy", "random", "cut"
ROWS_STEP = 8
LEAST_WIDTH = 16
WIDTH_FACTOR = 4
WARM_UPS = 2
"""Passes over nothing before a capture: libraries set themselves up and kernels compile in the first, which a capture forbids."""

Step = Callable[[Pass], Drawn]
Advance = Callable[[Pass, Drawn], None]


def rows_bucket(rows: int) -> int:
    """1, 2, 4, 8, then multiples of 8: at most 7 rows are computed for nothing."""
    return 1 << (rows - 1).bit_length() if rows <= ROWS_STEP else -(-rows // ROWS_STEP) * ROWS_STEP


def width_bucket(width: int, most: int) -> int:
    """Pages of a table: wide steps, since what lies past a row's end costs a kernel next to nothing and a graph costs memory."""
    bucket = LEAST_WIDTH
    while bucket < width:
        bucket *= WIDTH_FACTOR
    return min(bucket, most)


def kind_of(draws: Draws) -> str:
    return CUT if len(draws.cut) else RANDOM if len(draws.random) else GREEDY


class Captured(Protocol):
    def replay(self) -> None: ...


class Capture(Protocol):
    """How a function of tensors is recorded: CudaCapture, and a tape in tests."""

    def warm_up(self, run: Callable[[], None]) -> None: ...

    def capture(self, run: Callable[[], None]) -> Captured:
        """`run`'s work, to be done again on the same memory; it is not done now."""

    def free_bytes(self) -> int: ...


class CudaCapture:
    """CUDA graphs on a stream of their own, all in one memory pool: they run one after the other, so that their scratch may overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # A tensor that is collected meanwhile would be given back to a pool under capture.
        gc.collect()
        # Only this thread is held to what a capture allows: another may copy pages.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


@dataclass(frozen=True, slots=True)
class GraphStatistics:
    graphs: int
    bytes: int  # of device memory that captures took
    replays: int  # passes
    eager: dict[str, int]  # chunks that were not replayed, by the reason


@dataclass(frozen=True, slots=True)
class Key:
    rows: int
    width: int
    kind: str


@dataclass(slots=True)
class _Graph:
    inputs: Pass
    drawn: Tensor  # int64 [passes, 2, rows]
    run: Captured


@dataclass(slots=True)
class _Counts:
    bytes: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class DecodeGraphs:
    """Runs decode passes of one model. `step` and `advance` are functions of a pass's tensors alone, with nothing read by the host."""

    def __init__(
        self, step: Step, advance: Advance, device: torch.device, vocabulary: int, *, rows: int, width: int,
        passes: int, most_bytes: int, capture: Capture,
    ) -> None:  # fmt: skip
        """`rows`, `width` (pages of a table), `passes`: the most that is captured. `most_bytes`: no more is captured once graphs hold it."""
        self._step, self._advance, self._capture = step, advance, capture
        self._rows, self._width, self._passes, self._most_bytes = rows_bucket(rows), width, passes, most_bytes
        self._fixed = _Fixed(device, vocabulary, self._rows, width, passes)
        self._graphs: dict[Key, _Graph] = {}
        self._counts = _Counts()

    def statistics(self) -> GraphStatistics:
        counts = self._counts
        return GraphStatistics(len(self._graphs), counts.bytes, counts.replays, dict(counts.eager))

    def warm_up(self, rows: int, width: int = LEAST_WIDTH, kind: str = GREEDY) -> bool:
        """Captures the graph of a bucket ahead of its first use; False where it is not to be had."""
        return self._graph(Key(rows_bucket(rows), width_bucket(width, self._width), kind)) is not None

    def decode(self, inputs: Pass, passes: int) -> list[Drawn]:
        """What `passes` passes draw, from `inputs` on, which decode; `inputs` is left anywhere between.

        Replayed or not, the same tokens; valid until the next call. Frames for all passes are in the tables.
        """
        reason = self.why_eager(inputs, passes)
        graph = None if reason else self._graph(self._key(inputs))
        if graph is None:
            self._counts.eager[reason or "the graphs' memory is full"] += 1
            return self._eager(inputs, passes)
        self._fixed.put(inputs, graph.inputs)
        for _ in range(passes):
            graph.run.replay()
        self._counts.replays += passes
        rows, nothing = inputs.tensors.rows, graph.inputs.ids.new_empty((0, 0))
        # One copy, as the next chunk's passes write to the same memory while this one's are still being read.
        drawn = graph.drawn[:passes, :, :rows].clone()
        return [Drawn(tokens, nothing.float(), nothing) for tokens in drawn]

    def why_eager(self, inputs: Pass, passes: int) -> str:
        """Why these passes are not to be captured; empty where they are."""
        draws = inputs.draws
        if not inputs.decodes:
            return "prompt slices"
        for name, held in (("repetition penalties", draws.penalised), ("grammars", draws.masked), ("log-probabilities", draws.reported)):  # fmt: skip
            if len(held):
                return name
        if inputs.tensors.rows > self._rows:
            return f"more than {self._rows} rows"
        if inputs.tensors.tables.shape[1] > self._width:
            return f"more than {self._width} pages a row"
        return f"more than {self._passes} passes" if passes > self._passes else ""

    def _key(self, inputs: Pass) -> Key:
        tables = inputs.tensors.tables
        return Key(rows_bucket(len(tables)), width_bucket(tables.shape[1], self._width), kind_of(inputs.draws))

    def _eager(self, inputs: Pass, passes: int) -> list[Drawn]:
        drawn = [self._step(inputs)]
        for _ in range(passes - 1):
            self._advance(inputs, drawn[-1])
            drawn.append(self._step(inputs))
        return drawn

    def _graph(self, key: Key) -> _Graph | None:
        graph = self._graphs.get(key)
        if graph is None and key.rows <= self._rows and self._counts.bytes < self._most_bytes:
            graph = self._graphs[key] = self._capture_pass(key)
        return graph

    def _capture_pass(self, key: Key) -> _Graph:
        inputs, drawn = self._fixed.view(key)
        self._fixed.clear(inputs)

        def one_pass() -> None:
            made = self._step(inputs)
            drawn.index_copy_(0, inputs.draws.step, made.tokens.unsqueeze(0))
            self._advance(inputs, made)

        free = self._capture.free_bytes()
        for _ in range(WARM_UPS):
            self._capture.warm_up(one_pass)
            inputs.draws.step.zero_()
        run = self._capture.capture(one_pass)
        self._counts.bytes += max(0, free - self._capture.free_bytes())
        return _Graph(inputs, drawn, run)


class _Fixed:
    """The tensors that all graphs read and write, of which each sees the beginning; they live as long as the graphs do."""

    def __init__(self, device: torch.device, vocabulary: int, rows: int, width: int, passes: int) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        whole, short = torch.int64, torch.int32
        self._vocabulary, self._passes = vocabulary, passes
        self._ids, self._positions, self._slots = (zeros(whole, rows) for _ in range(3))
        self._tables, self._starts, self._ends = zeros(short, rows * width), zeros(short, rows + 1), zeros(short, rows)
        self._keep, self._live = torch.arange(rows, device=device), zeros(torch.bool, rows)
        self._random = zeros(whole, rows)
        self._inverse, self._min_p = zeros(torch.float32, rows, 1), zeros(torch.float32, rows, 1)
        self._top_k, self._top_p = zeros(whole, rows, 1), zeros(torch.float64, rows, 1)
        self._numbers = zeros(torch.float64, rows, passes)
        self._step = zeros(whole, 1)
        self._drawn = zeros(whole, passes * 2 * rows)
        self._none = {dtype: zeros(dtype, 0) for dtype in (whole, short, torch.bool)}
        self._no_penalty = zeros(torch.float32, 0, 1)

    def view(self, key: Key) -> tuple[Pass, Tensor]:
        rows, count = key.rows, {GREEDY: (0, 0), RANDOM: (key.rows, 0), CUT: (key.rows, key.rows)}[key.kind]
        random, cut = count
        none = self._none[torch.int64]
        draws = Draws(
            random=self._random[:random], inverse=self._inverse[:random], numbers=self._numbers[:random],
            step=self._step, cut=self._keep[:cut], top_k=self._top_k[:cut] if cut else None,
            top_p=self._top_p[:cut] if cut else None, min_p=self._min_p[:cut] if cut else None, penalised=none,
            penalty=self._no_penalty, slots=none, seen=self._none[torch.bool].view(0, 0), masked=none,
            bits=self._none[torch.int32].view(0, 0), reported=none, top=0,
        )  # fmt: skip
        tables = self._tables[: rows * key.width].view(rows, key.width)
        tensors = PassTensors(self._slots[:rows], tables, self._starts[: rows + 1], self._ends[:rows])
        inputs = Pass(
            self._ids[None, :rows], self._positions[None, :rows], tensors, self._keep[:rows], self._live[:rows], draws,
            rows, True,
        )  # fmt: skip
        return inputs, self._drawn[: self._passes * 2 * rows].view(self._passes, 2, rows)

    def clear(self, fixed: Pass) -> None:
        """Rows of nothing only."""
        self._pad(fixed, 0)
        for tensor in (fixed.tensors.tables, fixed.tensors.starts[:1], fixed.draws.random):
            tensor.zero_()
        fixed.draws.step.zero_()

    def put(self, given: Pass, fixed: Pass) -> None:
        """`given` at the beginning of `fixed`, the rest of which does nothing or repeats a row's draw."""
        rows, tables = given.tensors.rows, given.tensors.tables
        self._pad(fixed, rows)
        fixed.tensors.tables[:rows, : tables.shape[1]].copy_(tables)
        pairs = [
            (fixed.ids[:, :rows], given.ids), (fixed.positions[:, :rows], given.positions),
            (fixed.tensors.slots[:rows], given.tensors.slots), (fixed.tensors.starts[: rows + 1], given.tensors.starts),
            (fixed.tensors.ends[:rows], given.tensors.ends), (fixed.live[:rows], given.live),
            (fixed.draws.step, given.draws.step),
        ]  # fmt: skip
        for there, here in pairs:
            there.copy_(here)
        self._put_draws(given.draws, fixed.draws)

    def _put_draws(self, given: Draws, fixed: Draws) -> None:
        """In a graph that cuts, all rows are cut, some of them of nothing. The last row stands again in the places that are left."""
        count, cut, passes = len(given.random), len(given.cut), given.numbers.shape[1]
        if not count:
            return
        for there, here in ((fixed.random, given.random), (fixed.inverse, given.inverse), (fixed.numbers[:, :passes], given.numbers)):  # fmt: skip
            there[:count].copy_(here)
            there[count:].copy_(here[-1:].expand_as(there[count:]))
        for bounds, given_bounds, off in (
            (fixed.top_k, given.top_k, self._vocabulary), (fixed.top_p, given.top_p, 1), (fixed.min_p, given.min_p, 0)
        ):  # fmt: skip
            if bounds is None:
                continue
            bounds.fill_(off)
            if given_bounds is not None:
                bounds[:cut].copy_(given_bounds)
                if cut == count:
                    bounds[cut:].copy_(given_bounds[-1:].expand_as(bounds[cut:]))

    @staticmethod
    def _pad(fixed: Pass, rows: int) -> None:
        tensors = fixed.tensors
        tensors.slots[rows:].fill_(-1)
        tensors.ends[rows:].zero_()
        tensors.starts[rows:].fill_(rows)
        for tensor in (fixed.ids, fixed.positions):
            tensor[:, rows:].zero_()
        fixed.live[rows:].fill_(False)
