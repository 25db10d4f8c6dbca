"""The inputs of a pass, in tensors that live as long as the engine, filled from Python by one copy each and moved on by the device itself.

Owns the buffers. `fill` writes a pass and returns views of them, valid until the next `fill`; `advance` makes the next decode pass out of
the tokens that this one drew, without the host. The shapes are those of the pass, nothing is padded. Rows that fill up a captured bucket (see
`engine_graphs`) are not `live`: they end at 0, and their slots stay negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hexrt.kernels.attention import PassTensors
from hexrt.llm.engine_sampling import LEAST_TEMPERATURE, Drawn, Draws, uniform
from hexrt.protocol.host import Sampling

Numbers = np.ndarray[Any, np.dtype[Any]]
FIRST_ROOM = 64
SEEDS = (1 << 63) - 1


class Column:
    """A tensor that grows by doubling and is otherwise the same memory at every `fill`. [room, *shape]"""

    def __init__(self, dtype: torch.dtype, device: torch.device, *shape: int) -> None:
        self._dtype, self._device, self._shape = dtype, device, shape
        self._grow(FIRST_ROOM)

    def _grow(self, room: int) -> None:
        self._tensor = torch.zeros((room, *self._shape), dtype=self._dtype, device=self._device)
        pinned = self._device.type == "cuda"
        # Where the device is the CPU, what the host writes is the tensor itself.
        staged = torch.zeros((room, *self._shape), dtype=self._dtype, pin_memory=True) if pinned else self._tensor
        self._staged = staged if pinned else None
        self._host: Numbers = staged.numpy()

    def view(self, count: int) -> Tensor:
        """The first `count`, as they are."""
        if count > len(self._tensor):
            self._grow(max(count, 2 * len(self._tensor)))
        return self._tensor[:count]

    def fill(self, values: Sequence[Any] | Numbers) -> Tensor:
        count = len(values)
        view = self.view(count)
        if count:
            self._host[:count] = values
            self.send(count)
        return view

    def host(self, count: int) -> Numbers:
        """The host's side of the first `count`, to write into before `send`."""
        self.view(count)
        return self._host[:count]

    def send(self, count: int) -> Tensor:
        if self._staged is not None:
            self._tensor[:count].copy_(self._staged[:count], non_blocking=True)
        return self._tensor[:count]


@dataclass(frozen=True, slots=True)
class DrawRow:
    """How one row is drawn. `number`: of the answer position that is drawn; `slot`: of `seen`, where a penalty is on."""

    sampling: Sampling
    number: int
    slot: int = -1
    allow: Callable[[int, int], None] | None = None  # writes what its grammar allows: address, bytes


