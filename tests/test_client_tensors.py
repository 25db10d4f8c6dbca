"""Arrays between a client and the daemon: both faces, values equal, no bytes on the socket, memory let go of, misuse named."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hexrt import values
from hexrt.client import AsyncClient, Client, Outcome, SharedArray, shared_array
from hexrt.client.calls import Wire, run
from hexrt.core import Durability
from hexrt.errors import BadRequest, OutOfMemory
from hexrt.workflow.build import ITEM, WorkflowBuilder
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.serving import Serving, limits, open_files, serving

Run = Callable[[Workflow], Awaitable[Outcome]]
ARRAYS: list[Any] = [
    np.arange(3000, dtype=np.float32),
    np.arange(60_000, dtype=np.int64).reshape(20, 30, 100),
    np.arange(40_000, dtype=np.float64).reshape(200, 200).T,
    np.arange(40_000, dtype=np.uint16)[::-3],
    np.arange(9000, dtype=">i4"),
    np.ones((70, 70), dtype=bool),
    np.full(1025, 2 - 3j, dtype=np.complex64),
    np.zeros(4096, dtype=np.uint8),
    np.zeros(4097, dtype=np.uint8),
    np.zeros((0, 5000)),
]


def flow(value: Any) -> Workflow:
    return Workflow((StepSpec("a", "noop", inputs={"value": value}),), "w")


@pytest.fixture(params=["asynchronous", "blocking"])
def face(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    """Gives a way to run a workflow by either face."""

    class Blocking:
        def __init__(self, path: Path) -> None:
            self.path = path

        async def __aenter__(self) -> Run:
            self.client = await asyncio.to_thread(Client, self.path)
            return lambda workflow: asyncio.to_thread(self.client.run, workflow)

        async def __aexit__(self, *_: object) -> None:
            self.client.close()

    class Asynchronous:
        def __init__(self, path: Path) -> None:
            self.client = AsyncClient(path)

        async def __aenter__(self) -> Run:
            await self.client.__aenter__()
            return self.client.run

        async def __aexit__(self, *_: object) -> None:
            await self.client.close()

    return Blocking if request.param == "blocking" else Asynchronous


def mappings(name: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(f"memfd:{name}" in line for line in maps)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No descriptor and no mapping more than before."""
    gc.collect()
    before = (open_files(), mappings("hexrt"))
    yield
    await asyncio.sleep(0)  # what the loop itself still holds of the last call
    gc.collect()
    assert (open_files(), mappings("hexrt")) == before


def let_go(here: Serving) -> None:
    for each in here.backend.runs.values():
        each.memory.clear()


async def test_arrays_of_any_kind_come_back_equal_and_read_only_and_not_through_the_socket(
    tmp_path: Path, face: Callable[[Path], Any]
) -> None:
    async with serving(tmp_path / "s", limits(max_frame=10_000)) as here, face(here.path) as ask:
        async with nothing_left():
            outcome = await ask(flow({"all": ARRAYS, "again": ARRAYS[1], "plain": [1, "x", None]}))
            found = outcome.check().outputs["a"]
            for sent, got in zip([*ARRAYS, ARRAYS[1]], [*found["all"], found["again"]], strict=True):
                assert (
                    got.shape == sent.shape and np.array_equal(got, sent) and got.dtype == sent.dtype.newbyteorder("=")
                )
                assert not got.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    got[...] = 0
            assert found["plain"] == [1, "x", None]
            (kept,) = here.backend.runs.values()
            assert len(kept.memory) == 8, "the same array twice is one tensor, and small ones are inline"
            let_go(here)
            del outcome, found, got


async def test_a_result_is_mapped_once_and_until_its_last_view_goes(
    tmp_path: Path, face: Callable[[Path], Any]
) -> None:
    async with serving(tmp_path / "s") as here, face(here.path) as ask:
        gc.collect()
        before, files = mappings("hexrt-copy"), open_files()
        outcome = await ask(flow([np.arange(5000), np.arange(6000)]))
        let_go(here)
        assert mappings("hexrt-copy") == before + 1 and open_files() == files, "mapped, and its descriptor closed"
        first, second = outcome.outputs["a"]
        assert first.base is not None and mappings("hexrt-copy") == before + 1
        del outcome, first
        await asyncio.sleep(0)
        gc.collect()
        tail = second[-3:]
        del second
        assert tail.tolist() == [5997, 5998, 5999] and mappings("hexrt-copy") == before + 1
        del tail
        gc.collect()
        assert mappings("hexrt-copy") == before


