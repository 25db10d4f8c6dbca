"""The client library: both faces give the same answers, and say what to do when something is wrong."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.client import AsyncClient, Client, Outcome
from hexrt.core import RunState
from hexrt.errors import BadRequest, Disconnected, InvariantViolation, NotFound, Overloaded, TaskFailed
from hexrt.protocol import messages as m
from hexrt.workflow.model import StepSpec, Workflow
from tests.serving import limits, serving


def flow(*steps: StepSpec, name: str = "w") -> Workflow:
    return Workflow(steps or (StepSpec("a", "noop"),), name)


HOLD = flow(StepSpec("a", "hold"))


def test_both_faces_have_the_same_methods_with_the_same_parameters() -> None:
    def methods(face: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(face, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(Client) == methods(AsyncClient)
    assert {"submit", "run", "follow", "watch", "status", "list", "result", "cancel", "timeline", "devices"} <= set(
        methods(Client)
    )


def comparable(answer: Any) -> Any:
    if isinstance(answer, Outcome):
        return (answer.run, answer.state, dict(answer.outputs), dict(answer.errors))
    return msgspec.structs.replace(answer, request=0) if hasattr(answer, "request") else answer


async def test_both_faces_give_equal_answers(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        accepted = await client.submit(flow(StepSpec("a", "noop", inputs={"value": [1, "x"]}), StepSpec("b", "fail")))
        one = [
            await client.status(accepted), await client.list(), await client.result(accepted.hex()),
            [each async for each in client.watch(accepted)], await client.timeline(accepted), await client.devices(),
            await client.statistics(), await client.cancel(accepted), await client.shutdown(),
        ]  # fmt: skip

        def ask() -> list[Any]:
            with Client(here.path) as face:
                return [
                    face.status(accepted), face.list(), face.result(accepted.hex()), list(face.watch(accepted)),
                    face.timeline(accepted), face.devices(), face.statistics(), face.cancel(accepted), face.shutdown(),
                ]  # fmt: skip

        two = await asyncio.to_thread(ask)
        for left, right in zip(one, two, strict=True):
            if isinstance(left, list):
                assert [comparable(each) for each in left] == [comparable(each) for each in right]
            else:
                assert comparable(left) == comparable(right)
        assert one[2].state is RunState.FAILED and one[2].outputs["a"] == [1, "x"]
        with pytest.raises(TaskFailed, match="b: it was asked to fail"):
            one[2].check()


async def test_run_and_follow_give_the_outcome_in_both_faces(tmp_path: Path) -> None:
    sent = flow(StepSpec("a", "noop", inputs={"value": {"k": [True, None, 2.5]}}))
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        outcome = await client.run(sent)
        events = [event async for event in client.follow(sent)]

        def ask() -> tuple[Outcome, list[Any]]:
            with Client(here.path) as face:
                return face.run(sent), list(face.follow(sent))

        blocking, blocking_events = await asyncio.to_thread(ask)
        assert outcome.check().outputs["a"] == blocking.check().outputs["a"] == {"k": [True, None, 2.5]}
        for each in (events, blocking_events):
            assert [type(event).__name__ for event in each] == ["Accepted", "Update", "Update", "Outcome"]
            assert dict(each[-1].outputs) == {"a": {"k": [True, None, 2.5]}}
        assert here.server.open_requests == 0


async def test_a_tensor_goes_there_and_back_and_is_opened_only_when_asked_for(tmp_path: Path) -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        outcome = await client.run(flow(StepSpec("a", "noop", inputs={"value": tensor})))
        here_it_is = outcome.outputs["a"]
        assert np.array_equal(here_it_is, tensor) and here_it_is.dtype == np.float32
        assert outcome.outputs["a"] is here_it_is
        with pytest.raises(BadRequest, match="cannot be sent"):
            await client.run(flow(StepSpec("a", "noop", inputs={"value": object()})))
        assert values.decode(values.encode(tensor)).shape == (2, 3)


async def test_many_calls_of_one_async_client_go_on_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        runs = [await client.submit(HOLD) for _ in range(5)]
        waits = [asyncio.create_task(client.result(run)) for run in runs]
        assert len(await client.list(state=RunState.RUNNING)) == 5
        for run in reversed(runs):
            here.backend.release(run)
        assert [outcome.run for outcome in await asyncio.gather(*waits)] == runs


async def test_a_cancelled_call_is_ended_at_the_daemon_too(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        run = await client.submit(HOLD)
        waiting = asyncio.create_task(client.result(run))
        await client.statistics()
        assert here.server.open_requests == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.statistics()
        assert here.server.open_requests == 0 and waiting.cancelled()


async def test_a_watch_left_half_way_ends_at_the_daemon_and_the_client_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        run = await client.submit(HOLD)
        async with aclosing(client.watch(run)) as events:  # type: ignore[type-var]
            async for event in events:
                assert event.event == "started"
                break
        await client.statistics()
        assert here.server.open_requests == 0

        def ask() -> str:
            with Client(here.path) as face:
                for event in face.watch(run):
                    assert isinstance(event, m.Update)
                    assert face.status(run).summary.state is RunState.RUNNING, "other calls go on between events"
                    break
                return face.status(run).summary.name

        assert await asyncio.to_thread(ask) == "w"
        assert here.server.open_requests == 0 and not here.backend.runs[run].watchers


async def test_refusals_are_raised_by_their_kind_and_the_client_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        with pytest.raises(NotFound):
            await client.status("00" * 16)
        with pytest.raises(NotFound):
            [each async for each in client.watch("00" * 16)]
        with pytest.raises(BadRequest, match="32 hex digits"):
            await client.status("nonsense")
        with pytest.raises(BadRequest, match=r"steps\[0\]\.op"):
            await client.run(flow(StepSpec("a", "nope")))
        with pytest.raises(BadRequest, match="the run goes on"):
            await client.result(await client.submit(HOLD), wait=False)
        with pytest.raises(InvariantViolation):
            await client.submit(flow(name="bug"))
        assert await client.statistics()


async def test_a_request_too_large_for_the_daemon_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=10_000)) as here, AsyncClient(here.path) as client:
        with pytest.raises(BadRequest, match="max_frame_mib"):
            await client.submit(flow(StepSpec("a", "noop", inputs={"value": "x" * 10_000})))
        assert await client.statistics()


async def test_a_daemon_that_is_full_or_stops_is_named_in_both_faces(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(clients=0)) as here:
        with pytest.raises(Overloaded):
            await asyncio.to_thread(Client, here.path)
        with pytest.raises(Overloaded):
            async with AsyncClient(here.path):
                pass
    async with serving(tmp_path / "t") as here, AsyncClient(here.path) as client:
        run = await client.submit(HOLD)
        waiting = asyncio.create_task(client.result(run))
        face = await asyncio.to_thread(Client, here.path)
        blocked = asyncio.create_task(asyncio.to_thread(face.result, run))
        while here.server.open_requests < 2:
            await client.statistics()
        await here.server.close()
        for call in (waiting, blocked):
            with pytest.raises(Disconnected, match="stopping"):
                await call
        with pytest.raises(Disconnected):
            await client.statistics()
        with pytest.raises(Disconnected, match="new Client"):
            face.statistics()


def test_without_a_daemon_the_error_names_the_socket_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Disconnected, match=r"is hexrtd running.*HEXRT_SOCKET") as caught:
        Client(tmp_path / "none")
    assert str(tmp_path / "none") in str(caught.value)
    with pytest.raises(Disconnected, match="too long"):
        Client("/tmp/" + "x" * 200)


def test_a_daemon_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(Disconnected, match="does not answer"):
            Client(tmp_path / "s", timeout_s=0.05)


def test_something_else_that_answers_is_called_so(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Disconnected, match="no hexrtd of this version"):
            Client(tmp_path / "s")
        thread.join()


INTERRUPTED = """
import sys
from hexrt.client import Client
from hexrt.errors import Disconnected
with Client(sys.argv[1]) as client:
    try:
        print("waiting", flush=True)
        client.result(sys.argv[2])
    except KeyboardInterrupt:
        try:
            client.statistics()
        except Disconnected as error:
            print("closed" if "new Client" in str(error) else error)
with Client(sys.argv[1]) as client:
    client.cancel(sys.argv[2])
"""


async def test_after_ctrl_c_the_connection_is_closed_and_a_new_client_works(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        run = await client.submit(HOLD)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INTERRUPTED, str(here.path), run.hex(), stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        await child.stdout.readline()
        while here.server.open_requests < 1:
            await client.statistics()
        os.kill(child.pid, signal.SIGINT)
        out, _ = await child.communicate()
        assert (child.returncode, out) == (0, b"closed\n")
        assert here.backend.runs[run].state is RunState.CANCELLED
