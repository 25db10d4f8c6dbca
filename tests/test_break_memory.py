"""Arrays and hosts that a careless program or a hostile user gives to paged memory: right answers or named errors."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexrt import values
from hexrt.brain.staging import Staging
from hexrt.core import RunId
from hexrt.errors import TaskFailed
from hexrt.memory.frames import GRANULE
from hexrt.memory.keeper import Keeper
from hexrt.memory.lru import Lru
from hexrt.memory.pool import Level, PagePool
from hexrt.protocol.host import HOST
from hexrt.runtime.entities import Tensor
from hexrt.scheduling.links import Links
from tests.notation import submit, table, workflow
from tests.running import Running
from tests.tensor_rig import ME, rigged
from tests.test_staging import MEMORY, held, many


@pytest.mark.parametrize(
    "value",
    [
        np.ones(3, np.longdouble),
        np.ones(3000, np.clongdouble),
        np.longdouble(3),
        np.array(3, np.longdouble),
        np.ones((1,) * 33 + (2,)),
        np.ones((1,) * 33 + (2000,)),
    ],
    ids=["longdouble", "large", "scalar", "no dimensions", "33 dimensions", "33 large ones"],
)
@pytest.mark.parametrize("place", [None, lambda array: 1 << 32], ids=["inline", "placed"])
def test_an_array_that_nobody_could_read_is_refused_where_it_is_put_out(value: Any, place: Any) -> None:
    if value.ndim > 32 and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("this NumPy has no such arrays")
    with pytest.raises(TaskFailed, match=r"a tensor of .+ cannot be sent"):
        values.encode({"a": [value]}, place)


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("place", [None, lambda array: 1 << 32], ids=["inline", "placed"])
def test_a_masked_array_is_refused_and_does_not_lose_its_mask(count: int, place: Any) -> None:
    with pytest.raises(TaskFailed, match="a masked array cannot be sent"):
        values.encode({"a": np.ma.masked_less(np.arange(count), 2)}, place)


@pytest.mark.parametrize("end", ["read", "freed"])
def test_a_step_whose_tensor_found_no_room_is_tried_again_when_the_tensor_in_its_way_is_read_or_freed(end: str) -> None:
    run = submit(runs := table(), workflow("a"))
    keeper = Keeper(PagePool(Lru()), Links())
    keeper.add_host(300 * GRANULE)
    keeper.add_nvme(1000 * GRANULE)
    staging = Staging(keeper, runs.holding)
    woken: list[bool] = []
    staging.when_freed(lambda: woken.append(True))
    pool, task = keeper.pool, run.steps[0].tasks[0]

    def paged(handle: int) -> Tensor:
        page, move = pool.adopt(keeper.tensor_class(), 200)
        pool.commit(move)
        tensor = Tensor(handle, HOST, 0, 200 * GRANULE, -1)
        tensor.page = page
        staging.paged[page], staging._readers[page] = tensor, ()
        return tensor

    below = paged(1)
    pool.unpin((below.page,))
    pool.commit(pool.begin((below.page,), Level.NVME))
    pool.drop(below.page, Level.HOST)
    above = paged(2)  # and being read
    assert not staging.is_ready(task, (below,), 1) and not staging.take_again() and not len(keeper.traffic)
    woken.clear()
    if end == "read":
        staging.unpin(above)
    else:
        above.is_kept = True
        staging.free(above)
    assert woken and staging.take_again() == [task]


def test_where_the_host_of_the_disk_cannot_be_had_no_move_waits_for_it() -> None:
    run = submit(runs := table(), workflow("a"))
    keeper = Keeper(PagePool(Lru()), Links())
    keeper.add_host(300 * GRANULE)
    keeper.add_nvme(1000 * GRANULE)
    staging = Staging(keeper, runs.holding)
    tensors = [Tensor(handle, 7, 0, 100 * GRANULE, 0, refs=1) for handle in (1, 2)]
    assert staging.adopt(run, tensors[0], lambda tensor: None)
    keeper.no_nvme("it cannot be started")
    assert not tensors[0].is_moving and not staging.adopt(run, tensors[1], lambda tensor: None)
    keeper.freed()
    keeper.decide(1, {}, {})
    assert not len(keeper.traffic) and [tensor.refs for tensor in tensors] == [1, 1]
    keeper.check_integrity()


def test_what_was_brought_up_for_a_step_is_let_go_where_it_is_cancelled_while_it_waits_for_a_worker(
    tmp_path: Path,
) -> None:
    with rigged(tmp_path, memory=MEMORY, pool={"workers": 1}) as (rig, runner):
        brain = rig.daemon.brain
        keeper, staging = brain.engines.keeper, brain.staging
        keeper.wants_disk = True
        rig.service.owner.wake()
        runner.run(rig.until(lambda: "disk:0" in brain.devices and brain.devices["disk:0"].ready))
        run, set_ready = runner.run(held(rig, many()))
        set_ready(True)
        runner.run(rig.until(lambda: bool(staging._waits) or run.ended_ns > 0))
        brain.paused = True  # their tensors come, and they wait for a worker
        runner.run(rig.until(lambda: not len(keeper.traffic) and not staging.again))
        assert staging._waits
        runner.run(rig.service.cancel(ME, RunId(run.id), "enough"))
        brain.paused = False
        rig.service.owner.wake()
        runner.run(rig.until(lambda: run.ended_ns > 0 and not staging._waits and not len(keeper.traffic)))
        rig.check_empty()
        staging.check_integrity(idle=True)
        assert keeper.pool.tiers[0].pages == 0


def test_the_daemon_may_open_as_many_files_as_its_hard_limit_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = Running(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        daemon.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with daemon:
        assert daemon.process is not None
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
