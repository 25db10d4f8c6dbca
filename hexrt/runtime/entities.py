"""Runs, steps and tasks as they live in memory. Changed only by `hexrt.runtime.state`; read by the brain and by whoever answers clients.

`gc=False` for speed: their cycles are cut by hand when a run is forgotten. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hexrt.core import Durability, RunState, TaskState, TokenLogprob
from hexrt.errors import ErrorRecord
from hexrt.events import Emitted
from hexrt.protocol.messages import AttemptRecord
from hexrt.workflow.graph import Node, TaskGraph


class Tensor(msgspec.Struct, gc=False, eq=False):
    """The bytes behind a handle, which means something in one run alone.

    `refs` counts the outputs held that name it, the launches in flight that read it, and a report of it that is being taken in.
    """

    handle: int
    place: int
    offset: int
    bytes: int
    slot: int = -1  # of the ring that it lies in
    refs: int = 0
    ended: bool = False  # its run has
    step: int = -1  # that put it out first
    reads: int = 0  # launches in flight that may read it
    page: int = -1  # of HOST, once it left its ring
    is_moving: bool = False  # out of its ring
    is_kept: bool = False  # the run's result names it


class Task(msgspec.Struct, gc=False, eq=False):
    """One scheduled unit, and its own timeline record. Times are monotonic ns, 0 for what did not happen."""

    run: Run
    step: Step
    part: int  # map position x parts of the op + op_part
    op_part: int
    state: TaskState = TaskState.WAITING
    attempt: int = 0
    failures: int = 0
    losses: int = 0  # of the worker or device under it
    device: str = ""
    command: int = 0
    work: int = 0
    ready_ns: int = 0
    placed_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    predicted_ns: int = 0
    pages_migrated: int = 0  # brought up for it before it could start
    migration_bytes: int = 0
    output: msgspec.Raw | None = None
    item: msgspec.Raw | None = None
    learn: Callable[[int], None] | None = None  # takes the run time in ns, for the cost model
    tensors: tuple[Tensor, ...] = ()  # that its launch in flight may read
    answered: list[int] | None = None  # token ids of an LLM answer so far
    logprobs: list[TokenLogprob] | None = None  # of each of them, where they were asked for
    text: list[str] | None = None


class Step(msgspec.Struct, gc=False, eq=False):
    node: Node
    pending: int
    state: TaskState = TaskState.WAITING
    rank: float = 0.0  # remaining critical path in ns, this step included
    tasks: list[Task] = []  # of a map, those of its first elements: the others are made as these end
    size: int = 0  # elements of a map, once it is known over what
    open_tasks: int = 0
    items: Sequence[msgspec.Raw] | None = None  # what a map goes over, until it has ended
    outputs: list[msgspec.Raw] | None = None  # of the elements of a map, until it has ended
    parts_bytes: int = 0  # of the outputs that only the step itself still needs
    output: msgspec.Raw | None = None
    read: int = 0  # successors known to have ended, in their order
    error: ErrorRecord | None = None


class Run(msgspec.Struct, gc=False, eq=False):
    id: bytes
    name: str
    uid: int
    gid: int
    durability: Durability
    submitted_ns: int
    wall_ns: int
    graph: TaskGraph | None
    steps: list[Step] = []
    open_steps: int = 0
    in_flight: int = 0
    mapped_tasks: int = 0  # of maps so far
    held_bytes: int = 0  # by its graph, its client's memory, tasks and outputs
    charged_bytes: int = 0  # of that, counted among those of all runs; some more at most
    tensors: dict[int, Tensor] | None = None  # by handle, as long as anything refers to them
    given: tuple[Tensor, ...] = ()  # of those, the ones in its graph, until it has ended
    given_bytes: int = 0  # of the client's memory that they lie in, as long as any is there
    given_left: int = 0  # of those, that anything refers to
    kept: frozenset[int] | None = None  # the steps that its outputs are of, once it holds a large output
    state: RunState = RunState.RUNNING
    cancelled: ErrorRecord | None = None  # why the run is being stopped
    error: ErrorRecord | None = None
    ended_ns: int = 0
    watched: bool = False
    ticket: int = 0  # newest store ticket of the run's facts; the service's
    history: list[AttemptRecord] = []  # attempts before the current one


class Change(msgspec.Struct, frozen=True, gc=False):
    """Something a watcher of the run is told."""

    run: Run
    event: str
    step: Step | None
    task: Task | None
    text: str = ""


NAMES = {state: state.name.lower() for state in TaskState}


def record_of(task: Task, state: str = "") -> AttemptRecord:
    """The timeline record of a task's current attempt."""
    return AttemptRecord(
        task.step.node.index, task.part, task.step.node.op.parts[task.op_part].name, task.attempt, task.device, 0, task.ready_ns,
        task.placed_ns, task.start_ns, task.end_ns, state or NAMES[task.state], task.predicted_ns,
        len(task.answered) if task.answered else 0, task.pages_migrated, task.migration_bytes,
    )  # fmt: skip


def add_tokens(task: Task, event: Emitted) -> bool:
    """Appends to the answer so far; False, with nothing changed, where the event does not go on from there."""
    if task.answered is None or task.text is None:
        task.answered, task.text = [], []
    if event.first != len(task.answered):
        return False
    task.answered.extend(event.ids)
    task.text.append(event.text)
    if event.logprobs:
        task.logprobs = [*(task.logprobs or ()), *event.logprobs]
    return True


def cut_cycles(run: Run) -> None:
    """Empties a run that is forgotten, since the garbage collector knows nothing of it."""
    for step in run.steps:
        step.tasks.clear()
    run.steps.clear()
    run.graph = None


def check_counts(run: Run) -> None:
    """Asserts that the run's counters equal what they count."""
    in_flight = sum(t.state in (TaskState.PLACED, TaskState.RUNNING) for s in run.steps for t in s.tasks)
    assert in_flight == run.in_flight, f"run {run.id.hex()}: {in_flight} in flight, counted {run.in_flight}"
    open_steps = sum(s.state < TaskState.DONE for s in run.steps)
    assert open_steps == run.open_steps, f"run {run.id.hex()}: {open_steps} open, counted {run.open_steps}"


def story(task: Task) -> str:
    """What is known of a task, for a bug report."""
    return (
        f"run {task.run.id.hex()} step {task.step.node.id} part {task.part}: {task.state.name}, attempt "
        f"{task.attempt}, device {task.device or '-'}, command {task.command}, step {task.step.state.name}"
    )
