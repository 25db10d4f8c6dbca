"""The port between the socket and what runs the workflows.

Owns nothing. `hexrt.runtime.service` implements it for the daemon; the server calls it from the loop's thread only. A method refuses by
raising a HexrtError, which becomes the answer; whose run it is, is the backend's to check, and another's run is NotFound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hexrt.core import Durability, Peer, RunId, RunState
from hexrt.memory.passed import ClientMemory, Export
from hexrt.protocol.messages import (
    DeviceList,
    MemoryReport,
    ModelList,
    RunList,
    RunResult,
    RunStatus,
    RunTimeline,
    StatisticsReport,
    Update,
)
from hexrt.workflow.model import Workflow


class Backend(Protocol):
    """Answers carry request=0; the server puts the client's number in.

    An `async` method is run as a plain call as far as its first wait, and as an asyncio task from there on. So one that need not wait
    costs no task; before its first wait it has no current task, and `asyncio.timeout` or a TaskGroup cannot be entered there.
    A client that goes away cancels the wait of `status`, `list_runs`, `result` and `timeline`; never that of the others.
    """

    async def submit(
        self,
        peer: Peer,
        workflow: Workflow,
        durability: Durability,
        awaits_end: bool,
        memory: ClientMemory | None = None,
    ) -> RunId:
        """Returns once the run is as durable as was asked; a moment later where the client `awaits_end` anyway and that saves a commit.

        `memory` is None unless the client sent tensors. It is checked but for this: that its handles are those which the workflow names, and
        that there is room for `memory.bytes`. Whoever called closes it when this returns or raises; what is to stay is taken before.
        """

    async def cancel(self, peer: Peer, run: RunId, reason: str) -> None:
        """Returns once no work of the run goes on; at once where it had ended."""

    async def status(self, peer: Peer, run: RunId) -> RunStatus: ...

    async def list_runs(self, peer: Peer, state: RunState | None, limit: int) -> RunList:
        """The newest runs that the peer may see, newest first."""

    async def result(self, peer: Peer, run: RunId, wait: bool) -> RunResult | Export:
        """Without `wait`, BadRequest while the run goes on. An Export where outputs name tensors that are not inline."""

    def when_ended(self, peer: Peer, run: RunId, push: Callable[[RunResult | Export], None]) -> Callable[[], None]:
        """Pushes the result once the run has ended, at once if it has; otherwise as `watch`. Spares a short run a task of the loop."""

    def watch(self, peer: Peer, run: RunId, push: Callable[[Update | RunResult], None]) -> Callable[[], None]:
        """Pushes what is kept of the past at once, then what comes; the last message is a RunResult without outputs.

        `push` never raises, and never calls the backend. The returned function ends the watch; calling it again, or after the
        last message, does nothing.
        """

    async def timeline(self, peer: Peer, run: RunId) -> RunTimeline: ...

    def devices(self) -> DeviceList: ...

    def memory(self, peer: Peer) -> MemoryReport:
        """`holders` are the peer's own runs, or everybody's for an admin."""

    def models(self, peer: Peer) -> ModelList:
        """Paths and URLs in full for an admin alone."""

    def statistics(self) -> StatisticsReport: ...

    async def shutdown(self, peer: Peer, drain: bool) -> None:
        """Returns once the shutdown is under way, without waiting for the server to close."""
