"""Runs the demo's workflows through a client: some at once, watched; what went wrong is named by run and step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from hexrt.cli.demo_view import View
from hexrt.client import AsyncClient, Outcome
from hexrt.core import RunState
from hexrt.errors import HexrtError, TaskFailed
from hexrt.protocol.messages import Accepted, RunTimeline, Update
from hexrt.workflow.model import Workflow


@dataclass(frozen=True, slots=True)
class Finished:
    label: str
    outcome: Outcome
    timeline: RunTimeline

    def problems(self) -> list[str]:
        """Each failed step, in one line."""
        found = [f"{self.label}: step {step} failed: {error.message}" for step, error in self.outcome.errors.items()]
        if not found and self.outcome.state is not RunState.SUCCEEDED:
            found.append(f"{self.label}: the run ended as {self.outcome.state}")
        return found


async def run_one(client: AsyncClient, label: str, workflow: Workflow, view: View) -> Finished:
    """Submits, shows what happens and returns the end. Raises what the daemon refuses, with the label before it."""
    outcome = None
    async with aclosing(client.follow(workflow)) as news:  # type: ignore[type-var]
        async for message in news:
            if isinstance(message, Accepted):
                view.begin(label, [step.id for step in workflow.steps])
            elif isinstance(message, Update):
                view.update(label, message)
            else:
                outcome = message
    if outcome is None:
        raise TaskFailed("the daemon told no end of the run", label)
    view.end(label, outcome.state)
    return Finished(label, outcome, await client.timeline(outcome.run))


async def run_several(
    client: AsyncClient, workflows: Sequence[tuple[str, Workflow]], at_once: int, view: View
) -> list[Finished]:
    """Runs all, at most `at_once` at a time, and returns them in the order given. Raises the first refusal."""
    room = asyncio.Semaphore(at_once)

    async def one(label: str, workflow: Workflow) -> Finished:
        async with room:
            return await run_one(client, label, workflow, view)

    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for label, workflow in workflows:
                tasks.append(group.create_task(one(label, workflow)))
    except* HexrtError as errors:
        failure = errors
    else:
        return [task.result() for task in tasks]
    raise first_of(failure)


def first_of(errors: BaseExceptionGroup[HexrtError]) -> HexrtError:
    """The error that is told: where the daemon went away, all the others say the same."""
    first = errors.exceptions[0]
    return first if isinstance(first, HexrtError) else first_of(first)