async def test_a_shared_array_goes_without_a_copy_and_may_be_sent_again(
    tmp_path: Path, face: Callable[[Path], Any]
) -> None:
    async with serving(tmp_path / "s") as here, face(here.path) as ask:
        async with nothing_left():
            shared = shared_array((100, 200), "int32")
            shared[:] = np.arange(20_000).reshape(100, 200)
            shared[3, 5] = -1
            shared.array[4] = 7
            before = mappings("hexrt-array")
            for _ in range(2):
                outcome = await ask(flow([shared, {"again": shared}]))
                for got in (outcome.outputs["a"][0], outcome.outputs["a"][1]["again"]):
                    assert (
                        got.shape == (100, 200) and got[3, 5] == -1 and (got[4] == 7).all() and got[99, 199] == 19_999
                    )
            assert mappings("hexrt-array") == before - 1 + 2, (
                "each run has the client's own memory, and the client no more"
            )
            assert shared.sealed and "sent" in repr(shared) and np.array_equal(shared, got)
            let_go(here)
            del outcome, got, shared


async def test_other_arrays_go_behind_a_shared_one_and_only_sent_or_smaller_ones_are_copied(
    tmp_path: Path, face: Callable[[Path], Any]
) -> None:
    async with serving(tmp_path / "s") as here, face(here.path) as ask:
        async with nothing_left():
            small, large = shared_array(3001, "uint16"), shared_array((50, 50), "float64")
            small[:], large[:] = 5, 6
            outcome = await ask(flow([np.arange(5000), small, large, np.ones(5000)]))
            sums = [each.sum() for each in outcome.outputs["a"]]
            assert sums == [12_497_500, 15_005, 15_000, 5000] and large.sealed and not small.sealed
            small[0] = 6
            outcome = await ask(flow([large, small]))
            assert [each.sum() for each in outcome.outputs["a"]] == [15_000, 15_006] and small.sealed
            outcome = await ask(flow([large, small, np.ones(5000)]))
            assert [each.sum() for each in outcome.outputs["a"]] == [15_000, 15_006, 5000]
            let_go(here)
            del outcome, small, large


async def test_a_shared_array_that_could_still_be_written_is_not_sent(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        async with nothing_left():
            shared = shared_array((10, 1000))
            views: list[Any] = [shared.array, shared.array[2:4], memoryview(shared.array)]
            while views:
                with pytest.raises(BadRequest, match="cannot be sent while a view of it can be written"):
                    await client.run(flow(shared))
                views[0][0] = 1
                views.pop()
            reader = shared[2:4]
            outcome = await client.run(flow(shared))
            assert outcome.outputs["a"].sum() == 1000 and reader.sum() == 0
            with pytest.raises(ValueError, match="was sent"):
                shared[0] = 1
            with pytest.raises(ValueError, match="read-only"):
                shared.array[0] = 1
            let_go(here)
            del outcome, reader, shared
        assert len(here.backend.runs) == 1 and await client.statistics()


async def test_a_shared_array_that_another_process_can_write_is_not_sent(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, AsyncClient(here.path) as client:
        shared = shared_array(5000)
        shared[:] = 2
        script = "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 0); print('mapped', flush=True); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(shared._fd)], pass_fds=[shared._fd], stdin=-1, stdout=-1
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        with pytest.raises(BadRequest, match="another process can write"):
            await client.run(flow(shared))
        child.communicate()
        assert (await client.run(flow(shared))).outputs["a"].sum() == 10_000


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        (5, "object", BadRequest), (5, ">i4", BadRequest), (5, "nonsense", BadRequest), ((), "u1", BadRequest), ((3, 0), "u1", BadRequest),
        (-1, "u1", BadRequest), ("x", "u1", BadRequest), ((1 << 40, 1 << 23), "u1", OutOfMemory),
    ],
)  # fmt: skip
def test_a_shared_array_that_cannot_be_is_refused_when_made(shape: Any, dtype: str, error: Any) -> None:
    before = open_files()
    with pytest.raises((BadRequest, OutOfMemory)):
        SharedArray(shape, dtype)
    assert open_files() == before


async def test_what_a_builder_makes_is_passed_in_memory_too(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=10_000)) as here, AsyncClient(here.path) as client:
        shared = shared_array((2, 3000))
        shared[1] = 1
        builder = WorkflowBuilder("w")
        builder.step("noop", id="a", inputs={"value": [np.arange(5000), shared, np.arange(3)]})
        builder.step("noop", id="m", inputs={"value": ITEM}, map_over=shared)
        workflow = builder.build()
        outcome = await client.run(workflow)
        found = outcome.outputs["a"]
        assert found[0].sum() == 12_497_500 and found[1].sum() == 3000 and found[2].tolist() == [0, 1, 2]
        (kept,) = here.backend.runs.values()
        over = kept.workflow.steps[1].map
        assert isinstance(over, MapSpec) and [values.handle_of(each) for each in over.over] == [3, 4]
        assert bytes(kept.memory[4]) == np.ones(3000, np.float32).tobytes()
        assert values.decode(values.encode(workflow))["steps"][0]["inputs"]["value"][1].sum() == 3000


