"""Arrays of clients through a real daemon and its workers: equal results in every durability, over a kill, and no descriptor left."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.client import Client, shared_array
from hexrt.core import Durability
from hexrt.memory.arena import sealed_copy
from hexrt.protocol import messages as m
from hexrt.protocol.framing import FrameSplitter, frame
from hexrt.workflow.build import WorkflowBuilder
from hexrt.workflow.model import Workflow
from tests.running import Running
from tests.serving import HELLO, step, workflow


def doubled(*arrays: Any) -> Workflow:
    builder = WorkflowBuilder("w")
    for i, array in enumerate(arrays):
        made = builder.step("map.python", params={"function": "tests.hostile:double"}, inputs={"value": array})
        again = builder.step("map.python", params={"function": "tests.hostile:double"}, inputs={"value": made})
        builder.output(f"o{i}", again)
    return builder.build()


def settle(client: Client) -> None:
    """Until every device host is there, and with it the descriptors that the daemon keeps for it."""
    while any(device.state == "starting" for device in client.devices()):
        client.statistics()


def files(daemon: Running) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def test_arrays_go_through_a_daemon_and_its_workers_in_every_durability(tmp_path: Path) -> None:
    plain = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    with Running(tmp_path) as daemon, daemon.client() as client:
        settle(client)
        counts = []
        for _ in range(4):
            for durability in Durability:
                shared = shared_array((300, 400), "int64")
                shared[:] = np.arange(120_000).reshape(300, 400)
                outcome = client.run(doubled(plain, shared, plain[::2, ::3]), durability).check()
                for name, sent in (("o0", plain), ("o1", np.asarray(shared)), ("o2", plain[::2, ::3])):
                    found = outcome.outputs[name]
                    assert np.array_equal(found, 4 * sent) and found.dtype == sent.dtype and not found.flags.writeable
                again = client.result(outcome.run).outputs["o1"]
                assert np.array_equal(again, 4 * np.asarray(shared))
            counts.append(files(daemon))
        assert counts[-1] <= counts[0] + 2, counts


def test_a_durable_run_gives_the_same_arrays_after_a_kill(tmp_path: Path) -> None:
    sent = np.arange(50_000, dtype=np.complex128)
    daemon = Running(tmp_path)
    with daemon.start().client() as client:
        before = client.run(doubled(sent)).check()
        daemon.kill()
    with daemon, daemon.client() as client:
        after = client.result(before.run).check()
        assert np.array_equal(after.outputs["o0"], before.outputs["o0"])
        assert np.array_equal(after.outputs["o0"], 4 * sent)


def ask(path: Path, message: Any, fd: int) -> m.FromDaemon:
    splitter = FrameSplitter(1 << 26)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(frame(msgspec.msgpack.encode(HELLO)))
        sock.recv(1 << 16)
        data = frame(msgspec.msgpack.encode(message))
        socket.send_fds(sock, [data], [fd])
        os.close(fd)
        while True:
            for body in splitter.feed(sock.recv(1 << 16)):
                return msgspec.msgpack.decode(body, type=m.FromDaemon)  # type: ignore[return-value]


def named(handle: int) -> Any:
    return values.descriptor(handle, "uint8", (5000,))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ([named(1), named(3)], 5000),
        ([named(1)], 5000),
        ([named(1), named(2**40)], 5000),
        ([named(1), named(2)], 4999),
        ([named(1), values.descriptor(2, "float64", (5000,))], 5000),
    ],
    ids=["one that was not sent", "one less than was sent", "a host's handle", "fewer bytes", "more bytes"],
)
def test_a_workflow_that_names_other_tensors_than_came_is_refused(value: Any, size: int, daemon: Running) -> None:
    fd, offsets = sealed_copy([memoryview(bytes(5000)), memoryview(bytes(size))])
    tensors = [m.Tensor(1, offsets[0], 5000), m.Tensor(2, offsets[1], size)]
    inputs = {"value": value}
    before = files(daemon)
    for durability in ("sync", "none"):
        message = {
            "type": "submit",
            "request": 1,
            "workflow": workflow(step(inputs=inputs)),
            "tensors": tensors,
            "durability": durability,
        }
        answer = ask(daemon.socket, message, os.dup(fd))
        assert isinstance(answer, m.Refused) and answer.request == 1 and answer.error.kind == "bad_request", answer
        assert answer.error.where, answer
    os.close(fd)
    with Client(daemon.socket) as client:
        assert client.statistics()["open_runs"] == 0
    assert files(daemon) <= before + 1


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Running(tmp_path_factory.mktemp("d")) as running:
        with running.client() as client:
            settle(client)
        yield running
