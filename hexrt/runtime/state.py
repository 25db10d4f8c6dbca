"""The state of every live run, changed only by `RunTable.apply(event)`; a restart replays the same events through it.

Owns runs, steps and tasks. The brain reads it and calls `place`; nobody else writes. What became ready, must be stopped, has ended or
changed for a watcher is left in lists that the caller drains each turn. Pure: no clock, no I/O. Entities are `gc=False` for speed, so
`RunTable.forget` cuts their cycles by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hexrt import events
from hexrt.core import RunState, TaskState
from hexrt.errors import ErrorRecord, HexrtError
from hexrt.runtime import lineage, maps
from hexrt.runtime.entities import Change, Run, Step, Task, add_tokens, check_counts, cut_cycles, record_of, story
from hexrt.runtime.holding import NO_LIMIT, STEP_BYTES, TASK_BYTES, Holding
from hexrt.runtime.retries import DROPPED, LOST, final_error, lost_with_daemon, may_try_again
from hexrt.values import EMPTY_LIST, join
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
        self.max_open_tasks = NO_LIMIT  # that maps may fan out to, all runs together; set after a replay
        self.holding = Holding(self.runs)
        self._apply: dict[type, Callable[[Any], None]] = {
            events.Submitted: self._submitted,
            events.Started: self._started,
            events.Finished: self._finished,
            events.Failed: self._failed,
            events.Emitted: self._emitted,
            events.CancelRequested: self._cancel,
            events.DeadlinePassed: self._deadline,
            events.Stopped: self._stopped,
            events.TensorsLost: self._tensors_lost,
            events.Recovered: self._recovered,
        }

    def apply(self, event: events.Event) -> None:
        """Changes the state by one event. One that no longer fits (an old attempt, a forgotten run) changes nothing."""
        handler = self._apply.get(type(event))
        if handler is not None:
            handler(event)

    def place(self, task: Task, device: str, command: int, now_ns: int, predicted_ns: int) -> None:
        """The brain's choice: a ready (or, ahead of time, waiting) task becomes placed, as a new attempt."""
        assert task.state is READY or task.state is W, story(task)
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
        if self.runs.pop(run.id, None) is not None:
            self.holding.run_forgotten(run)
        cut_cycles(run)

    # --- submission ---------------------------------------------------------------------------------------------

    def _submitted(self, event: events.Submitted) -> None:
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
        self.holding.give(run)
        run.steps = [Step(node, len(node.predecessors)) for node in graph.nodes]
        run.open_steps = len(run.steps)
        self.open_tasks += run.open_steps
        run.held_bytes = graph.bytes + run.given_bytes + (STEP_BYTES + TASK_BYTES) * run.open_steps
        self.holding.charge(run, "", 0, event.at_ns)
        self.submitted.append(run)
        for step in run.steps:
            node = step.node
            if node.map is None:
                if len(node.op.parts) == 1:
                    step.tasks.append(Task(run, step, 0, 0))
                else:
                    maps.add_parts(run, step, 0, None)
        for step in run.steps:
            if not step.node.predecessors and self._step_ready(run, step, event.at_ns):
                self._step_done(run, step, EMPTY_LIST, event.at_ns)

    def _step_ready(self, run: Run, step: Step, now_ns: int) -> bool:
        """All predecessors ended well: its task, or those of its first elements, become ready. True for a map over nothing, which is done."""
        node = step.node
        if node.map is None:
            step.state = READY
            self._task_ready(step.tasks[0], now_ns)
            return False
        try:
            items = maps.read_items(run, step, self.max_tasks)
        except HexrtError as error:
            self._fail_step(run, step, ErrorRecord("task_failed", f"map.over: {error.message}", node.id), now_ns)
            return False
        more = max(0, len(items) - 1)
        if self.open_tasks + more > self.max_open_tasks and node.map is not None and node.map.elements is None:
            self.holding.refused.append(
                maps.no_room(run, step, len(items), self.open_tasks, self.max_open_tasks, now_ns)
            )
            return False
        step.state = READY
        first = maps.begin(run, step, items)
        self.open_tasks += more
        run.held_bytes += TASK_BYTES * more if items else len(EMPTY_LIST)
        self.holding.charge(run, node.id, 0, now_ns)
        if run.watched:
            self.changes.append(Change(run, "expanded", step, None, str(len(items))))
        for task in first:
            self._task_ready(task, now_ns)
        return not items

    def _task_ready(self, task: Task, now_ns: int) -> None:
        task.ready_ns = now_ns
        if task.state is W:  # else it was placed ahead of time
            task.state = READY
            self.fresh.append(task)

    # --- progress -----------------------------------------------------------------------------------------------

    def _find(self, event: events.Started | events.Finished | events.Failed | events.Emitted) -> Task | None:
        """The task an event is about, unless the event is of an old attempt or the task has ended."""
        run = self.runs.get(event.run)
        if run is None or run.ended_ns or event.step >= len(run.steps):
            return None
        step = run.steps[event.step]
        tasks = step.tasks
        while event.part >= len(tasks):  # in a replay an element may have been begun earlier than it would be now
            if not maps.has_more(step):
                return None
            self._task_ready(maps.add_element(run, step), run.submitted_ns)
        task = tasks[event.part]
        if event.attempt < task.attempt or task.state >= DONE:
            return None
        return task

    def _started(self, event: events.Started) -> None:
        task = self._find(event)
        if task is None:
            return
        if task.state is not PLACED:  # a replay: the launch that this record came before may have happened
            task.run.in_flight += 1
        task.state = RUNNING
        task.attempt = event.attempt
        task.device = event.device
        task.start_ns = event.at_ns
        if task.run.watched and not task.op_part:
            self.changes.append(Change(task.run, "started", task.step, task))

    def _finished(self, event: events.Finished) -> None:
        task = self._find(event)
        if task is None:
            return
        run, step = task.run, task.step
        node = step.node
        if task.state is PLACED or task.state is RUNNING:
            run.in_flight -= 1
        task.state = DONE
        task.attempt = event.attempt
        task.device = event.device
        task.start_ns = event.start_ns
        task.end_ns = event.end_ns
        parts = len(node.op.parts)
        last = task.op_part + 1 == parts
        if run.watched and last:
            self.changes.append(Change(run, "done", step, task))
        if step.state >= DONE:  # the step failed or was cancelled meanwhile
            self._maybe_end(run, event.end_ns)
            return
        output = event.output
        size = self.holding.hold(run, output) if run.tensors else len(output)
        run.held_bytes += size
        if run.held_bytes > run.charged_bytes:
            self.holding.charge(run, node.id, size, event.end_ns)
        if not last:
            task.output = output
            self._task_ready(step.tasks[task.part + 1], event.end_ns)
        elif node.map is not None:
            self._element_done(run, step, task, size, output, event.end_ns)
        else:
            if parts > 1:
                self.holding.element_ended(run, step, parts)
            self._step_done(run, step, output, event.end_ns)

    def _element_done(self, run: Run, step: Step, task: Task, size: int, output: msgspec.Raw, now_ns: int) -> None:
        assert step.outputs is not None
        step.outputs[task.part // len(step.node.op.parts)] = output
        step.parts_bytes += size
        self.holding.element_ended(run, step, task.part + 1)
        step.open_tasks -= 1
        if maps.has_more(step):
            self._task_ready(maps.add_element(run, step), now_ns)
        elif step.open_tasks == 0:
            whole = join(step.outputs)
            run.held_bytes += self.holding.hold(run, whole)
            self.holding.parts_joined(run, step)
            self._step_done(run, step, whole, now_ns)

    def _step_done(self, run: Run, step: Step, output: msgspec.Raw, now_ns: int) -> None:
        steps, done = run.steps, [step]
        while done:  # more than once where maps over nothing follow: they are done as soon as they are ready
            step = done.pop()
            step.state = DONE
            step.output = output
            run.open_steps -= 1
            self.open_tasks -= max(1, step.size)
            if run.kept is not None:
                self.holding.step_ended(run, step)
            for index in step.node.successors:
                successor = steps[index]
                successor.pending -= 1
                if successor.pending == 0 and successor.state is W and self._step_ready(run, successor, now_ns):
                    done.append(successor)
            output = EMPTY_LIST
        if run.open_steps == 0:
            self._maybe_end(run, now_ns)

    def _emitted(self, event: events.Emitted) -> None:
        task = self._find(event)
        if task is not None and add_tokens(task, event) and task.run.watched and event.text:
            self.changes.append(Change(task.run, "tokens", task.step, task, event.text))

    # --- failure ------------------------------------------------------------------------------------------------

    def _failed(self, event: events.Failed) -> None:
        task = self._find(event)
        if task is None:
            return
        run, step, error = task.run, task.step, event.error
        if task.state is PLACED or task.state is RUNNING:
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
        lost = error.kind in LOST and not step.node.idempotent
        task.state = UNKNOWN if lost else FAILED
        self._fail_step(run, step, final_error(task, error), event.end_ns, task.state)

    def _wait_again(self, task: Task, now_ns: int) -> None:
        task.state = W
        task.start_ns = task.end_ns = 0
        if task.step.pending:  # it had been placed ahead of its predecessor's end, or what it read is being made again
            task.step.state = W
        elif task.step.state is READY:
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
        self.open_tasks -= max(1, step.size)
        step.state = state
        step.error = error
        self.holding.step_closed(run, step)
        if run.kept is not None:
            self.holding.step_ended(run, step)
        run.open_steps -= 1
        for task in step.tasks:
            if task.state is PLACED or task.state is RUNNING:
                self.stop.append(task)
            elif task.state < PLACED:
                task.state = CANCELLED if state == CANCELLED else SKIPPED
        if run.watched:
            failed = next((t for t in step.tasks if t.state in (FAILED, UNKNOWN)), None)
            self.changes.append(Change(run, state.name.lower(), step, failed))

    def _cancel(self, event: events.CancelRequested) -> None:
        run = self.runs.get(event.run)
        if run is not None and not run.ended_ns:
            message = f"cancelled by uid {event.uid}" + (f": {event.reason}" if event.reason else "")
            self._stop_run(run, ErrorRecord("cancelled", message), event.at_ns)

    def _deadline(self, event: events.DeadlinePassed) -> None:
        error = ErrorRecord("timed_out", f"the deadline of the {'run' if event.step < 0 else 'step'} passed")
        self._stopped(events.Stopped(event.run, event.step, event.at_ns, error))

    def _stop_run(self, run: Run, why: ErrorRecord, now_ns: int) -> None:
        if run.cancelled is None:
            run.cancelled = why
        for step in run.steps:
            if step.state < DONE:
                self._close_step(run, step, CANCELLED, why)
        self.holding.run_stopped(run)
        self._maybe_end(run, now_ns)

    def _stopped(self, event: events.Stopped) -> None:
        run = self.runs.get(event.run)
        if run is None or run.ended_ns:
            return
        if event.step < 0:
            self._stop_run(run, event.error, event.at_ns)
        elif (step := run.steps[event.step]).state < DONE:
            error = event.error if event.error.where else msgspec.structs.replace(event.error, where=step.node.id)
            self._fail_step(run, step, error, event.at_ns)

    def _tensors_lost(self, event: events.TensorsLost) -> None:
        """The step runs again, or the run ends by the name of what is lost."""
        run = self.runs.get(event.run)
        if run is None or run.ended_ns or run.cancelled or (step := run.steps[event.step]).state is not DONE:
            return
        again, refused = lineage.make_again(run, step, self.holding)
        self.open_tasks += len(again)
        for made in (step for step in again if step.state is READY):
            self._task_ready(made.tasks[0], event.at_ns)
        if refused is not None:
            self._stop_run(run, refused, event.at_ns)

    def _recovered(self, event: events.Recovered) -> None:
        """The process that ran everything in flight is gone, and perhaps the boot whose monotonic clock the times are of."""
        for run in list(self.runs.values()):
            run.submitted_ns = event.at_ns - (event.wall_ns - run.wall_ns)
            for failed in lost_with_daemon(run, event.at_ns):
                self._failed(failed)

    # --- the end of a run ---------------------------------------------------------------------------------------

    def _maybe_end(self, run: Run, now_ns: int) -> None:
        if run.open_steps or run.in_flight or run.ended_ns:
            return
        run.error = run.cancelled or next((s.error for s in run.steps if s.state == FAILED or s.state == UNKNOWN), None)
        was_cancelled = run.cancelled is not None and run.cancelled.kind == "cancelled"
        otherwise = RunState.CANCELLED if was_cancelled else RunState.FAILED
        self._end_run(run, RunState.SUCCEEDED if run.error is None else otherwise, now_ns)

    def _end_run(self, run: Run, state: RunState, now_ns: int) -> None:
        run.state = state
        run.ended_ns = max(now_ns, 1)
        self.open_runs -= 1
        self.ended.append(run)
        self.holding.run_ended(run)

    def check_integrity(self) -> None:
        """Counters equal what they count. For tests and for an idle daemon in debug mode."""
        for run in self.runs.values():
            check_counts(run)
        assert self.open_runs == sum(not r.ended_ns for r in self.runs.values())
        self.holding.check_integrity()