async def test_a_daemon_that_gives_values_inline_is_read_the_same(tmp_path: Path, face: Callable[[Path], Any]) -> None:
    async with serving(tmp_path / "s") as here, face(here.path) as ask:
        sent = np.arange(5000)
        outcome = await ask(flow([sent]))
        (kept,) = here.backend.runs.values()
        inline = values.inline(kept.outputs["a"], kept.memory.__getitem__)
        let_go(here)
        kept.outputs["a"] = inline
        async with AsyncClient(here.path) as client:
            again = await client.result(kept.id)
            assert np.array_equal(again.outputs["a"][0], outcome.outputs["a"][0])
            only = again.outputs.only("a")
            assert np.array_equal(only["a"][0], sent)
            last = [each async for each in client.watch(kept.id)][-1]
            assert isinstance(last, Outcome) and not last.outputs


async def test_many_runs_of_one_async_client_get_their_own_memory_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=8 << 20)) as here, AsyncClient(here.path) as client:
        async with nothing_left():
            sent = [flow([np.full(5000 + n, n), "t" * (200_000 if n % 3 else 0)]) for n in range(60)]
            outcomes = await asyncio.gather(*map(client.run, sent))
            for n, outcome in enumerate(outcomes):
                array, text = outcome.outputs["a"]
                assert array.shape == (5000 + n,) and (array == n).all() and len(text) == (200_000 if n % 3 else 0)
            let_go(here)
            del outcomes, outcome, array, text


async def test_a_submit_that_is_given_up_in_the_middle_leaves_no_memory(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=8 << 20)) as here, AsyncClient(here.path) as client:
        async with nothing_left():
            wide = [flow([np.arange(5000), "t" * 3_000_000]) for _ in range(6)]
            calls = [asyncio.create_task(client.run(each)) for each in wide]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            await client.statistics()
            while here.server.open_requests:
                await client.statistics()
            let_go(here)
        assert await client.statistics()


async def test_a_call_that_cannot_be_sent_makes_no_memory(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(max_frame=10_000)) as here, AsyncClient(here.path) as client:
        async with nothing_left():
            with pytest.raises(BadRequest, match="max_frame_mib"):
                await client.run(flow([np.arange(5000), "x" * 10_000]))
            with pytest.raises(BadRequest, match="cannot be sent"):
                await client.run(flow([np.arange(5000), object()]))
            with pytest.raises(BadRequest, match="object"):
                await client.run(flow([np.arange(5000), np.array([object()] * 5000)]))
            blocking = await asyncio.to_thread(Client, here.path)
            blocking.close()
            with pytest.raises(Exception, match="new Client"):
                blocking.run(flow(np.arange(5000)))
            while here.server.clients > 1:
                await client.statistics()
        assert not here.backend.runs


def test_no_more_tensors_than_a_message_may_have_are_named_and_the_rest_is_inline() -> None:
    wire = Wire()
    wire._max_bytes = 1 << 30
    rows = np.zeros((10_003, 4097), np.uint8)
    number, data, fd = wire.request(run(flow(list(rows)), Durability.SYNC))
    assert number == 1 and os.fstat(fd).st_size >= 10_000 * 4097
    os.close(fd)
    sent = msgspec.msgpack.decode(data[4:])
    assert len(sent["tensors"]) == 10_000
    codes = [each.code for each in sent["workflow"]["steps"][0]["inputs"]["value"]]
    assert codes.count(values.DESCRIPTOR) == 10_000 and codes.count(values.TENSOR) == 3


POOR = """
import asyncio, resource, sys
import numpy as np
from hexrt.client import AsyncClient, Client
from hexrt.errors import Disconnected
from hexrt.workflow.model import StepSpec, Workflow
flow = Workflow((StepSpec("a", "noop", inputs={"value": np.arange(5000)}),), "w")
def say(error): print("too many" if "no more files open" in str(error) else error)
with Client(sys.argv[1]) as client:
    run = client.submit(flow)
    import os
    most = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.dup(0) for _ in range(most + 5)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
    try: client.result(run)
    except Disconnected as error: say(error)
"""


async def test_a_client_that_may_open_no_more_files_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", POOR, str(here.path), stdout=-1)
        out, _ = await child.communicate()
        assert (child.returncode, out) == (0, b"too many\n")
