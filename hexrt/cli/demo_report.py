"""What the demo tells at its end: where each step ran, how long it waited and ran, and how much the overlap gained.

Pure: made from the timelines of the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hexrt.cli.demo_questions import Question
from hexrt.cli.demo_view import printable
from hexrt.protocol.messages import RunTimeline


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one run. Its tasks' times are added up."""

    run: str
    step: str
    op: str
    state: str
    devices: tuple[str, ...]
    queue_ns: int
    run_ns: int
    tokens: int


def step_times(label: str, timeline: RunTimeline) -> list[StepTimes]:
    """The steps of a run that were attempted, in the workflow's order."""
    times = []
    for index, (step, op) in enumerate(timeline.steps):
        tried = [a for a in timeline.attempts if a.step == index]
        if tried:
            ran = [a for a in tried if a.start_ns]
            times.append(
                StepTimes(
                    label,
                    step,
                    op,
                    tried[-1].state,
                    tuple(sorted({a.device for a in tried if a.device})),
                    sum(max(0, a.start_ns - a.ready_ns) for a in ran),
                    sum(max(0, a.end_ns - a.start_ns) for a in ran),
                    sum(a.tokens for a in tried),
                )
            )
    return times


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whole times of the runs together and one step at a time; `busy_s` adds up the running times of what ran together."""

    together_s: float
    busy_s: float
    one_by_one_s: float  # 0: not measured

    def as_json(self) -> dict[str, float]:
        out = {"together_s": self.together_s, "busy_s": self.busy_s}
        if self.one_by_one_s:
            out |= {"one_step_at_a_time_s": self.one_by_one_s, "ratio": self.one_by_one_s / self.together_s}
        return out

    def __str__(self) -> str:
        if not self.one_by_one_s:
            return f"whole time: {self.together_s:.2f} s"
        ratio = self.one_by_one_s / self.together_s
        return f"whole time: {self.together_s:.2f} s; one step at a time: {self.one_by_one_s:.2f} s; ratio {ratio:.2f}"


def compare(together: Sequence[RunTimeline], one_by_one: Sequence[RunTimeline]) -> Comparison:
    return Comparison(span_ns(together) / 1e9, busy_ns(together) / 1e9, span_ns(one_by_one) / 1e9)


def span_ns(timelines: Sequence[RunTimeline]) -> int:
    """From the first submission to the last end."""
    return max((t.ended_ns for t in timelines), default=0) - min((t.submitted_ns for t in timelines), default=0)


def busy_ns(timelines: Sequence[RunTimeline]) -> int:
    """The running times of all attempts, added up."""
    return sum(max(0, a.end_ns - a.start_ns) for t in timelines for a in t.attempts if a.start_ns)


def show_answer(console: Console, question: Question, outputs: Mapping[str, Any]) -> None:
    """What one agent found, said and did. A step that failed leaves its line out. A terminal's lines break between words."""

    def line(name: str, text: object, style: str = "") -> None:
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_column(width=11, style="cyan")
        row.add_column(overflow="fold")
        told = Text(printable(str(text)), style)
        row.add_row(f"  {name}", told)
        if console.is_terminal:
            console.print(row)
        else:
            console.print(Text(f"  {name:<9}", "cyan"), told, soft_wrap=True)

    console.print(Text(question.text, "bold"))
    if "answer" in outputs:
        line("answer", outputs["answer"])
        line("found in", outputs.get("found", "?"))
    if "verdict" in outputs:
        result, by, why = read_verdict(outputs["verdict"])
        whose = "model's own program" if by == "model" else f"fixed program; {why}"
        line("program", f"{question.task} = {result} {question.unit} ({whose})", "" if by == "model" else "yellow")
    if "label" in outputs:
        line("picture", outputs["label"])
    if "letters" in outputs:
        line("letters", f"{outputs['letters'][:100]}")
    if "tool" in outputs:
        line("tool", ", ".join(f"{key} {value}" for key, value in outputs["tool"].items()))
    if "summary" in outputs:
        line("summary", outputs["summary"])


def read_verdict(stdout: str) -> tuple[str, str, str]:
    """The result, whose program it is of (`model` or `fixed`), and why."""
    result, _, verdict = stdout.partition("\n")
    said = json.loads(verdict)
    return result, said["by"], said["why"]


def _devices(names: Iterable[str]) -> str:
    """`cpu:0 pool:0,1` for cpu:0, pool:0 and pool:1."""
    indexes: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        kind, _, index = name.partition(":")
        indexes.setdefault(kind, []).append(index)
    return " ".join(f"{kind}:{','.join(found)}" for kind, found in indexes.items())


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f}" if ns < 1e8 else f"{ns / 1e6:,.0f}"


def steps_table(times: Sequence[StepTimes], every_run: bool) -> Table:
    """A row a step: of each run, or over the runs the median and the longest. Fits 80 columns."""
    runs = len({t.run for t in times})
    title = "each step of each run, in ms" if every_run else f"each step over {runs} runs, median and longest in ms"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("question", "step", "device") if every_run else ("step", "op", "device"):
        table.add_column(name, no_wrap=name != "question")
    for name in ("queued", "ran") if every_run else ("queued", "longest", "ran", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    if every_run:
        for t in times:
            table.add_row(t.run, t.step, _devices(t.devices), _ms(t.queue_ns), _ms(t.run_ns), str(t.tokens or ""))
        return table
    for step in dict.fromkeys(t.step for t in times):
        rows = [t for t in times if t.step == step]
        devices = _devices(device for t in rows for device in t.devices)
        queued, ran = [t.queue_ns for t in rows], [t.run_ns for t in rows]
        cells = (_ms(median(queued)), _ms(max(queued)), _ms(median(ran)), _ms(max(ran)))
        table.add_row(step, rows[0].op, devices, *cells, str(sum(t.tokens for t in rows) or ""))
    return table


def as_json(times: Sequence[StepTimes]) -> list[dict[str, Any]]:
    return [
        {
            "run": t.run,
            "step": t.step,
            "op": t.op,
            "state": t.state,
            "devices": list(t.devices),
            "queue_ms": t.queue_ns / 1e6,
            "run_ms": t.run_ns / 1e6,
            "tokens": t.tokens,
        }
        for t in times
    ]
