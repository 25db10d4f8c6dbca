"""The NPU host without an NPU: the CPU provider behind the same queue, and said so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from hexrt.devices.npu import MAX_QUEUED
from hexrt.devices.npu_provider import choose_provider
from hexrt.devices.onnx import CPU, Execution, Target
from hexrt.errors import Cancelled, Unavailable
from hexrt.protocol.host import (
    Binding,
    Cancel,
    Chunk,
    HostFailed,
    HostFinished,
    HostStarted,
    Launch,
    LoadModel,
    Withdraw,
)
from hexrt.values import NIL, decode
from tests.bodies import IMAGES, Machine, launch, need_models
from tests.npu_host import NpuHost

MANY = ["some text " * 100] * 20_000
"""Takes minutes: something to cancel."""


@pytest.fixture(autouse=True)
def models() -> None:
    need_models("minilm", "efficientnet-lite0")


def finished(host: NpuHost, command: int) -> HostFinished:
    report = host.next()
    assert isinstance(report, HostFinished) and report.command == command, report
    assert 0 < report.start_ns < report.end_ns
    return report


def failed(host: NpuHost, command: int, kind: str) -> HostFailed:
    report = host.next()
    assert isinstance(report, HostFailed) and (report.command, report.error.kind) == (command, kind), report
    return report


def long_launch(command: int) -> Launch:
    return msgspec.structs.replace(launch("embed.text", {}, {"texts": MANY}, command=command), report_start=True)


def test_the_cpu_serves_the_queue_and_the_facts_say_so(tmp_path: Path) -> None:
    with NpuHost(tmp_path, provider="", threads=1) as host:
        facts = host.ready.facts
        assert (facts["provider"], facts["npu"]) == (CPU, False)
        assert "no NPU" in facts["why"] or "finds no NPU" in facts["why"]
        assert facts["threads"] == 1


def test_steps_give_on_the_host_what_they_give_on_the_pool(tmp_path: Path) -> None:
    texts = ["one", "a second and longer text", ""]
    picture = (IMAGES / "cat.jpg").read_bytes()
    with NpuHost(tmp_path) as host:
        host.send(launch("embed.text", {}, {"texts": texts}), launch("image.encode", {}, {"image": picture}, command=2))
        vectors = decode(finished(host, 1).output)
        seen = decode(finished(host, 2).output)
    pool = Machine(tmp_path)
    assert vectors.tobytes() == pool.run("embed.text", {}, {"texts": texts}).tobytes()
    assert seen["labels"] == pool.run("image.encode", {}, {"image": picture})["labels"]


def test_a_launch_takes_the_output_of_one_before_it_in_the_same_frame(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        for round_ in range(3):
            first, second, third = 3 * round_ + 1, 3 * round_ + 2, 3 * round_ + 3
            host.send(
                launch("embed.text", {}, {"texts": "x"}, command=first),
                launch("noop", {}, {"value": None}, command=second, bindings=(Binding(("value",), (), NIL, first),)),
                launch("noop", {}, {"value": [0]}, command=third, bindings=(Binding(("value", 0), (), NIL, second),)),
            )
            vectors = decode(finished(host, first).output)
            assert (decode(finished(host, second).output) == vectors).all()
            assert (decode(finished(host, third).output)[0] == vectors).all()


def test_a_failing_launch_fails_alone_and_drops_what_needs_its_output(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(
            launch("embed.text", {}, {"texts": []}),
            launch("noop", {}, {"value": None}, command=2, bindings=(Binding(("value",), (), NIL, 1),)),
            launch("noop", {}, {"value": None}, command=3, bindings=(Binding(("value",), (), NIL, 2),)),
            launch("noop", {}, {"value": "unrelated"}, command=4),
            msgspec.structs.replace(launch("noop", command=5), op="no.such.op"),
        )
        assert failed(host, 1, "bad_request").error.where == "s.inputs.texts"
        assert decode(finished(host, 4).output) == "unrelated"
        assert "no.such.op" in failed(host, 5, "unavailable").error.message
        host.send(launch("noop", {}, {"value": 6}, command=6))
        assert decode(finished(host, 6).output) == 6


def test_a_running_launch_is_cancelled_and_the_next_one_runs(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(long_launch(1), launch("noop", {}, {"value": "next"}, command=2))
        assert isinstance(host.next(), HostStarted)
        assert host.cell[0] == 1
        host.send(Cancel(1))
        failed(host, 1, "cancelled")
        assert decode(finished(host, 2).output) == "next"


def test_a_waiting_launch_is_cancelled_with_a_report_and_withdrawn_without_one(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(long_launch(1), launch("noop", command=2), launch("noop", command=3), launch("noop", command=4))
        host.next()
        host.send(Cancel(2), Withdraw(3), Withdraw(1), Cancel(77))
        failed(host, 2, "cancelled")
        host.send(Cancel(1))
        failed(host, 1, "cancelled")  # a running one is not withdrawn
        finished(host, 4)
        host.send(Cancel(4), launch("noop", command=5), Withdraw(5), launch("noop", command=6))
        finished(host, 6)


def test_a_full_queue_refuses_by_name_and_loses_nothing(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(long_launch(1))
        host.next()
        host.send(*(launch("noop", command=c) for c in range(2, MAX_QUEUED + 5)))
        for command in range(MAX_QUEUED + 2, MAX_QUEUED + 5):
            assert "try again later" in failed(host, command, "overloaded").error.message
        host.send(Cancel(1))
        failed(host, 1, "cancelled")
        for command in range(2, MAX_QUEUED + 2):
            finished(host, command)


def test_the_host_ends_when_the_daemon_is_gone_even_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(long_launch(1), long_launch(2))
        host.next()
    assert host.process.returncode == 0


def test_language_models_are_refused(tmp_path: Path) -> None:
    with NpuHost(tmp_path) as host:
        host.send(LoadModel(1, "m", "/nowhere", "float32", 16), Chunk(2, "m", 1, ()))
        failed(host, 1, "unavailable")
        failed(host, 2, "unavailable")


def test_a_provider_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(
        Unavailable, match=r"npu.provider is 'NoSuchProvider', which is not installed here; known are CPUExec"
    ):
        choose_provider({"provider": "NoSuchProvider"})
    target, facts = choose_provider({"provider": CPU, "threads": 2})
    assert target == Target(CPU, threads=2) and facts["why"] == "the config asks for the CPU provider"


def test_a_cancelled_execution_runs_nothing_more() -> None:
    calls: list[object] = []

    class Session:
        def run(self, names: object, feeds: object, options: object) -> list[np.ndarray]:
            calls.append(options)
            execution.cancel()  # as another thread would, in the middle of the run
            return []

    execution = Execution()
    execution.run(Session(), {})
    assert calls[0].terminate is True  # type: ignore[attr-defined]
    with pytest.raises(Cancelled):
        execution.run(Session(), {})
    assert len(calls) == 1
