"""Several models on one device whose host is played: loaded on demand, unloaded for others, waited for and refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.brain.decide import Brain, Commands
from hexrt.brain.engines import CHUNK_NS, Engines
from hexrt.brain.models import ModelSource
from hexrt.brain.shelf import AGAIN_NS
from hexrt.brain.view import Device
from hexrt.config import Cpu
from hexrt.core import DeviceKind, TaskState
from hexrt.errors import BadRequest, ErrorRecord
from hexrt.events import CancelRequested, Failed
from hexrt.protocol.host import (
    Chunk,
    Chunked,
    Copied,
    Copy,
    HostFailed,
    HostFinished,
    LoadModel,
    ToHost,
    Token,
    UnloadModel,
)
from hexrt.runtime.answers import status_of
from hexrt.runtime.entities import Run
from hexrt.runtime.weights import weights_budgets
from hexrt.scheduling.cost import CostModel
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import Workflow
from tests.llm_desk import PAGE_BYTES, keeper_of
from tests.notation import OPS, finished, place, states, submit, table, workflow

pytestmark = pytest.mark.timeout(60)
SECOND = 1_000_000_000
MIB = 1 << 20
ERROR = ErrorRecord("unavailable", "its folder holds no safetensors", "params.model")

_numbers = itertools.count()


def decode(tokens: int = 1, model: str = "a", **more: Any) -> dict[str, Any]:
    """A step that goes on from a prompt of twenty tokens, another one each time."""
    start = 100 * next(_numbers)
    prefix = {"ids": list(range(start, start + 20)), "prompt_tokens": 20}
    return {"op": "llm.decode", "inputs": {"prefix": prefix}, "params": {"model": model, "max_tokens": tokens}} | more


def run_of(**steps: dict[str, Any]) -> Workflow:
    return workflow(", ".join(steps), **steps)


class Host:
    """One device whose host is played; a model's load takes a second. `hold` are models whose chunks it keeps."""

    def __init__(self, budget_mib: int = 10, **sizes: int) -> None:
        self.runs = table()
        models = {name: ModelSource(name, "float32", weight_bytes=mib * MIB) for name, mib in sizes.items()}
        keeper = keeper_of(frames=64)
        self.brain = Brain(self.runs, CostModel(), Engines(models, keeper, 64, 1, {"cpu:0": budget_mib * MIB}))
        self.device = Device("cpu:0", DeviceKind.CPU, 64, "cpu:0", ready=True)
        self.brain.add_device(self.device)
        self.brain.add_device(Device("pool:0", DeviceKind.POOL, 64, "pool"))  # never ready: its steps are ended by hand
        self.sizes = {name: mib * MIB for name, mib in sizes.items()}
        self.real: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self.broken: dict[str, ErrorRecord] = {}
        self.hold: set[str] = set()
        self.held: list[Chunk] = []
        self.log: list[str] = []
        self.now = SECOND

    def submit(self, **steps: dict[str, Any]) -> Run:
        return submit(self.runs, run_of(**steps), at_ns=self.now)

    def decide(self) -> Commands:
        commands = self.brain.decide(self.now)
        for event in commands.events:
            self.runs.apply(event)
        return commands

    def serve(self, commands: Commands) -> None:
        for message in commands.send.get("cpu:0", []):
            self.do(message)

    def do(self, message: ToHost) -> None:
        engines, command = self.brain.engines, getattr(message, "command", 0)
        if isinstance(message, LoadModel):
            self.log.append(f"+{message.model}")
            self.now += SECOND
            if (error := self.broken.get(message.model)) is not None:
                engines.command_failed(self.device, HostFailed(command, 0, self.now, self.now, error))
                return
            size = self.real.get(message.model, self.sizes[message.model])
            said = {"page_bytes": PAGE_BYTES, "context_tokens": 64, "weight_bytes": size, "digest": self.digests.get(message.model, "")}  # fmt: skip
            done = HostFinished(command, 0, self.now - SECOND, self.now, msgspec.Raw(msgspec.msgpack.encode(said)))
            engines.finished(self.device, done)
        elif isinstance(message, UnloadModel):
            self.log.append(f"-{message.model}")
            engines.finished(self.device, HostFinished(command, 0, self.now, self.now, msgspec.Raw(b"\xc0")))
        elif isinstance(message, Copy):
            size = sum(piece.pages * piece.page_bytes for piece in message.pieces)
            engines.report(self.device, Copied(command, self.now, self.now, size))
        elif isinstance(message, Chunk):
            if message.model in self.hold:
                self.held.append(message)
            else:
                self.answer(message)

    def answer(self, chunk: Chunk) -> None:
        tokens = tuple(Token(row.sequence, (7,), "x", "length") for row in chunk.sequences)
        self.brain.engines.report(self.device, Chunked(chunk.command, self.now, self.now + 1, tokens))

    def let_go(self) -> None:
        """What was kept is answered."""
        self.hold.clear()
        held, self.held = self.held, []
        for chunk in held:
            self.answer(chunk)

    def run(self, turns: int = 12) -> str:
        """Plays some turns; what was loaded and unloaded in them."""
        before = len(self.log)
        for _ in range(turns):
            self.serve(self.decide())
        return " ".join(self.log[before:])

    def waits(self, run: Run) -> str:
        return status_of(run, self.now, self.brain.engines.waits_for).steps[0].waits


