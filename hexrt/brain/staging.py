"""Tensors that left the ring they were put out in: each is one page of HOST, which may lie in NVME while nobody reads it.

Owns which tensor is which page, and the tasks that wait until what they read is back in HOST. A task that waits for room holds nothing; one
whose pages are on their way holds those, and a copy that takes too long ends with its host. Pure; called by the brain and by
`hexrt.runtime.tensors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hexrt.brain.ahead import steps_until
from hexrt.core import TaskState
from hexrt.errors import OutOfMemory
from hexrt.events import TensorsLost
from hexrt.memory.frames import GRANULE
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import NEVER, Level, Page
from hexrt.protocol.host import HOST
from hexrt.runtime.entities import Run, Task, Tensor
from hexrt.runtime.holding import Holding

Arrived = Callable[[Tensor], None]


@dataclass(eq=False, slots=True)
class _Wait:
    """A ready task and the pages that it waits for: on their way, and pinned, or not begun."""

    task: Task
    pages: list[Page]


def granules(tensor: Tensor) -> int:
    return -(-tensor.bytes // GRANULE)


class Staging:
    def __init__(self, keeper: Keeper, holding: Holding) -> None:
        self._keeper = keeper
        self._pool = keeper.pool
        self._holding = holding
        holding.pages = self
        keeper.when_freed.append(self._frames_freed)
        self.paged: dict[Page, Tensor] = {}
        self._readers: dict[Page, tuple[tuple[bytes, int], ...]] = {}  # the steps that are to read a page, by run
        self._to_read: Counter[tuple[bytes, int]] = Counter()  # granules in pages that one step reads
        self._kept = 0  # granules in pages that results name
        self._waits: dict[int, _Wait] = {}  # by the task's id
        self._unstarted: dict[int, _Wait] = {}  # there was no room, or somebody else moves their pages
        self.again: list[Task] = []  # to be queued again
        self.lost: list[TensorsLost] = []  # events to be applied

    def when_freed(self, call: Callable[[], None]) -> None:
        """Is called whenever frames may have come free."""
        self._keeper.when_freed.append(call)

    # --- out of a ring ----------------------------------------------------------------------------------------------

    def may_move(self, run: Run, tensor: Tensor) -> bool:
        """Whether all that a step reads, and all that results name, could still be in HOST together with this tensor in a page."""
        half = self._pool.capacity(self._keeper.tensor_class()) // 2
        span, readers = granules(tensor), self._steps_that_read(run, tensor)
        if tensor.is_kept or not readers:
            return self._kept + span <= half
        return all(self._to_read[reader] + span <= half for reader in readers)

    @staticmethod
    def _steps_that_read(run: Run, tensor: Tensor) -> tuple[tuple[bytes, int], ...]:
        if run.graph is None or tensor.step < 0:
            return ()
        nodes, made = run.graph.nodes, tensor.step
        return tuple((run.id, s) for s in nodes[made].successors if any(ref.step == made for ref in nodes[s].refs))

    def _count(self, page: Page, sign: int, span: int) -> None:
        for reader in self._readers[page]:
            self._to_read[reader] += sign * span
            if not self._to_read[reader]:
                del self._to_read[reader]

    def adopt(self, run: Run, tensor: Tensor, arrived: Arrived, ended: Callable[[], None] = lambda: None) -> bool:
        """Begins to move a tensor that nobody reads into HOST. False where there is no room now.

        `arrived` lets its old place be used again; `ended` is called when nothing copies from there any more, the tensor being moved or not.
        """

        def moved(faults: frozenset[Page]) -> None:
            tensor.is_moving = False
            if faults or tensor.reads or tensor.place < 0:  # it is freed, or read where it was
                self._forget(page, tensor)
                self._pool.unpin((page,))
                self._pool.release((page,))
            else:
                arrived(tensor)
                tensor.place, tensor.offset, tensor.slot, tensor.page = HOST, 0, -1, page
                self.paged[page] = tensor
                self._pool.set_next_use((page,), self._next_use(run, tensor))
                if tensor.is_kept:
                    self._kept += granules(tensor)
                else:
                    self._pool.unpin((page,))
            self._holding.let_go(run, (tensor,))
            ended()

        adopted = self._keeper.adopt(tensor.place, tensor.offset, tensor.bytes, moved)
        if adopted is None:
            return False
        page = adopted
        self._readers[page] = self._steps_that_read(run, tensor)
        self._count(page, 1, granules(tensor))
        tensor.is_moving = True
        tensor.refs += 1
        return True

    def _next_use(self, run: Run, tensor: Tensor) -> int:
        if run.graph is None or tensor.step < 0:
            return NEVER
        steps = steps_until(run, run.graph.nodes[tensor.step].successors)
        return NEVER if steps is None else steps

    # --- while it is there ------------------------------------------------------------------------------------------

    def keep(self, tensor: Tensor) -> None:
        """The run's result names it: it stays in HOST, whence a result is taken at once. It must be there."""
        if not tensor.is_kept:
            tensor.is_kept = True
            if tensor.page >= 0:
                self._kept += granules(tensor)
                self._pool.pin((tensor.page,))

    def pin(self, tensor: Tensor) -> None:
        """A launch is about to read it, the first at this time."""
        self._pool.pin((tensor.page,))

    def unpin(self, tensor: Tensor) -> None:
        """No launch reads it any more."""
        self._pool.unpin((tensor.page,))
        self._keeper.freed()

    def free(self, tensor: Tensor) -> None:
        """Nothing refers to it any more."""
        if tensor.is_kept:
            self._kept -= granules(tensor)
            self._pool.unpin((tensor.page,))
        self._pool.release((tensor.page,))
        self._forget(tensor.page, tensor)
        del self.paged[tensor.page]
        self._keeper.freed()

    def _forget(self, page: Page, tensor: Tensor) -> None:
        self._count(page, -1, granules(tensor))
        del self._readers[page]

    def offset(self, tensor: Tensor) -> int:
        """Where in HOST it lies now; it must be there."""
        return self._pool.offset(tensor.page, Level.HOST)

    # --- before a launch --------------------------------------------------------------------------------------------

    def is_ready(self, task: Task, tensors: Sequence[Tensor], now_ns: int) -> bool:
        """Whether all that the task reads is in HOST. If not, it is given back in `again` once that may be so, or its run hears of a loss."""
        pool = self._pool
        wait = self._waits.pop(id(task), None)
        self._unstarted.pop(id(task), None)
        absent = [tensor.page for tensor in tensors if tensor.page >= 0 and not pool.has(tensor.page, Level.HOST)]
        if wait is not None:
            task.pages_migrated += len(wait.pages)
            task.migration_bytes += sum(tensor.bytes for tensor in tensors if tensor.page in wait.pages)
            pool.unpin(wait.pages)  # the launch pins them again, in this very turn
        if not absent:
            return True
        gone = {tensor.step for tensor in tensors if tensor.page >= 0 and pool.is_lost(tensor.page)}
        if gone:
            self.lost += (TensorsLost(task.run.id, step, now_ns) for step in sorted(gone))
        elif any(map(pool.moving, absent)) or not self._fetch(task, absent):
            self._unstarted[id(task)] = _Wait(task, absent)
        return False

    def waits_for(self, task: Task) -> str:
        """What a ready task waits for before it can be launched; empty for any other."""
        wait = self._waits.get(id(task)) or self._unstarted.get(id(task))
        if wait is None or task.state is not TaskState.READY:
            return ""
        pool = self._pool
        pages = [page for page in wait.pages if not pool.has(page, Level.HOST)]
        if not pages:
            return ""  # it is about to be queued again
        count = f"{len(pages)} tensor{'s' * (len(pages) > 1)}"
        if id(task) in self._waits or any(map(pool.moving, pages)):
            return f"{count} ({sum(self.paged[page].bytes for page in pages) >> 10} KiB) from nvme"
        return f"room in host for {count}"

    def check_fits(self, tensors: Sequence[Tensor]) -> None:
        """Raises OutOfMemory where these can never be in HOST at one time."""
        spans = sum(self._pool.span(tensor.page) for tensor in tensors if tensor.page >= 0)
        if spans and spans > (capacity := self._pool.capacity(self._keeper.tensor_class())):
            raise OutOfMemory(
                f"what it reads has {spans * GRANULE >> 20} MiB in pages, and the memory they are read in {capacity * GRANULE >> 20}: "
                "raise memory.host_mib, or let one step read less"
            )

    def _fetch(self, task: Task, pages: list[Page]) -> bool:
        self._pool.pin(pages)
        if not self._keeper.fetch(pages, lambda faults: self.again.append(task)):
            self._pool.unpin(pages)
            return False
        self._waits[id(task)] = _Wait(task, pages)
        return True

    def let_go(self, task: Task) -> None:
        """The task was queued again and is not to be launched after all: what was brought up for it is not held any more."""
        wait = self._waits.pop(id(task), None)
        if wait is not None:
            self._pool.unpin(wait.pages)
            self._keeper.freed()

    def _frames_freed(self) -> None:
        self.again += [wait.task for wait in self._unstarted.values()]
        self._unstarted.clear()

    def take_again(self) -> list[Task]:
        """Tasks to be queued again; what was held for those that are not wanted any more is let go of."""
        again, self.again = self.again, []
        for task in again:
            if task.state is not TaskState.READY:
                self.let_go(task)
        return [task for task in again if task.state is TaskState.READY]

    def check_integrity(self, idle: bool) -> None:
        """Each tensor is counted for those that read it; with `idle` (nothing is in flight) nobody waits for pages."""
        to_read: Counter[tuple[bytes, int]] = Counter()
        for page, readers in self._readers.items():
            to_read.update(dict.fromkeys(readers, self._pool.span(page)))
        assert to_read == self._to_read, "granules to be read are counted wrong"
        assert self._kept == sum(granules(t) for t in self.paged.values() if t.is_kept), (
            "granules of results are counted wrong"
        )
        assert not idle or not (self._waits or self._unstarted or self.again), "tasks wait for pages"
