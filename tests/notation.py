"""A tiny notation for tests: `workflow("a -> b, c -> d")`, and a run table driven by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from hexrt import values
from hexrt.core import Durability
from hexrt.errors import ErrorRecord
from hexrt.events import Failed, Finished, Submitted
from hexrt.ops.registry import load_ops
from hexrt.ops.spec import OpSpec
from hexrt.runtime.entities import Run, Task
from hexrt.runtime.state import RunTable
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import StepSpec, Workflow

OPS: Mapping[str, OpSpec] = load_ops()[0]


def workflow(text: str, **steps: dict[str, Any]) -> Workflow:
    """`a -> b -> c, a -> d`: order edges between noop steps; keywords give further StepSpec fields of a step."""
    after: dict[str, list[str]] = {}
    for chain in text.split(","):
        names = [name.strip() for name in chain.split("->")]
        for name in names:
            after.setdefault(name, [])
        for before, behind in pairwise(names):
            after[behind].append(before)
    return Workflow(
        tuple(
            StepSpec(**({"id": name, "op": "noop", "after": tuple(before)} | steps.get(name, {})))
            for name, before in after.items()
        )
    )


def table(ops: Mapping[str, OpSpec] = OPS) -> RunTable:
    return RunTable(lambda w: check_workflow(w, ops, GraphLimits(), 600.0))


def submit(runs: RunTable, written: Workflow, durability: Durability = Durability.NONE, at_ns: int = 1) -> Run:
    run = os.urandom(16)
    runs.apply(Submitted(run, 1000, 1000, durability, 1, at_ns, written))
    return runs.runs[run]


def task_of(run: Run, step: str, part: int = 0) -> Task:
    return next(s for s in run.steps if s.node.id == step).tasks[part]


def fresh(runs: RunTable) -> list[str]:
    """Names of the steps whose tasks became ready since the last call."""
    names = [t.step.node.id if t.step.node.map is None else f"{t.step.node.id}[{t.part}]" for t in runs.fresh]
    runs.fresh.clear()
    return names


def place(runs: RunTable, run: Run, step: str, part: int = 0) -> Task:
    task = task_of(run, step, part)
    runs.place(task, "pool:0", 1, 1, 1)
    return task


def finished(task: Task, value: Any = None, end_ns: int = 5) -> Finished:
    raw = msgspec.Raw(values.encode(value))
    return Finished(task.run.id, task.step.node.index, task.part, task.attempt, "pool:0", 2, end_ns, raw)


def failed(task: Task, kind: str = "task_failed", blame: bool = True) -> Failed:
    error = ErrorRecord(kind, "it broke")
    return Failed(task.run.id, task.step.node.index, task.part, task.attempt, "pool:0", 2, 5, error, blame)


def states(run: Run) -> dict[str, str]:
    return {s.node.id: s.state.name.lower() for s in run.steps}