def test_models_are_loaded_on_demand_and_unloaded_when_another_needs_their_room() -> None:
    host = Host(a=6, b=6, c=3)
    runs = [host.submit(s=decode(model=m)) for m in "a"]
    assert host.run() == "+a"
    runs += [host.submit(s=decode(model=m)) for m in "c"]
    assert host.run() == "+c"
    runs += [host.submit(s=decode(model=m)) for m in "ba"]
    assert host.run() == "-a +b", "the one that was there was used at once"
    runs += [host.submit(s=decode(model=m)) for m in "a"]
    assert host.run() == "-b +a"
    assert all(states(run) == {"s": "done"} for run in runs)


def test_a_model_in_use_is_waited_for_by_name_and_makes_way_after_a_while() -> None:
    host = Host(a=6, b=6)
    host.hold.add("a")
    first, second = host.submit(s=decode()), None
    assert host.run() == "+a"
    second = host.submit(s=decode(model="b"))
    assert host.run() == "" and host.waits(second) == (
        "the model 'b' to be loaded, 6 MiB of 10 MiB on cpu:0; held by 'a': 6 MiB"
    )
    beside = host.submit(s=decode())
    assert host.run() == "" and host.waits(beside) == "", "nobody has waited for long: it joins"
    host.now += 3 * SECOND
    assert host.run() == "", "it is asked to make way"
    late = host.submit(s=decode())
    assert host.run() == "" and host.waits(late) == "the model 'a' to be loaded again: it makes way for 'b'"
    host.let_go()
    assert host.run(3) == "-a +b", "what it had is done, what came later waits"
    assert states(first) == states(beside) == {"s": "done"} and states(late) != {"s": "done"}
    assert host.run() == "-b +a"
    assert states(second) == states(late) == {"s": "done"}


def test_a_model_goes_on_admitting_when_nobody_waits_any_more() -> None:
    host = Host(a=6, b=6)
    host.hold.add("a")
    host.submit(s=decode())
    host.run()
    second = host.submit(s=decode(model="b"))
    host.run()
    host.now += 3 * SECOND
    host.run()
    late = host.submit(s=decode())
    assert host.run() == "" and host.waits(late)
    host.runs.apply(CancelRequested(second.id, 1, 1, host.now, ""))
    assert host.run() == "" and host.waits(late) == ""
    host.let_go()
    assert host.run() == "" and states(late) == {"s": "done"} and states(second) == {"s": "cancelled"}


def test_a_conversation_goes_on_from_its_pages_after_its_model_was_unloaded() -> None:
    host = Host(a=6, b=6)
    run = host.submit(x=decode(), y=decode(inputs={"prefix": {"$ref": "x"}}, after=("gate",)), gate={"op": "noop"})
    assert host.run() == "+a" and states(run)["x"] == "done" and states(run)["y"] == "waiting"
    other = host.submit(s=decode(model="b"))
    assert host.run() == "-a +b" and states(other) == {"s": "done"}
    assert host.brain.engines.statistics()["cpu:0_a_retained"] == 1, "pages need no weights"
    _pass_gate(host, run)
    assert host.run() == "-b +a" and states(run)["y"] == "done"
    assert host.brain.engines.statistics()["cpu:0_a_shared_tokens"] == 20
    assert next(host.brain.engines.engines()).is_idle


def test_pages_of_other_weights_are_not_gone_on_from() -> None:
    host = Host(a=6, b=6)
    host.digests["a"] = "of yesterday"
    run = host.submit(x=decode(), y=decode(inputs={"prefix": {"$ref": "x"}}, after=("gate",)), gate={"op": "noop"})
    host.run()
    host.submit(s=decode(model="b"))
    host.run()
    host.digests["a"] = "of today"
    _pass_gate(host, run)
    assert host.run() == "-b +a" and states(run)["y"] == "done"
    assert host.brain.engines.statistics()["cpu:0_a_shared_tokens"] == 0


def _pass_gate(host: Host, run: Run) -> None:
    host.runs.apply(finished(place(host.runs, run, "gate")))


def test_a_model_larger_than_the_budget_is_refused_at_submit_with_what_to_change() -> None:
    host = Host(a=6, big=11)
    for model, refused in (("a", False), ("big", True), ("nobody", False)):
        graph = check_workflow(run_of(s=decode(model=model)), OPS, GraphLimits(), 600.0)
        if not refused:
            host.brain.check_runnable(graph)
            continue
        with pytest.raises(BadRequest) as raised:
            host.brain.check_runnable(graph)
        assert raised.value.where == "steps.s.params.model"
        for word in ("'big' take 11 MiB", "10 MiB together", "cpu.weights_mib"):
            assert word in raised.value.message


