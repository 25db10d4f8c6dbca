"""A sequence goes where the pages are that it goes on from."""

from __future__ import annotations

import msgspec

from hexrt.brain.decide import Brain, Commands
from hexrt.brain.engines import Engines
from hexrt.brain.models import ModelSource
from hexrt.brain.view import Device
from hexrt.core import DeviceKind, TaskState
from hexrt.protocol.host import BindPages, Chunk, Chunked, Copied, Copy, HostFinished, LoadModel, Token
from hexrt.runtime.state import RunTable
from hexrt.scheduling.cost import CostModel
from hexrt.workflow.model import Workflow
from tests.llm_desk import PAGE_BYTES, keeper_of
from tests.notation import submit, table, workflow

MODEL = msgspec.Raw(msgspec.msgpack.encode({"page_bytes": PAGE_BYTES, "context_tokens": 64}))
PREFIX = {"ids": list(range(20)), "prompt_tokens": 20}


def decodes(graph: str, **prefixes: object) -> Workflow:
    """Steps of one answer token each, from these prefixes."""
    return workflow(
        graph, **{step: {"op": "llm.decode", "inputs": {"prefix": p}, "params": {"max_tokens": 1}} for step, p in prefixes.items()}
    )  # fmt: skip


class Hosts:
    """Two devices of the LLM kind whose hosts do at once what they are told."""

    def __init__(self, runs: RunTable) -> None:
        keeper = keeper_of()
        keeper.add_device("cpu:1", 16 * PAGE_BYTES)
        self.runs = runs
        self.brain = Brain(runs, CostModel(), Engines({"m": ModelSource("m", "float32")}, keeper, 64, 1))
        for name in ("cpu:0", "cpu:1"):
            self.brain.add_device(Device(name, DeviceKind.CPU, 64, name, ready=True))

    def decide(self) -> Commands:
        commands = self.brain.decide(1)
        for event in commands.events:
            self.runs.apply(event)
        return commands

    def serve(self, commands: Commands) -> None:
        for name, messages in commands.send.items():
            device = self.brain.devices[name]
            for message in messages:
                if isinstance(message, LoadModel):
                    self.brain.engines.finished(device, HostFinished(message.command, 0, 2, 3, MODEL))
                elif isinstance(message, Copy):
                    size = sum(piece.pages * piece.page_bytes for piece in message.pieces)
                    self.brain.engines.report(device, Copied(message.command, 4, 5, size))
                elif isinstance(message, Chunk):
                    tokens = tuple(Token(row.sequence, (7,), "x", "length") for row in message.sequences)
                    self.brain.engines.report(device, Chunked(message.command, 4, 5, tokens))

    def run(self) -> None:
        for _ in range(12):
            self.serve(self.decide())


def test_a_step_goes_to_the_device_that_holds_what_it_goes_on_from_though_another_comes_first() -> None:
    hosts = Hosts(runs := table())
    submit(runs, decodes("other", other=PREFIX))
    loads = hosts.decide()
    run = submit(runs, decodes("a, b", a=PREFIX, b={"$ref": "a"}))
    commands = hosts.decide()
    first, goes_on = (step.tasks[0] for step in run.steps)
    assert first.device == "cpu:1", "the other run's is on cpu:0"
    hosts.serve(loads)
    hosts.serve(commands)
    hosts.run()
    assert first.state is TaskState.DONE and goes_on.state is TaskState.DONE
    assert goes_on.device == "cpu:1"
    shared = hosts.brain.engines.statistics()["cpu:1_m_shared_tokens"]
    assert shared == 20, "its parent's tokens were not computed again"


def test_where_nobody_has_the_pages_it_goes_to_the_device_with_the_fewest_sequences() -> None:
    hosts = Hosts(runs := table())
    devices = []
    for _ in range(4):
        run = submit(runs, decodes("a", a=PREFIX))
        commands = hosts.decide()
        devices.append(run.steps[0].tasks[0].device)
        assert not any(isinstance(m, BindPages) for messages in commands.send.values() for m in messages)
    assert devices == ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
