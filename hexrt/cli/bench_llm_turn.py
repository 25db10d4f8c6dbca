"""What a chunk of an LLM costs in the daemon: its report taken in and the next one composed, with the real brain and no host.

Owns the measurement; moves no bytes and starts nothing. A turn is what the daemon does between a chunk's report and the sending of a further chunk,
but for the socket, the store and the clients: the frame's decoding, the facts and their applying, the decision, the messages' encoding.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines
from hexrt.brain.models import ModelSource
from hexrt.brain.view import Device
from hexrt.core import DeviceKind, Durability
from hexrt.errors import InvariantViolation
from hexrt.events import Submitted
from hexrt.memory.keeper import Keeper
from hexrt.memory.lru import NextUse
from hexrt.memory.pool import PagePool
from hexrt.ops.registry import load_ops
from hexrt.protocol.host import Chunk, Chunked, FromHost, HostFinished, LoadModel, Token
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import CostModel
from hexrt.scheduling.links import Links
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import StepSpec, Workflow

DEVICE, MODEL = "cpu:0", "bench"
PAGE_BYTES = 360 << 10
CONTEXT, PROMPT, PASSES, BUDGET = 8192, 481, 4, 512
TURNS, WARM = 200, 20


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Processor milliseconds a chunk: medians, and the 99th percentile of the whole."""

    decided_ms: float  # report and decide alone
    whole_ms: float  # with facts applied, and frames decoded and encoded
    worst_ms: float


class _Daemon:
    """`sequences` conversations, each a run of one step, on a device whose chunks are answered at once."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.now_ns = 1
        self.queue: list[Chunk] = []
        ops = load_ops()[0]
        self.runs = RunTable(lambda w: check_workflow(w, ops, GraphLimits(), 600.0))
        keeper = Keeper(PagePool(NextUse()), Links())
        answer = PASSES * (TURNS + WARM + 2 * (8 + sequences * PROMPT // BUDGET))
        keeper.add_device(DEVICE, 2 * self.sequences * (PROMPT + answer) // 16 * PAGE_BYTES)
        source = ModelSource(MODEL, "float32", PAGE_BYTES, CONTEXT)
        self.brain = Brain(self.runs, CostModel(), Engines({MODEL: source}, keeper, BUDGET, PASSES))
        self.device = Device(DEVICE, DeviceKind.CPU, 2 * self.sequences, DEVICE, ready=True)
        self.brain.add_device(self.device)
        for number in range(self.sequences):
            ids = list(range(number * PROMPT, (number + 1) * PROMPT))
            step = StepSpec("a", "llm.decode", {"max_tokens": answer, "ignore_eos": True}, {"prefix": {"ids": ids, "prompt_tokens": PROMPT}})  # fmt: skip
            run = os.urandom(16)
            self.runs.apply(Submitted(run, 1000, 1000, Durability.SYNC, 1, 1, Workflow((step,))))
            self.runs.runs[run].watched = True

    def decide(self) -> list[Any]:
        self.now_ns += 1000
        commands = self.brain.decide(self.now_ns)
        for event in commands.events:
            self.runs.apply(event)
        self.runs.changes.clear()
        return commands.send.get(DEVICE, [])

    def begin(self) -> None:
        """Until every sequence decodes."""
        for message in self.decide():
            if isinstance(message, LoadModel):
                said = msgspec.msgpack.encode({"page_bytes": PAGE_BYTES, "context_tokens": CONTEXT})
                self.brain.engines.finished(self.device, HostFinished(message.command, 0, 1, 2, msgspec.Raw(said)))
        self.queue += _chunks(self.decide())
        while not all(self._decodes(chunk) for chunk in self.queue):
            self.brain.engines.report(self.device, _answer(self.queue.pop(0), self.now_ns))
            self.queue += _chunks(self.decide())

    def _decodes(self, chunk: Chunk) -> bool:
        return len(chunk.sequences) == self.sequences and not any(row.ids for row in chunk.sequences)

    def turn(self) -> tuple[float, float]:
        """Processor seconds of one turn: report and decide alone, and all of it."""
        chunk = self.queue.pop(0)
        if not self._decodes(chunk):
            raise InvariantViolation("a turn of other sequences than those that are measured")
        frame = msgspec.msgpack.encode([1, [_answer(chunk, self.now_ns)]])
        engines, clock = self.brain.engines, time.thread_time
        start = clock()
        (report,) = _decoder.decode(frame)[1]
        decoded = clock()
        engines.report(self.device, report)
        self.now_ns += 1000
        commands = self.brain.decide(self.now_ns)
        decided = clock()
        for event in commands.events:
            self.runs.apply(event)
        msgspec.msgpack.encode(commands.send.get(DEVICE, []))
        end = clock()
        self.runs.changes.clear()
        self.queue += _chunks(commands.send.get(DEVICE, []))
        return decided - decoded, end - start


_decoder = msgspec.msgpack.Decoder(tuple[int, list[FromHost]])


def _chunks(messages: list[Any]) -> list[Chunk]:
    return [message for message in messages if isinstance(message, Chunk)]


def _answer(chunk: Chunk, now_ns: int) -> Chunked:
    """What a host says of a chunk: a token a pass for each sequence that draws."""
    tokens = tuple(
        Token(row.sequence, (7,) * chunk.passes, " word" * chunk.passes, "")
        for row in chunk.sequences
        if row.last or not row.ids
    )
    return Chunked(chunk.command, now_ns, now_ns + 50_000_000, tokens)


def measure_turn(sequences: int = 64, turns: int = TURNS) -> TurnCost:
    """Of chunks in which `sequences` sequences decode."""
    daemon = _Daemon(sequences)
    daemon.begin()
    for _ in range(min(WARM, turns)):
        daemon.turn()
    gc.collect()
    took = [daemon.turn() for _ in range(turns)]
    whole = sorted(each for _, each in took)
    decided = statistics.median(each for each, _ in took)
    return TurnCost(decided * 1e3, statistics.median(whole) * 1e3, whole[len(whole) * 99 // 100] * 1e3)