def test_a_model_that_turns_out_larger_than_the_budget_fails_its_steps_and_is_not_loaded_again() -> None:
    host = Host(a=6, b=2)
    host.real["a"] = 12 * MIB
    run = host.submit(s=decode())
    assert host.run() == "+a -a" and states(run) == {"s": "failed"}
    error = run.steps[0].error
    assert error is not None and "'a' take 12 MiB" in error.message and "cpu.weights_mib" in error.message
    again, other = host.submit(s=decode()), host.submit(s=decode(model="b"))
    assert host.run() == "+b" and (states(again), states(other)) == ({"s": "failed"}, {"s": "done"})


def test_models_that_turn_out_larger_than_thought_take_turns_once_they_are_too_large_together() -> None:
    host = Host(a=5, b=5)
    host.real["b"] = 7 * MIB
    host.hold.add("a")
    first, second = host.submit(s=decode()), host.submit(s=decode(model="b"))
    assert sorted(host.run().split()) == ["+a", "+b", "-b"], "the one that was idle makes way"
    host.let_go()
    host.hold = {"b"}
    third = host.submit(s=decode(model="b"))
    assert host.run() == "-a +b" and states(first) == states(second) == {"s": "done"}
    late = host.submit(s=decode())
    assert host.run() == "" and "held by 'b': 7 MiB" in host.waits(late)
    host.let_go()
    assert host.run() == "-b +a" and states(third) == states(late) == {"s": "done"}


def test_a_load_that_fails_fails_the_steps_that_wait_and_no_others_and_is_tried_again_later() -> None:
    host = Host(a=6, b=2)
    host.broken["a"] = ERROR
    runs = [host.submit(s=decode(model=m)) for m in "aab"]
    assert sorted(host.run().split()) == ["+a", "+b"]
    assert [states(run)["s"] for run in runs] == ["failed", "failed", "done"]
    second = host.submit(s=decode())
    assert host.run() == "+a" and states(second) == {"s": "failed"}
    third = host.submit(s=decode())
    assert host.run() == "" and states(third) == {"s": "failed"}
    error = third.steps[0].error
    assert error is not None and "no safetensors (tried 0 s ago, 2 times in a row; tried again in 5 s)" in error.message
    assert [run.steps[0].error.where for run in (runs[0], third) if run.steps[0].error] == ["s.params.model"] * 2
    host.now += AGAIN_NS
    del host.broken["a"]
    fourth = host.submit(s=decode())
    assert host.run() == "+a" and states(fourth) == {"s": "done"}


def test_when_its_host_dies_every_model_of_a_device_is_loaded_again_on_demand() -> None:
    host = Host(a=6, b=4)
    host.submit(s=decode(), t=decode(model="b"))
    assert sorted(host.run().split()) == ["+a", "+b"]
    waits = host.submit(s=decode())
    commands = host.decide()
    host.device.ready = False
    for command, task in list(host.device.window.items()):
        host.device.drop(command)
        lost = ErrorRecord("device_lost", "it died")
        at = task.start_ns
        host.runs.apply(
            Failed(task.run.id, task.step.node.index, task.part, task.attempt, "cpu:0", at, at, lost, False)
        )
    host.brain.engines.device_lost("cpu:0")
    assert commands.send and host.brain.engines.loading.shelf("cpu:0").used_bytes == 0
    host.device.ready = True
    assert host.run() == "+a" and states(waits) == {"s": "done"}


def test_what_waits_for_a_model_is_cancelled_at_once() -> None:
    host = Host(a=6)
    run = host.submit(s=decode())
    load = host.decide()
    host.runs.apply(CancelRequested(run.id, 1, 1, host.now, ""))
    host.decide()
    assert run.steps[0].tasks[0].state is TaskState.CANCELLED
    host.serve(load)
    assert host.run() == "" and host.brain.engines.loading.shelf("cpu:0").used_bytes == 6 * MIB


def test_a_model_that_a_server_answers_for_takes_no_weights_anywhere() -> None:
    host = Host(a=6)
    host.brain.engines.loading._models = {
        "far": ModelSource("", "float32", weight_bytes=99 * MIB, endpoint="http://h/v1")
    }
    graph = check_workflow(run_of(s=decode(model="far")), OPS, GraphLimits(), 600.0)
    host.brain.engines.loading.check(graph.nodes[0], host.brain.engines.keeper, ["endpoint:far"])
    assert host.brain.engines.loading.devices == ["cpu:0"]


def test_the_budget_is_what_the_config_says_or_half_of_the_machines_memory() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert weights_budgets(Cpu(weights_mib=3)) == {"cpu:0": 3 * MIB}
    assert weights_budgets(Cpu()) == {"cpu:0": pytest.approx(total / 2, abs=8192)}
    assert weights_budgets(Cpu(enabled=False)) == {}


def test_a_host_that_does_not_end_unloading_is_taken_for_hung() -> None:
    host = Host(a=6, b=6)
    host.submit(s=decode())
    host.run()
    host.submit(s=decode(model="b"))
    (unload,) = [m for m in host.decide().send["cpu:0"] if isinstance(m, UnloadModel)]
    assert host.brain.engines.limit_ns("cpu:0", unload.command) == CHUNK_NS
