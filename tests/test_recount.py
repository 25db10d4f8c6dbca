"""A daemon that counts itself over while it stands still, and stops where anything differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexrt.config import Config
from hexrt.errors import InvariantViolation
from hexrt.runtime.entities import Run
from hexrt.workflow.model import Workflow
from tests.tensor_bodies import make
from tests.tensor_rig import Rig, call, named, rigged

pytestmark = pytest.mark.timeout(60)
SPOILT: dict[str, tuple[Callable[[Rig, Run], Any], str]] = {
    "bytes held by all runs": (lambda rig, run: rig.table.holding, "held_bytes"),
    "open runs": (lambda rig, run: rig.table, "open_runs"),
    "references to a tensor": (lambda rig, run: run.tensors[1], "refs"),  # type: ignore[index]
    "bytes in a segment": (lambda rig, run: rig.tensors._segments[run.tensors[1].place], "live_bytes"),  # type: ignore[index]
    "pages of a tier": (lambda rig, run: rig.daemon.keeper.pool.tiers[0], "pages"),
}


async def counted(rig: Rig) -> None:
    """Returns when the next count was made."""
    recount = rig.service.owner.recount
    assert recount is not None
    rig.service.owner.wake()
    await rig.until(lambda: recount._timer is not None)
    await rig.until(lambda: recount._timer is None)


def test_nothing_is_counted_over_unless_that_is_asked_for(tmp_path: Path) -> None:
    assert not Config().daemon.check_integrity
    with rigged(tmp_path, daemon={}) as (rig, _):
        assert rig.service.owner.recount is None


def test_a_difference_is_found_when_nothing_is_in_flight_and_stops_the_daemon(tmp_path: Path) -> None:
    with rigged(tmp_path) as (rig, runner):
        a = make(5000)
        run = runner.run(rig.submit(Workflow((call("back", "same", named(1, a)),)), arrays={1: a}))
        runner.run(rig.result(run))
        runner.run(counted(rig))
        assert rig.daemon.failure is None
        for what, (of, name) in SPOILT.items():
            entity = of(rig, run)
            setattr(entity, name, getattr(entity, name) + 1)
            runner.run(counted(rig))
            assert isinstance(rig.daemon.failure, AssertionError | InvariantViolation), what
            rig.daemon.failure = None
            setattr(entity, name, getattr(entity, name) - 1)
        assert rig.daemon._stop.done()
        runner.run(counted(rig))
        assert rig.daemon.failure is None


def test_nothing_is_counted_over_while_a_task_is_in_flight(tmp_path: Path) -> None:
    with rigged(tmp_path) as (rig, runner):
        run = runner.run(rig.submit(Workflow((call("a", "make", 5000),))))
        runner.run(rig.result(run))
        rig.table.holding.held_bytes += 1
        run.in_flight += 1
        runner.run(counted(rig))
        assert rig.daemon.failure is None
        run.in_flight -= 1
        rig.table.holding.held_bytes -= 1