GREEDY = DrawRow(Sampling(0.0, 0, 1.0, 0, (), 1), 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a pass: its tokens `ids` stand from `start` on. `frames`: int32, its page table. `draws`: the logits after its last token are wanted."""

    ids: Sequence[int]
    frames: Numbers
    start: int
    draws: DrawRow | None = None


@dataclass(slots=True)
class Pass:
    """What a forward pass and its draws are computed from. All tensors on the device."""

    ids: Tensor  # int64 [1, tokens]
    positions: Tensor  # int64 [1, tokens]
    tensors: PassTensors
    keep: Tensor  # int64 [draws]: the tokens whose logits are wanted
    live: Tensor  # bool [rows]: rows of a sequence
    draws: Draws
    drawing: int  # rows whose draws count
    decodes: bool  # every row is one token that draws: `advance` may follow


class PassBuffers:
    """The buffers of one model's passes. `page_tokens`: of its pages; `words`: of a grammar's bits."""

    def __init__(self, device: torch.device, vocabulary: int, page_tokens: int) -> None:
        self.vocabulary, self.page_tokens = vocabulary, page_tokens

        def column(dtype: torch.dtype, *shape: int) -> Column:
            return Column(dtype, device, *shape)

        whole, short, real, double = torch.int64, torch.int32, torch.float32, torch.float64
        self._ids, self._positions, self._slots, self._keep = (column(whole) for _ in range(4))
        self._tables, self._starts, self._ends = (column(short) for _ in range(3))
        self._live = column(torch.bool)
        self._random, self._cut, self._penalised, self._seen_slots, self._masked, self._reported = (column(whole) for _ in range(6))  # fmt: skip
        self._inverse, self._min_p, self._penalty = (column(real, 1) for _ in range(3))
        self._top_k, self._seeds, self._counters = (column(whole, 1) for _ in range(3))
        self._top_p = column(double, 1)
        self._numbers = column(double)
        self._bits = column(short, -(-vocabulary // 32))
        self._step = torch.zeros(1, dtype=whole, device=device)
        self._offsets = torch.zeros((1, 0), dtype=whole, device=device)
        self.seen = Seen(device, vocabulary)

    def fill(self, rows: Sequence[Row], passes: int = 1) -> Pass:
        """The pass over `rows`, those of one token first, with drawn numbers and page tables for `passes` - 1 more that `advance` makes."""
        counts = np.array([len(row.ids) for row in rows], np.int64)
        tokens = int(counts.sum())
        drawing = [row.draws for row in rows if row.draws is not None]
        lasts = (np.cumsum(counts) - 1).tolist()
        return Pass(
            self._ids.fill(np.fromiter((token for row in rows for token in row.ids), np.int64, tokens))[None],
            self._positions.view(tokens)[None],
            self._place(rows, counts, passes),
            self._keep.fill([last for row, last in zip(rows, lasts, strict=True) if row.draws is not None]),
            self._live.fill([True] * len(rows)),
            self.draws(drawing, passes),
            len(drawing),
            tokens == len(rows) == len(drawing),
        )

    def _place(self, rows: Sequence[Row], counts: Numbers, passes: int) -> PassTensors:
        """Fills `_positions` too."""
        page, size = self.page_tokens, len(rows)
        starts = np.zeros(size + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        first = np.array([row.start for row in rows], np.int64)
        ends = first + counts
        wanted = -(-(int(ends.max(initial=0)) + passes - 1) // page)
        width = max(1, min(wanted, max((len(row.frames) for row in rows), default=1)))
        tables = self._tables.host(size * width).reshape(size, width)
        for at, row in enumerate(rows):
            used = row.frames[:width]
            tables[at, : len(used)] = used
        of = np.repeat(np.arange(size), counts)
        positions = np.arange(int(starts[-1])) - (starts[:-1] - first)[of]
        slots = tables[of, positions // page].astype(np.int64) * page + positions % page
        self._positions.fill(positions)
        return PassTensors(
            self._slots.fill(slots),
            self._tables.send(size * width).view(size, width),
            self._starts.fill(starts),
            self._ends.fill(ends),
            int(counts.max(initial=1)),
        )

    # --- how its rows are drawn -------------------------------------------------------------------------------------

    def draws(self, rows: Sequence[DrawRow], passes: int = 1) -> Draws:
        random = [at for at, row in enumerate(rows) if row.sampling.temperature > 0]
        # Those that are cut stand first.
        random.sort(key=lambda at: not _is_cut(rows[at].sampling))
        chosen = [rows[at] for at in random]
        cut = [row.sampling for row in chosen if _is_cut(row.sampling)]
        penalised = [at for at, row in enumerate(rows) if row.slot >= 0]
        masked = [at for at, row in enumerate(rows) if row.allow is not None]
        reported = [at for at, row in enumerate(rows) if row.sampling.logprobs >= 0]
        size = self.vocabulary
        return Draws(
            random=self._random.fill(random),
            inverse=self._inverse.fill([[1 / max(r.sampling.temperature, LEAST_TEMPERATURE)] for r in chosen]),
            numbers=self._uniform(chosen, passes),
            step=self._step.zero_(),
            cut=self._cut.fill(range(len(cut))),
            top_k=self._top_k.fill([[s.top_k or size] for s in cut]) if any(s.top_k for s in cut) else None,
            top_p=self._top_p.fill([[s.top_p] for s in cut]) if any(s.top_p < 1 for s in cut) else None,
            min_p=self._min_p.fill([[s.min_p] for s in cut]) if any(s.min_p for s in cut) else None,
            penalised=self._penalised.fill(penalised),
            penalty=self._penalty.fill([[rows[at].sampling.repetition_penalty] for at in penalised]),
            slots=self._seen_slots.fill([rows[at].slot for at in penalised]),
            seen=self.seen.pool,
            masked=self._masked.fill(masked),
            bits=self.allow([rows[at] for at in masked]),
            reported=self._reported.fill(reported),
            top=max((rows[at].sampling.logprobs for at in reported), default=0),
        )

    def allow(self, rows: Sequence[DrawRow]) -> Tensor:
        """What the grammars of `rows`, all that have one, allow next: for `Draws.bits`, where it lies already if they are those of the last `fill`."""
        if not rows:
            return self._bits.view(0)
        bits = self._bits.host(len(rows))
        for at, row in enumerate(rows):
            assert row.allow is not None
            row.allow(bits[at].ctypes.data, bits[at].nbytes)
        return self._bits.send(len(rows))

    def _uniform(self, rows: Sequence[DrawRow], passes: int) -> Tensor:
        numbers = self._numbers.view(len(rows) * passes).view(len(rows), passes)
        if rows:
            if self._offsets.shape[1] < passes:
                self._offsets = torch.arange(passes, device=self._step.device)[None]
            seeds = self._seeds.fill([[row.sampling.seed & SEEDS] for row in rows])
            counters = self._counters.fill([[row.number] for row in rows])
            numbers.copy_(uniform(seeds, counters + self._offsets[:, :passes]))
        return numbers


def _is_cut(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0


def advance(step: Pass, drawn: Drawn, page_tokens: int) -> None:
    """Turns a decode pass into the next one: the drawn tokens are read, one place further on. Frames for them are in the tables already."""
    tensors = step.tensors
    step.ids.copy_(drawn.tokens[:1])
    step.positions.add_(step.live)
    tensors.ends.add_(step.live)
    at, inside = step.positions[0] // page_tokens, step.positions[0] % page_tokens
    frames = tensors.tables.gather(1, at.clamp_max(tensors.tables.shape[1] - 1).unsqueeze(1)).squeeze(1)
    tensors.slots.copy_(torch.where(step.live, frames * page_tokens + inside, -1))
    step.draws.step.add_(1)


class Seen:
    """What the prompts and answers of sequences under a repetition penalty hold: one row of `pool` each, in slots that are used again."""

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        self.pool = torch.zeros((0, vocabulary), dtype=torch.bool, device=device)
        self._free: list[int] = []

    def take(self, tokens: Sequence[int]) -> int:
        """A slot that holds these `tokens`, all of the vocabulary."""
        if not self._free:
            size = len(self.pool)
            self.pool = torch.cat((self.pool, self.pool.new_zeros((max(4, size), self.pool.shape[1]))))
            self._free = list(range(len(self.pool) - 1, size - 1, -1))
        slot = self._free.pop()
        self.pool[slot] = False
        self.pool[slot, torch.tensor(tokens, dtype=torch.int64, device=self.pool.device)] = True
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
