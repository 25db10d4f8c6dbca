"""The server end to end on real sockets: requests, rights, order, limits and the end of things."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from hexrt.core import RunState
from hexrt.protocol import messages as m
from hexrt.protocol.framing import frame
from tests.serving import HELLO, connected, limits, on_uvloop, serving, step, workflow


def submit(number: int, *steps: dict, name: str = "w", follow: str = "none") -> dict:
    return {"type": "submit", "request": number, "workflow": workflow(*steps, name=name), "follow": follow}


@on_uvloop
async def test_a_submitted_run_can_be_asked_for_its_status_its_list_entry_and_its_result(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, step(inputs={"value": [1, 2]})))
        assert isinstance(accepted, m.Accepted) and accepted.request == 1
        status = await client.ask(m.Status(2, accepted.run))
        assert isinstance(status, m.RunStatus) and status.request == 2 and status.summary.state is RunState.SUCCEEDED
        listed = await client.ask(m.List(3))
        assert isinstance(listed, m.RunList) and [run.run for run in listed.runs] == [accepted.run]
        result = await client.ask(m.Result(4, accepted.run))
        assert isinstance(result, m.RunResult) and bytes(result.outputs["a"]) == b"\x92\x01\x02"
        assert here.server.open_requests == 0


@on_uvloop
async def test_following_events_gives_accepted_then_updates_then_the_result_with_outputs(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        await client.send(submit(5, step(), follow="events"))
        answers = [await client.next() for _ in range(4)]
        assert [type(a) for a in answers] == [m.Accepted, m.Update, m.Update, m.RunResult]
        assert {a.request for a in answers} == {5}
        assert list(answers[3].outputs) == ["a"]


@on_uvloop
async def test_a_watch_gives_the_past_and_then_what_comes(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client, connected(here.path) as other:
        accepted = await client.ask(submit(1, step(op="hold")))
        first = await other.ask(m.Watch(1, accepted.run))
        assert isinstance(first, m.Update) and first.event == "started"
        here.backend.event(here.backend.runs[accepted.run], "tokens", "a", "hello")
        assert (await other.next()).text == "hello"
        here.backend.release(accepted.run)
        assert (await other.next()).event == "done"
        last = await other.next()
        assert isinstance(last, m.RunResult) and not last.outputs


@on_uvloop
async def test_answers_of_open_requests_interleave_and_the_quick_one_comes_first(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, step(op="hold")))
        await client.send(m.Result(2, accepted.run), m.Statistics(3), m.Devices(4))
        assert [(await client.next()).request for _ in range(2)] == [3, 4]
        here.backend.release(accepted.run)
        assert (await client.next()).request == 2


@on_uvloop
async def test_a_forgotten_wait_gets_no_answer_and_its_run_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, step(op="hold")))
        await client.send(m.Result(2, accepted.run), m.Watch(3, accepted.run))
        assert isinstance(await client.next(), m.Update)
        assert [type(await client.ask(m.Forget(n + 10, n))) for n in (2, 3)] == [m.Done, m.Done]
        assert here.server.open_requests == 0
        here.backend.release(accepted.run)
        answer = await client.ask(m.Status(20, accepted.run))
        assert answer.request == 20 and answer.summary.state is RunState.SUCCEEDED


@on_uvloop
async def test_the_kernel_says_who_the_client_is(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        await client.ask(submit(1))
        (peer,) = here.backend.peers
        assert (peer.uid, peer.gid, peer.pid) == (os.geteuid(), os.getegid(), os.getpid())
        assert set(peer.groups) == set(os.getgroups())


CONNECT_AS = """
import os, socket, sys
os.setgroups(range(1000, 1000 + int(sys.argv[2]))); os.setgid(4321); os.setuid(1234)
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
for message in sys.argv[3:]:
    s.sendall(bytes.fromhex(message)); s.recv(1 << 16)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take on another user's identity")
@pytest.mark.parametrize("groups", [0, 3, 1000])
@on_uvloop
async def test_another_user_is_known_by_uid_gid_and_all_groups(tmp_path: Path, groups: int) -> None:
    async with serving(tmp_path / "s") as here:
        here.path.chmod(0o666)
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o011)
        frames = [frame(msgspec.msgpack.encode(message)).hex() for message in (HELLO, submit(1))]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECT_AS, str(here.path), str(groups), *frames
        )
        await child.wait()
        assert child.returncode == 0
        (peer,) = here.backend.peers
        assert (peer.uid, peer.gid, sorted(peer.groups)) == (1234, 4321, list(range(1000, 1000 + groups)))
        async with connected(here.path) as root:
            assert len((await root.ask(m.List(1))).runs) == 1


@on_uvloop
async def test_a_client_that_goes_away_ends_its_watches_and_waits_but_not_its_runs(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as other:
        async with connected(here.path) as client:
            accepted = await client.ask(submit(1, step(op="hold")))
            await client.send(m.Watch(2, accepted.run), m.Result(3, accepted.run))
            assert isinstance(await client.next(), m.Update)
            run = here.backend.runs[accepted.run]
            assert len(run.watchers) == 1 and here.server.open_requests == 2
        await other.ask(m.Statistics(1))
        assert not run.watchers and here.server.open_requests == 0 and here.server.clients == 1
        assert run.state is RunState.RUNNING


@on_uvloop
async def test_a_client_that_goes_away_in_the_middle_of_its_submit_leaves_the_run_to_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as other:
        async with connected(here.path) as client:
            await client.send(submit(1, name="late", follow="events"))
            while not here.backend.runs:
                await other.ask(m.Statistics(1))
        await other.ask(m.Statistics(2))
        assert here.server.clients == 1
        here.backend.gate.set()
        (run,) = here.backend.runs.values()
        await run.ended.wait()
        assert run.state is RunState.SUCCEEDED


@on_uvloop
async def test_more_clients_than_allowed_are_told_to_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(clients=1)) as here, connected(here.path) as client:
        async with connected(here.path, hello=False) as second:
            refused = await second.next()
            assert isinstance(refused, m.Refused) and refused.error.kind == "overloaded" and refused.error.retryable
            assert await second.next() is None
        assert isinstance(await client.ask(m.Statistics(1)), m.StatisticsReport)


