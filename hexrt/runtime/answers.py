"""Answers about a run, built from its state: status, result, timeline, updates. Pure; reads the run table, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from hexrt.core import Durability, RunState, TaskState
from hexrt.errors import ErrorRecord, HexrtError
from hexrt.protocol.messages import (
    AttemptRecord,
    RunResult,
    RunStatus,
    RunSummary,
    RunTimeline,
    StepStatus,
    Update,
)  # fmt: skip
from hexrt.runtime.entities import NAMES, Change, Run, Step, Task, record_of
from hexrt.runtime.store_records import EndedRun
from hexrt.values import NIL, pick

PAST = {TaskState.PLACED: "placed", TaskState.RUNNING: "started", TaskState.DONE: "done"}


def summary_of(run: Run, now_ns: int) -> RunSummary:
    return RunSummary(
        run.id, run.name, run.uid, run.state, run.wall_ns, max(0, (run.ended_ns or now_ns) - run.submitted_ns) / 1e9,
        len(run.steps), len(run.steps) - run.open_steps, run.durability, run.error,
    )  # fmt: skip


def step_status(step: Step) -> StepStatus:
    node = step.node
    if len(step.tasks) == 1 and node.map is None:  # most steps are one task
        task = step.tasks[0]
        began = task.start_ns > 0
        return StepStatus(
            node.id, node.op.name, NAMES[task.state if step.state == TaskState.READY else step.state], 1,
            int(task.state == TaskState.DONE), task.device, task.attempt,
            (task.start_ns - task.ready_ns) / 1e9 if began and task.start_ns > task.ready_ns else 0.0,
            (task.end_ns - task.start_ns) / 1e9 if began and task.end_ns > task.start_ns else 0.0,
            step.error,
        )  # fmt: skip
    state, parts = step.state, len(node.op.parts)
    done = attempts = queued_ns = run_ns = 0
    last, finished = parts - 1, TaskState.DONE
    for task in step.tasks:  # of a map there may be a million, so nothing is called here
        if task.op_part == last and task.state is finished:
            done += 1
        if task.attempt > attempts:
            attempts = task.attempt
        start_ns, end_ns = task.start_ns, task.end_ns
        if start_ns:
            if start_ns > task.ready_ns:
                queued_ns += start_ns - task.ready_ns
            if end_ns > start_ns:
                run_ns += end_ns - start_ns
    if state == TaskState.READY:
        state = max((t.state for t in step.tasks if t.state <= TaskState.RUNNING), default=state)
    return StepStatus(
        node.id, node.op.name, NAMES[state], 1 if node.map is None else step.size,
        done, next((t.device for t in reversed(step.tasks) if t.device), ""), attempts, queued_ns / 1e9, run_ns / 1e9,
        step.error,
    )  # fmt: skip


def status_of(run: Run, now_ns: int, waits_for: Callable[[Task], str]) -> RunStatus:
    """`waits_for` says what a task waits for that is ready or with an LLM engine."""
    return RunStatus(0, summary_of(run, now_ns), tuple(_with_waits(s, waits_for) for s in run.steps))


def _with_waits(step: Step, waits_for: Callable[[Task], str]) -> StepStatus:
    status = step_status(step)
    if step.state is not TaskState.READY:
        return status
    begun = (task for task in step.tasks if TaskState.READY <= task.state <= TaskState.RUNNING)
    waits = next((found for task in begun if (found := waits_for(task))), "")
    return msgspec.structs.replace(status, waits=waits) if waits else status


Inline = Callable[[Run, msgspec.Raw], msgspec.Raw]
"""Makes a copy of a value that has the bytes of its tensors in it."""


def as_they_are(run: Run, value: msgspec.Raw) -> msgspec.Raw:
    return value


def outputs_of(run: Run, inline: Inline = as_they_are) -> tuple[dict[str, msgspec.Raw], dict[str, ErrorRecord]]:
    """What the run has for the names in its `outputs`, and why something is missing, by step id (or output name)."""
    outputs: dict[str, msgspec.Raw] = {}
    errors = {s.node.id: s.error for s in run.steps if s.error is not None}
    for name, index, path in run.graph.outputs if run.graph is not None else ():
        step = run.steps[index]
        if step.state == TaskState.DONE:
            try:
                outputs[name] = inline(run, pick(step.output or NIL, path))
            except HexrtError as error:
                errors[f"outputs.{name}"] = error.record()
    if run.error is not None and not errors:
        errors["run"] = run.error
    return outputs, errors


def result_of(run: Run, inline: Inline = as_they_are) -> RunResult:
    return RunResult(0, run.id, run.state, *outputs_of(run, inline))


def timeline_of(run: Run) -> RunTimeline:
    graph = run.graph
    attempts: list[AttemptRecord] = list(run.history)
    attempts += [record_of(t) for s in run.steps for t in s.tasks if t.placed_ns or t.end_ns]
    return RunTimeline(
        0, run.id, run.name, run.state, run.submitted_ns, run.wall_ns, run.ended_ns,
        tuple((s.node.id, s.node.op.name) for s in run.steps),
        tuple((node.index, successor) for node in graph.nodes for successor in node.successors) if graph else (),
        tuple(attempts),
    )  # fmt: skip


def ended_of(run: Run, inline: Inline) -> EndedRun:
    return EndedRun(
        summary_of(run, run.ended_ns),
        *outputs_of(run, inline),
        tuple(step_status(s) for s in run.steps),
        timeline_of(run),
    )


def ended_of_lost(run: bytes, uid: int, wall_ns: int) -> EndedRun:
    """What can still be said of a run whose workflow could not be read back from the disk."""
    error = ErrorRecord("unavailable", "the stored workflow is lost or damaged: submit it again", "run")
    summary = RunSummary(run, "lost", uid, RunState.FAILED, wall_ns, 0.0, 0, 0, Durability.SYNC, error)
    timeline = RunTimeline(0, run, "lost", RunState.FAILED, 0, wall_ns, 1, (), (), ())
    return EndedRun(summary, {}, {"run": error}, (), timeline)


def result_of_ended(ended: EndedRun) -> RunResult:
    return RunResult(0, ended.summary.run, ended.summary.state, ended.outputs, ended.errors)


def update_of(change: Change, number: int) -> Update:
    step, task = change.step, change.task
    error = step.error if step is not None and change.event in ("failed", "cancelled", "skipped", "unknown") else None
    parts = len(step.node.op.parts) if step is not None else 1
    at_ns = 0
    if task is not None:
        at_ns = {"placed": task.placed_ns, "started": task.start_ns}.get(change.event, task.end_ns)
    return Update(
        0, number, change.event, step.node.id if step is not None else "", task.part // parts if task is not None else 0,
        task.device if task is not None else "", task.attempt if task is not None else 0, at_ns, change.text, error,
    )  # fmt: skip


def past_of(run: Run) -> Iterator[Change]:
    """What a watcher that comes late is told first: where each step that began stands, and the tokens so far."""
    for step in run.steps:
        for task in step.tasks:
            if task.text:
                yield Change(run, "tokens", step, task, "".join(task.text))
            parts = len(step.node.op.parts)
            name = PAST.get(task.state, "")
            if name and task.op_part == (parts - 1 if name == "done" else 0):
                yield Change(run, name, step, task)
        if step.error is not None:
            yield Change(run, step.state.name.lower(), step, next((t for t in step.tasks if t.end_ns), None))
