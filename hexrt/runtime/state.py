"""The state of every live run, changed only by `RunTable.apply(event)`; a restart replays the same events through it.

Owns runs, steps and tasks. The brain reads it and calls `place`; nobody else writes. What became ready, must be stopped, has ended or
changed for a watcher is left in lists that the caller drains each turn. Pure: no clock, no I/O. Entities are `gc=False` for speed, so
`RunTable.forget` cuts their cycles by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hexrt.core import RunState, TaskState
from hexrt.errors import ErrorRecord, HexrtError, TaskFailed
from hexrt.events import (
    CancelRequested,
    DeadlinePassed,
    Emitted,
    Event,
    Failed,
    Finished,
    Recovered,
    Started,
    Submitted,
)  # fmt: skip
from hexrt.runtime.entities import Change, Run, Step, Task, record_of, story
from hexrt.runtime.retries import DROPPED, may_try_again
from hexrt.values import EMPTY_LIST, NIL, elements, join, pick
from hexrt.workflow.graph import TaskGraph
from hexrt.workflow.model import Workflow

W, READY, PLACED, RUNNING, DONE, FAILED, CANCELLED, SKIPPED, UNKNOWN = TaskState


class RunTable:
    """All runs that are open, and the ended ones until `forget`."""

    def __init__(self, check: Callable[[Workflow], TaskGraph], max_tasks: int = 1_000_000) -> None:
        self._check = check
        self.max_tasks = max_tasks  # that the maps of one run may fan out to
        self.runs: dict[bytes, Run] = {}
        self.prepared: dict[bytes, TaskGraph] = {}  # graphs checked before their Submitted was applied
        self.submitted: list[Run] = []
        self.fresh: list[Task] = []  # became ready
        self.stop: list[Task] = []  # in flight and no longer wanted
        self.ended: list[Run] = []
        self.changes: list[Change] = []
        self.open_runs = 0
        self.open_tasks = 0
        self._apply: dict[type, Callable[[Any], None]] = {
            Submitted: self._submitted,
            Started: self._started,
            Finished: self._finished,
            Failed: self._failed,
            Emitted: self._emitted,
            CancelRequested: self._cancel,
            DeadlinePassed: self._deadline,
            Recovered: self._recovered,
        }

    def apply(self, event: Event) -> None:
        """Changes the state by one event. One that no longer fits (an old attempt, a forgotten run) changes nothing."""
        handler = self._apply.get(type(event))
        if handler is not None:
            handler(event)

    def place(self, task: Task, device: str, command: int, now_ns: int, predicted_ns: int) -> None:
        """The brain's choice: a ready (or, ahead of time, waiting) task becomes placed, as a new attempt."""
        assert task.state == READY or task.state == W, story(task)
        task.state = PLACED
        task.attempt += 1
        task.device = device
        task.command = command
        task.placed_ns = now_ns
        task.predicted_ns = predicted_ns
        task.start_ns = 0
        run = task.run
        run.in_flight += 1
        if run.watched and not task.op_part:
            self.changes.append(Change(run, "placed", task.step, task))

    def forget(self, run: Run) -> None:
        """Lets go of an ended run."""
        self.runs.pop(run.id, None)
        for step in run.steps:
            step.tasks.clear()
        run.steps.clear()
        run.graph = None

    # --- submission ---------------------------------------------------------------------------------------------

    def _submitted(self, event: Submitted) -> None:
        if event.run in self.runs:
            return
        run = Run(
            event.run, event.workflow.name, event.uid, event.gid, event.durability, event.at_ns, event.wall_ns, None,
        )  # fmt: skip
        self.runs[run.id] = run
        self.open_runs += 1
        graph = self.prepared.pop(event.run, None)
        if graph is None:
            try:
                graph = self._check(event.workflow)
            except HexrtError as error:  # an op or a limit changed between two starts of the daemon
                run.error = error.record()
                self._end_run(run, RunState.FAILED, event.at_ns)
                return
        run.graph = graph
        run.steps = [Step(node, len(node.predecessors)) for node in graph.nodes]
        run.open_steps = len(run.steps)
        self.open_tasks += run.open_steps
        self.submitted.append(run)
        for step in run.steps:
            node = step.node
            if node.map is None:
                if len(node.op.parts) == 1:
                    step.tasks.append(Task(run, step, 0, 0))
                else:
                    self._make_tasks(run, step, 0, None)
        for step in run.steps:
            if not step.node.predecessors and self._step_ready(run, step, event.at_ns):
                self._step_done(run, step, EMPTY_LIST, event.at_ns)

    def _make_tasks(self, run: Run, step: Step, position: int, item: msgspec.Raw | None) -> None:
        parts = len(step.node.op.parts)
        for op_part in range(parts):
            task = Task(run, step, position * parts + op_part, op_part)
            if item is not None:
                task.item = item
            step.tasks.append(task)

    def _step_ready(self, run: Run, step: Step, now_ns: int) -> bool:
        """All predecessors ended well: the first part of each of its tasks becomes ready. True for a map over nothing, which is done."""
        node = step.node
        if node.map is None:
            step.state = READY
            self._task_ready(step.tasks[0], now_ns)
            return False
        over = node.map
        try:
            if over.elements is not None:
                items = list(over.elements)
            else:
                items = elements(pick(run.steps[over.step].output or NIL, over.path))
            run.mapped_tasks += len(items) * len(node.op.parts)
            if run.mapped_tasks > self.max_tasks:
                raise TaskFailed(
                    f"with its {len(items)} elements there are more than the {self.max_tasks} tasks allowed"
                )
        except HexrtError as error:
            self._fail_step(run, step, ErrorRecord("task_failed", f"map.over: {error.message}", node.id), now_ns)
            return False
        step.state = READY
        for position, item in enumerate(items):
            self._make_tasks(run, step, position, item)
        step.open_tasks = len(items)
        self.open_tasks += max(0, len(items) - 1)
        if run.watched:
            self.changes.append(Change(run, "expanded", step, None, str(len(items))))
        parts = len(node.op.parts)
        first = step.tasks[::parts]
        if over.max_in_flight and len(first) > over.max_in_flight:
            step.held = first[over.max_in_flight :][::-1]
            first = first[: over.max_in_flight]
        for task in first:
            self._task_ready(task, now_ns)
        return not items

    def _task_ready(self, task: Task, now_ns: int) -> None:
        task.ready_ns = now_ns
        if task.state == W:  # else it was placed ahead of time
            task.state = READY
            self.fresh.append(task)

    # --- progress -----------------------------------------------------------------------------------------------

    def _find(self, event: Started | Finished | Failed | Emitted) -> Task | None:
        """The task an event is about, unless the event is of an old attempt or the task has ended."""
        run = self.runs.get(event.run)
        if run is None or run.ended_ns or event.step >= len(run.steps):
            return None
        tasks = run.steps[event.step].tasks
        if event.part >= len(tasks):
            return None
        task = tasks[event.part]
        if event.attempt < task.attempt or task.state >= DONE:
            return None
        return task

    def _started(self, event: Started) -> None:
        task = self._find(event)
        if task is None:
            return
        if task.state != PLACED:  # a replay: the launch that this record came before may have happened
            task.run.in_flight += 1
        task.state = RUNNING
        task.attempt = event.attempt
        task.device = event.device
        task.start_ns = event.at_ns
        if task.run.watched and not task.op_part:
            self.changes.append(Change(task.run, "started", task.step, task))

    def _finished(self, event: Finished) -> None:
        task = self._find(event)
        if task is None:
            return
        run, step = task.run, task.step
        node = step.node
        if task.state == PLACED or task.state == RUNNING:
            run.in_flight -= 1
        task.state = DONE
        task.attempt = event.attempt
        task.device = event.device
        task.start_ns = event.start_ns
        task.end_ns = event.end_ns
        task.output = event.output
        last = task.op_part + 1 == len(node.op.parts)
        if run.watched and last:
            self.changes.append(Change(run, "done", step, task))
        if step.state >= DONE:  # the step failed or was cancelled meanwhile
            self._maybe_end(run, event.end_ns)
        elif not last:
            self._task_ready(step.tasks[task.part + 1], event.end_ns)
        elif node.map is None:
            self._step_done(run, step, event.output, event.end_ns)
        else:
            self._element_done(run, step, event.end_ns)

    def _element_done(self, run: Run, step: Step, now_ns: int) -> None:
        step.open_tasks -= 1
        if step.held:
            self._task_ready(step.held.pop(), now_ns)
        if step.open_tasks == 0:
            parts = len(step.node.op.parts)
            self._step_done(run, step, join([t.output or NIL for t in step.tasks[parts - 1 :: parts]]), now_ns)

    def _step_done(self, run: Run, step: Step, output: msgspec.Raw, now_ns: int) -> None:
        steps, done = run.steps, [step]
        while done:  # more than once where maps over nothing follow: they are done as soon as they are ready
            step = done.pop()
            step.state = DONE
            step.output = output
            run.open_steps -= 1
            self.open_tasks -= max(1, len(step.tasks) // len(step.node.op.parts))
            for index in step.node.successors:
                successor = steps[index]
                successor.pending -= 1
                if successor.pending == 0 and successor.state == W and self._step_ready(run, successor, now_ns):
                    done.append(successor)
            output = EMPTY_LIST
        if run.open_steps == 0:
            self._maybe_end(run, now_ns)

    def _emitted(self, event: Emitted) -> None:
        task = self._find(event)
        if task is None:
            return
        if task.answered is None or task.text is None:
            task.answered, task.text = [], []
        if event.first != len(task.answered):
            return
        task.answered.extend(event.ids)
        task.text.append(event.text)
        if task.run.watched and event.text:
            self.changes.append(Change(task.run, "tokens", task.step, task, event.text))

    # --- failure ------------------------------------------------------------------------------------------------

    def _failed(self, event: Failed) -> None:
        task = self._find(event)
        if task is None:
            return
        run, step, error = task.run, task.step, event.error
        if task.state == PLACED or task.state == RUNNING:
            run.in_flight -= 1
        task.attempt = event.attempt
        task.device = event.device or task.device
        task.start_ns = event.start_ns
        task.end_ns = event.end_ns
        if run.cancelled is not None or step.state >= DONE:
            task.state = CANCELLED
            self._maybe_end(run, event.end_ns)
            return
        if error.kind == DROPPED:
            task.attempt -= 1
            self._wait_again(task, event.end_ns)
            return
        if may_try_again(task, event):
            run.history.append(record_of(task, "failed"))
            if run.watched:
                self.changes.append(Change(run, "retry", step, task, error.message))
            self._wait_again(task, event.end_ns)
            return
        lost = error.kind in ("worker_died", "device_lost") and not step.node.idempotent
        task.state = UNKNOWN if lost else FAILED
        where = step.node.id if step.node.map is None else f"{step.node.id}[{task.part // len(step.node.op.parts)}]"
        record = ErrorRecord(error.kind, error.message, error.where or where, error.retryable)
        self._fail_step(run, step, record, event.end_ns, task.state)

    def _wait_again(self, task: Task, now_ns: int) -> None:
        task.state = W
        task.start_ns = task.end_ns = 0
        if task.step.state == READY:  # else it had been placed ahead of its predecessor's end
            self._task_ready(task, now_ns)

    def _fail_step(self, run: Run, step: Step, error: ErrorRecord, now_ns: int, state: TaskState = FAILED) -> None:
        self._close_step(run, step, state, error)
        behind = list(step.node.successors)
        while behind:
            skipped = run.steps[behind.pop()]
            if skipped.state < DONE:
                message = f"not run: step {step.node.id!r}, which it depends on, failed"
                self._close_step(run, skipped, SKIPPED, ErrorRecord("skipped", message, skipped.node.id))
                behind.extend(skipped.node.successors)
        self._maybe_end(run, now_ns)

    def _close_step(self, run: Run, step: Step, state: TaskState, error: ErrorRecord | None) -> None:
        """Ends a step other than well: its tasks that have not ended are stopped or closed."""
        self.open_tasks -= max(1, len(step.tasks) // len(step.node.op.parts))
        step.state = state
        step.error = error
        step.held = None
        run.open_steps -= 1
        for task in step.tasks:
            if task.state == PLACED or task.state == RUNNING:
                self.stop.append(task)
            elif task.state < PLACED:
                task.state = CANCELLED if state == CANCELLED else SKIPPED
        if run.watched:
            failed = next((t for t in step.tasks if t.state in (FAILED, UNKNOWN)), None)
            self.changes.append(Change(run, state.name.lower(), step, failed))

    def _cancel(self, event: CancelRequested) -> None:
        run = self.runs.get(event.run)
        if run is not None and not run.ended_ns:
            message = f"cancelled by uid {event.uid}" + (f": {event.reason}" if event.reason else "")
            self._stop_run(run, ErrorRecord("cancelled", message), event.at_ns)

    def _deadline(self, event: DeadlinePassed) -> None:
        run = self.runs.get(event.run)
        if run is None or run.ended_ns:
            return
        if event.step < 0:
            self._stop_run(run, ErrorRecord("timed_out", "the deadline of the run passed"), event.at_ns)
        elif run.steps[event.step].state < DONE:
            step = run.steps[event.step]
            error = ErrorRecord("timed_out", "the deadline of the step passed", step.node.id)
            self._fail_step(run, step, error, event.at_ns)

    def _stop_run(self, run: Run, why: ErrorRecord, now_ns: int) -> None:
        if run.cancelled is None:
            run.cancelled = why
        for step in run.steps:
            if step.state < DONE:
                self._close_step(run, step, CANCELLED, why)
        self._maybe_end(run, now_ns)

    def _recovered(self, event: Recovered) -> None:
        """The process that ran everything in flight is gone, and perhaps the boot whose monotonic clock the times are of."""
        for run in list(self.runs.values()):
            run.submitted_ns = event.at_ns - (event.wall_ns - run.wall_ns)
            for step in run.steps:
                for task in step.tasks:
                    if task.state in (PLACED, RUNNING):
                        error = ErrorRecord(
                            "device_lost", "the daemon stopped while this step ran; whether it took effect is not known",
                        )  # fmt: skip
                        self._failed(Failed(run.id, step.node.index, task.part, task.attempt, task.device, task.start_ns, event.at_ns, error, False))  # fmt: skip

    # --- the end of a run ---------------------------------------------------------------------------------------

    def _maybe_end(self, run: Run, now_ns: int) -> None:
        if run.open_steps or run.in_flight or run.ended_ns:
            return
        if run.cancelled is not None:
            run.error = run.cancelled
            self._end_run(run, RunState.FAILED if run.cancelled.kind == "timed_out" else RunState.CANCELLED, now_ns)
            return
        failed = next((s for s in run.steps if s.state == FAILED or s.state == UNKNOWN), None)
        if failed is not None:
            run.error = failed.error
        self._end_run(run, RunState.SUCCEEDED if failed is None else RunState.FAILED, now_ns)

    def _end_run(self, run: Run, state: RunState, now_ns: int) -> None:
        run.state = state
        run.ended_ns = max(now_ns, 1)
        self.open_runs -= 1
        self.ended.append(run)

    def check_integrity(self) -> None:
        """Counters equal what they count. For tests and for an idle daemon in debug mode."""
        for run in self.runs.values():
            in_flight = sum(t.state in (PLACED, RUNNING) for s in run.steps for t in s.tasks)
            assert in_flight == run.in_flight, f"run {run.id.hex()}: {in_flight} in flight, counted {run.in_flight}"
            open_steps = sum(s.state < DONE for s in run.steps)
            assert open_steps == run.open_steps, f"run {run.id.hex()}: {open_steps} open, counted {run.open_steps}"
        assert self.open_runs == sum(not r.ended_ns for r in self.runs.values())
