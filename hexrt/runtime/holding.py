"""How many bytes the runs in memory hold, and which of them are let go of early.

Owns the totals. A run counts its own bytes as they come (`Run.held_bytes`) and is charged for them here in steps, so that small outputs
cost an addition; a tensor counts as if its bytes were in the output that names it, each time it does. What goes too far is not ended here: that depends on all runs, so it is left in `refused` as facts to record;
tensors that nothing refers to any more are left in `released`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from hexrt.core import TaskState
from hexrt.errors import ErrorRecord
from hexrt.events import Stopped
from hexrt.runtime.entities import Run, Step, Task, Tensor
from hexrt.values import FIRST_HOST_HANDLE, described

CHARGE_BYTES = 16 << 10
LARGE_BYTES = 32 << 10
"""Only outputs above this are let go of before their run has ended. A run is never charged for so much more than it holds, so each is noticed."""
STEP_BYTES, TASK_BYTES = 1500, 400
"""About what a step, its node in the graph included, and a task take in memory."""
NO_LIMIT = 1 << 62


class Pages(Protocol):
    """Is told of the first and the last reader of a tensor that lies in a page."""

    def pin(self, tensor: Tensor) -> None: ...

    def unpin(self, tensor: Tensor) -> None: ...


class Holding:
    """`runs` are those in memory, open and ended."""

    def __init__(self, runs: Mapping[bytes, Run]) -> None:
        self._runs = runs
        self.max_run_bytes = NO_LIMIT  # of one run
        self.max_held_bytes = NO_LIMIT  # of all open runs together
        self.held_bytes = 0  # by all runs
        self.ended_bytes = 0  # of that, by those that have ended
        self.refused: list[Stopped] = []  # no room for these: to be applied, and recorded, as events
        self.given: dict[
            bytes, tuple[int, dict[int, Tensor]]
        ] = {}  # bytes and tensors, by run, until its Submitted is applied
        self.released: list[Tensor] = []  # whose memory may be used again
        self.pages: Pages | None = None

    def charge(self, run: Run, step: str, size: int, now_ns: int) -> None:
        """The run holds more than it was charged for: `size` bytes of it came with the output of `step`."""
        charged = run.held_bytes + CHARGE_BYTES
        self.held_bytes += charged - run.charged_bytes
        run.charged_bytes = charged
        if size > LARGE_BYTES and run.kept is None and run.graph is not None:
            run.kept = frozenset(index for _, index, _ in run.graph.outputs)
        if run.held_bytes > self.max_run_bytes:
            self._refuse(run, step, now_ns, ErrorRecord(
                "out_of_memory",
                f"with this output the run holds more than {self.max_run_bytes >> 20} MiB, which is limits.max_run_mib: "
                "split the run, let its steps return less or write large data to files, or raise the limit", step,
            ))  # fmt: skip
        elif self.held_bytes - self.ended_bytes > self.max_held_bytes:
            largest = max((r for r in self._runs.values() if not r.ended_ns), key=lambda r: r.held_bytes)
            self._refuse(largest, "", now_ns, ErrorRecord(
                "out_of_memory",
                f"all open runs together hold more than {self.max_held_bytes >> 20} MiB, which is limits.max_held_mib, and "
                f"this one the most of it ({largest.held_bytes >> 20} MiB): try again later, or raise the limit", "", True,
            ))  # fmt: skip

    def _refuse(self, run: Run, step: str, now_ns: int, error: ErrorRecord) -> None:
        if run.cancelled is None and not any(r.run == run.id and r.step < 0 for r in self.refused):
            self.refused.append(Stopped(run.id, -1, now_ns, error))

    def release(self, run: Run, size: int) -> None:
        run.held_bytes -= size
        if run.charged_bytes - run.held_bytes > LARGE_BYTES:
            self.held_bytes += run.held_bytes + CHARGE_BYTES - run.charged_bytes
            run.charged_bytes = run.held_bytes + CHARGE_BYTES

    def give(self, run: Run) -> None:
        """The run begins with the tensors that its graph names; it holds them until its end."""
        run.given_bytes, run.tensors = self.given.pop(run.id, (0, None))
        run.given = tuple(run.tensors.values()) if run.tensors else ()
        run.given_left = len(run.given)
        for tensor in run.given:
            tensor.refs += 1

    def hold(self, run: Run, output: msgspec.Raw) -> int:
        """The output, and the tensors that it names, are needed from now on. Returns its `size_of`."""
        if not run.tensors:
            return len(output)
        named, size = _look_into(run.tensors, output)
        for tensor in named:
            tensor.refs += 1
        return size

    def drop(self, run: Run, output: msgspec.Raw) -> int:
        """Ends a `hold`; returns the same number."""
        if not run.tensors:
            return len(output)
        named, size = _look_into(run.tensors, output)
        self.let_go(run, named)
        return size

    def let_go(self, run: Run, tensors: Iterable[Tensor]) -> None:
        """Each of them has a reference less."""
        for tensor in tensors:
            tensor.refs -= 1
            if not tensor.refs and run.tensors is not None and run.tensors.pop(tensor.handle, None) is tensor:
                self.released.append(tensor)
                if tensor.handle < FIRST_HOST_HANDLE:
                    run.given_left -= 1
                    if not run.given_left:
                        self._give_back(run)

    def _give_back(self, run: Run) -> None:
        """Nothing refers to any tensor in the client's memory."""
        size, run.given_bytes = run.given_bytes, 0
        run.held_bytes -= size
        if run.ended_ns:
            run.charged_bytes -= size
            self.held_bytes -= size
            self.ended_bytes -= size

    def pin(self, task: Task, tensors: tuple[Tensor, ...]) -> None:
        """The task's launch in flight may read these too, until its last report or its host's death."""
        for tensor in tensors:
            tensor.refs += 1
            tensor.reads += 1
            if tensor.page >= 0 and tensor.reads == 1 and self.pages is not None:
                self.pages.pin(tensor)
        task.tensors += tensors

    def unpin(self, task: Task) -> None:
        tensors, task.tensors = task.tensors, ()
        for tensor in tensors:
            tensor.reads -= 1
            if tensor.page >= 0 and not tensor.reads and self.pages is not None:
                self.pages.unpin(tensor)
        self.let_go(task.run, tensors)

    def step_ended(self, run: Run, step: Step) -> None:
        """Lets go of the large outputs that nothing needs any more now that this step has ended. For runs that hold some."""
        for index in (*step.node.predecessors, step.node.index):
            self._drop_unread(run, run.steps[index])

    def _drop_unread(self, run: Run, producer: Step) -> None:
        output, node = producer.output, producer.node
        if output is None or run.kept is None or node.index in run.kept or size_of(run, output) <= LARGE_BYTES:
            return
        read, successors = producer.read, node.successors
        while read < len(successors) and run.steps[successors[read]].state >= TaskState.DONE:
            read += 1
        producer.read = read
        if read == len(successors):
            producer.output = None
            self.release(run, self.drop(run, output))

    def element_ended(self, run: Run, step: Step, end: int) -> None:
        """The last part of an element, which is the task before `end`, is done: what its other parts put out is not needed."""
        for task in step.tasks[end - len(step.node.op.parts) : end]:
            task.item = None
            if task.output is not None:
                self.release(run, self.drop(run, task.output))
                task.output = None

    def parts_joined(self, run: Run, step: Step) -> None:
        """All elements of a map are done, and their outputs are in the step's own."""
        size, step.parts_bytes = step.parts_bytes, 0
        self._drop_elements(run, step)
        self.release(run, size)

    def _drop_elements(self, run: Run, step: Step) -> None:
        if run.tensors and step.outputs is not None:
            for output in step.outputs:
                self.drop(run, output)
        step.items = step.outputs = None

    def step_closed(self, run: Run, step: Step) -> None:
        """The step ended other than well: nothing of what its tasks were given or put out is needed."""
        size = step.parts_bytes
        for task in step.tasks:
            task.item = None
            if task.output is not None:
                size += self.drop(run, task.output)
                task.output = None
        self._drop_elements(run, step)
        step.parts_bytes = 0
        self.release(run, size)

    def run_stopped(self, run: Run) -> None:
        """Keeps of a run that is not to go on only what its outputs name."""
        if run.kept is None:
            return
        for step in run.steps:
            if step.output is not None and step.node.index not in run.kept:
                self.release(run, self.drop(run, step.output))
                step.output = None

    def run_ended(self, run: Run) -> None:
        self.run_stopped(run)
        self.held_bytes += run.held_bytes - run.charged_bytes
        run.charged_bytes = run.held_bytes
        self.ended_bytes += run.held_bytes
        given, run.given = run.given, ()
        self.let_go(run, given)
        for tensor in run.tensors.values() if run.tensors else ():
            tensor.ended = True

    def run_forgotten(self, run: Run) -> None:
        self.held_bytes -= run.charged_bytes
        self.ended_bytes -= run.held_bytes if run.ended_ns else 0
        run.held_bytes = run.charged_bytes = run.given_bytes = 0
        self.released += (run.tensors or {}).values()
        run.tensors, run.given = None, ()

    def check_integrity(self) -> None:
        """The totals are what the runs were charged for, and each run counts what it has, its tensors' references too."""
        assert self.held_bytes == sum(run.charged_bytes for run in self._runs.values()), self.held_bytes
        assert self.ended_bytes == sum(run.held_bytes for run in self._runs.values() if run.ended_ns), self.ended_bytes
        for run in self._runs.values():
            counted = run.given_bytes + (run.graph.bytes if run.graph is not None else 0)
            outputs = [output for step in run.steps for output in outputs_in(step)]
            counted += sum(STEP_BYTES + TASK_BYTES * max(1, step.size) for step in run.steps)
            counted += sum(size_of(run, output) for output in outputs)
            assert counted == run.held_bytes, f"run {run.id.hex()} holds {counted} bytes, counted {run.held_bytes}"
            assert run.held_bytes <= run.charged_bytes
            refs = Counter(tensor.handle for output in outputs for tensor in tensors_of(run, output))
            refs.update(tensor.handle for step in run.steps for task in step.tasks for tensor in task.tensors)
            refs.update(tensor.handle for tensor in run.given)
            counts = {
                t.handle: t.refs - t.is_moving for t in (run.tensors or {}).values()
            }  # a move alone may be what is left
            assert refs == {handle: count for handle, count in counts.items() if count}, f"run {run.id.hex()}: {refs}"


def tensors_of(run: Run, value: msgspec.Raw) -> list[Tensor]:
    """Those of the run's tensors that an encoded value names."""
    return _look_into(run.tensors, value)[0] if run.tensors else []


def size_of(run: Run, value: msgspec.Raw) -> int:
    """The bytes of an encoded value as if those of its tensors were in it, at each place that names one."""
    return _look_into(run.tensors, value)[1] if run.tensors else len(value)


def _look_into(known: Mapping[int, Tensor], value: msgspec.Raw) -> tuple[list[Tensor], int]:
    """Which of these tensors an encoded value names, and its `size_of`."""
    try:
        named, more = described(value)
    except (msgspec.MsgspecError, ValueError):  # no such value comes from a host
        return [], len(value)
    return [tensor for handle in named if (tensor := known.get(handle)) is not None], len(value) + more


def outputs_in(step: Step) -> list[msgspec.Raw]:
    """What a step and its tasks hold."""
    found = [step.output, *(step.outputs or ()), *(task.output for task in step.tasks)]
    return [output for output in found if output is not None]