@on_uvloop
async def test_more_open_requests_than_allowed_are_refused_one_by_one(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(in_flight=2)) as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, step(op="hold")))
        await client.send(*(m.Result(n, accepted.run) for n in (2, 3, 4)))
        refused = await client.next()
        assert isinstance(refused, m.Refused) and refused.request == 4 and refused.error.kind == "overloaded"
        here.backend.release(accepted.run)
        assert [(await client.next()).request for _ in range(2)] == [2, 3]


@on_uvloop
async def test_a_watcher_that_never_reads_is_dropped_and_others_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_unsent=1 << 16)) as here, connected(here.path) as other:
        async with connected(here.path) as client:
            accepted = await client.ask(submit(1, step(op="hold")))
            await client.send(m.Watch(2, accepted.run))
            assert isinstance(await client.next(), m.Update)
            run = here.backend.runs[accepted.run]
            pushed = 0
            while run.watchers:
                for _ in range(20):
                    here.backend.event(run, "tokens", "a", "x" * 1000)
                    pushed += 1
                assert here.server.unsent_bytes <= (1 << 16) + 2000
                assert pushed < 10_000, "the client was never dropped"
                assert isinstance(await other.ask(m.Statistics(pushed)), m.StatisticsReport)
            assert here.server.clients == 1


@on_uvloop
async def test_a_client_that_reads_slowly_gets_all_of_many_large_answers(tmp_path: Path) -> None:
    big = "x" * 300_000
    async with serving(tmp_path / "s", limits(max_unsent=1 << 16)) as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, step(inputs={"value": big})))
        await client.send(*(m.Result(n, accepted.run) for n in range(2, 42)))
        async with connected(here.path) as other:
            await other.ask(m.Statistics(1))
            assert here.server.unsent_bytes < 1 << 20, "answers to who does not read are held back, not piled up"
        answers = [await client.next() for _ in range(40)]
        assert [a.request for a in answers] == list(range(2, 42))
        assert isinstance(await client.ask(m.Statistics(50)), m.StatisticsReport)


@on_uvloop
async def test_an_answer_above_the_frame_cap_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=1 << 16)) as here, connected(here.path) as client:
        accepted = await client.ask(submit(1, *(step(f"s{i}", inputs={"value": "x" * 1000}) for i in range(40))))
        assert isinstance(accepted, m.Accepted)
        here.backend.runs[accepted.run].outputs["s0"] = msgspec.Raw(msgspec.msgpack.encode("y" * (1 << 16)))
        refused = await client.ask(m.Result(2, accepted.run))
        assert isinstance(refused, m.Refused) and refused.request == 2 and "max_frame_mib" in refused.error.message
        assert isinstance(await client.ask(m.Statistics(3)), m.StatisticsReport)


@on_uvloop
async def test_an_error_of_the_daemons_own_is_reported_and_the_connection_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        refused = await client.ask(submit(1, name="bug"))
        assert isinstance(refused, m.Refused) and refused.error.kind == "invariant_violation"
        assert [type(bug) for bug in here.bugs] == [ZeroDivisionError] and "ZeroDivisionError" in caplog.text
        assert isinstance(await client.ask(m.Statistics(2)), m.StatisticsReport)


@on_uvloop
async def test_what_is_open_when_the_server_closes_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    before = asyncio.all_tasks()
    async with serving(folder / "s") as here, connected(here.path) as client:
        assert stat.S_IMODE(here.path.stat().st_mode) == 0o660
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        accepted = await client.ask(submit(1, step(op="hold")))
        await client.send(m.Result(2, accepted.run), submit(3, name="late"), m.Watch(4, accepted.run))
        assert isinstance(await client.next(), m.Update)
        assert len(asyncio.all_tasks() - before) == 2
        await here.server.close()
        refused = await client.next()
        assert isinstance(refused, m.Refused) and refused.request is None and "stopping" in refused.error.message
        assert await client.next() is None
        assert asyncio.all_tasks() == before
        assert os.listdir(folder) == [] and here.server.clients == 0


@on_uvloop
async def test_limits_can_be_changed_while_clients_are_connected(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(here.path) as client:
        here.server.set_limits(limits(in_flight=1, clients=1))
        accepted = await client.ask(submit(1, step(op="hold")))
        await client.send(m.Result(2, accepted.run))
        assert (await client.ask(m.Statistics(3))).error.kind == "overloaded"
        async with connected(here.path, hello=False) as second:
            assert (await second.next()).error.kind == "overloaded"


@on_uvloop
async def test_a_large_answer_under_way_when_the_server_closes_still_reaches_who_reads(tmp_path: Path) -> None:
    big = "x" * 900_000
    async with serving(tmp_path / "s") as here, connected(here.path) as client, connected(here.path) as idle:
        accepted = await client.ask(submit(1, step(inputs={"value": big})))
        await client.send(m.Result(2, accepted.run))
        await idle.ask(m.Statistics(1))
        assert here.server.unsent_bytes > 100_000
        closing = asyncio.create_task(here.server.close())
        result = await client.next()
        assert isinstance(result, m.RunResult) and len(bytes(result.outputs["a"])) > 900_000
        assert await client.next() is None and await idle.next() is None
        await closing
