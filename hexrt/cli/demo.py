"""`hexrt demo`: real agents over a real corpus, through a `hexrtd` of its own, and what the overlap of their steps gains.

Starts the daemon and a local HTTP tool, prepares the index, runs one workflow for each question, several at once, then the same
workflows one step at a time, and reports. Leaves nothing but the trace, also after Ctrl-C or SIGTERM. Exit status: 0 where every step
ended well and every answer has text; 1 where not, naming the step; else those of `hexrt.cli.main`, and 143 after SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from hexrt.cli.demo_questions import QUESTIONS, Question
from hexrt.cli.demo_report import Comparison, as_json, compare, show_answer, step_times, steps_table
from hexrt.cli.demo_run import Finished, run_one, run_several
from hexrt.cli.demo_tool import LocalTool
from hexrt.cli.demo_view import LiveView, PlainView, View
from hexrt.cli.demo_workflow import (
    Document,
    Picture,
    agent_workflow,
    corpus_workflow,
    one_at_a_time,
    read_corpus,
    read_pictures,
    warm_up_workflow,
)
from hexrt.cli.own_daemon import OwnDaemon
from hexrt.client import AsyncClient
from hexrt.errors import BadRequest, Disconnected, TaskFailed
from hexrt.tracing.perfetto import TraceSummary, write_trace
from hexrt.workflow.model import Workflow

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Options:
    questions: Sequence[Question]
    agents: int
    documents: Sequence[Document]
    pictures: Sequence[Picture]
    models: Path
    trace: Path
    compare: bool
    log: Path | None


@dataclass(frozen=True, slots=True)
class Results:
    together: list[Finished]
    one_by_one: list[Finished]
    prepare_s: float


class Stopped(BaseException):
    """A signal asked the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exception, so that the daemon and its directory are cleared away as with Ctrl-C."""

    def stop(number: int, _: object) -> NoReturn:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def model_dtype(cpuinfo: str) -> str:
    """bfloat16 where the processor computes in it, else float32, which is faster there."""
    flags = set(cpuinfo.split())
    return "bfloat16" if flags & {"amx_bf16", "avx512_bf16", "bf16"} else "float32"


def config_tables(models: Path, tool_host: str) -> dict[str, Mapping[str, object]]:
    """The demo daemon's configuration."""
    return {
        "daemon": {"models_dir": str(models)},
        "models.smollm2": {"path": "smollm2-135m", "dtype": model_dtype(Path("/proc/cpuinfo").read_text())},
        'ops."tool.http"': {"allow": [tool_host], "allow_private": [tool_host]},
    }


def agents(options: Options, tool_url: str) -> list[tuple[str, Workflow]]:
    """One workflow for each question, each with a picture of its own as far as there are enough."""
    letters = [p for p in options.pictures if p.has_text] or options.pictures
    plain = [p for p in options.pictures if not p.has_text] or options.pictures
    return [
        (q.title, agent_workflow(q, plain[i % len(plain)], letters[i % len(letters)], tool_url))
        for i, q in enumerate(options.questions)
    ]


async def prepare(client: AsyncClient, options: Options, new_view: Callable[[], View]) -> None:
    """Builds the index and warms the devices up. Raises TaskFailed, naming a step that failed."""
    pool = [device.name for device in await client.devices() if device.kind == "pool"]
    letters = next((p for p in options.pictures if p.has_text), options.pictures[0])
    warm_up = warm_up_workflow(pool, options.pictures[0], letters)
    with new_view() as view:
        runs = await run_several(
            client, [("corpus", corpus_workflow(options.documents)), ("warm up", warm_up)], 2, view
        )
    if found := [line for run in runs for line in run.problems()]:
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        raise TaskFailed(found[0] + more, "preparation")


async def carry_out(options: Options, daemon: OwnDaemon, tool: LocalTool, new_view: Callable[[], View], say: Callable[[str], None]) -> Results:  # fmt: skip
    """All runs of the demo."""
    clock = asyncio.get_running_loop().time
    workflows = agents(options, tool.url)
    async with AsyncClient(daemon.socket) as client:
        began = clock()
        say(f"hexrtd runs, its devices start; {len(options.documents)} documents go into an index")
        await prepare(client, options, new_view)
        prepare_s = clock() - began
        for device in await client.devices():
            if why := device.why or device.facts.get("why"):
                say(f"{device.name}: {why}")
        say(f"agents: {len(workflows)}, at most {min(options.agents, len(workflows))} at once")
        with new_view() as view:
            together = await run_several(client, workflows, options.agents, view)
        one_by_one: list[Finished] = []
        if options.compare:
            say("the same workflows, one step at a time")
            with new_view() as view:
                for label, workflow in workflows:
                    one_by_one.append(await run_one(client, label, one_at_a_time(workflow), view))
    return Results(together, one_by_one, prepare_s)


def problems(results: Results) -> list[str]:
    """Every failed step and every empty answer, each once."""
    found: list[str] = []
    for run in (*results.together, *results.one_by_one):
        found += run.problems()
        outputs = run.outcome.outputs
        found += [
            f"{run.label}: step {name} gave no text"
            for name in ("answer", "summary")
            if name in outputs and not outputs[name].strip()
        ]
    return list(dict.fromkeys(found))


def as_object(options: Options, results: Results, comparison: Comparison, trace: TraceSummary) -> dict[str, Any]:
    """The report for programs."""
    pairs = list(zip(options.questions, results.together, strict=True))
    return {
        "answers": [{"question": q.text, "run": r.outcome.run.hex(), **r.outcome.outputs} for q, r in pairs],
        "documents": len(options.documents),
        "prepare_s": results.prepare_s,
        "steps": as_json([t for r in results.together for t in step_times(r.label, r.timeline)]),
        "whole": comparison.as_json(),
        "trace": str(trace.path),
        "problems": problems(results),
    }


def show(
    console: Console, options: Options, results: Results, comparison: Comparison, trace: TraceSummary, full: bool
) -> None:
    """The report for people."""
    for question, run in zip(options.questions, results.together, strict=True):
        show_answer(console, question, run.outcome.outputs)
    times = [t for r in results.together for t in step_times(r.label, r.timeline)]
    console.print(steps_table(times, full))
    console.print(str(comparison), highlight=False, soft_wrap=True)
    console.print(f"trace: {trace.path}", highlight=False, soft_wrap=True)
    console.print(f"{trace.slices} slices; open it at https://ui.perfetto.dev", highlight=False)


def make_room(trace: Path) -> None:
    """Makes the trace's folder. Raises BadRequest where it cannot be had, so that no long run ends in that."""
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{trace.parent} cannot be made: {error.strerror}", "--trace-out") from error
    if not os.access(trace.parent, os.W_OK):
        raise BadRequest(f"{trace.parent} cannot be written to", "--trace-out")


def go(options: Options, as_json_object: bool, full: bool) -> int:
    """The whole demo on the main thread. Returns the exit status."""
    console = Console(stderr=as_json_object)

    def new_view() -> View:
        return LiveView(console) if console.is_terminal else PlainView(console.file)

    def say(text: str) -> None:
        console.print(text, style="bold", highlight=False, soft_wrap=True)

    with LocalTool() as tool, OwnDaemon(config_tables(options.models, tool.host), options.log) as daemon:
        try:
            results = asyncio.run(carry_out(options, daemon, tool, new_view, say))
        except Disconnected as error:
            raise Disconnected(f"{error.message}; its last words: {daemon.last_words()}") from error
    trace = write_trace([run.timeline for run in (*results.together, *results.one_by_one)], options.trace)
    comparison = compare([r.timeline for r in results.together], [r.timeline for r in results.one_by_one])
    if as_json_object:
        print(json.dumps(as_object(options, results, comparison, trace), indent=1, ensure_ascii=False))
    else:
        show(console, options, results, comparison, trace, full)
    found = problems(results)
    for line in found:
        print(f"hexrt: {line}", file=sys.stderr)
    return 1 if found else 0


@click.command()
@click.option("--questions", "count", type=click.IntRange(1, len(QUESTIONS)), default=6, show_default=True, help="How many questions, one agent each.")  # fmt: skip
@click.option("--agents", type=click.IntRange(1), default=len(QUESTIONS), help="Agents at work at the same time.  [default: all]")  # fmt: skip
@click.option("--documents", type=click.IntRange(20, 2000), default=400, show_default=True, help="Documents in the index.")  # fmt: skip
@click.option("--models-dir", type=click.Path(path_type=Path), default=ROOT / ".models", help="Where `make setup` put models and data.  [default: .models of the checkout]")  # fmt: skip
@click.option("--pictures", "pictures_dir", type=click.Path(path_type=Path), default=ROOT / "tests" / "data" / "images", help="A folder of pictures; those called page or text are read.  [default: those of the checkout's tests]")  # fmt: skip
@click.option("--trace-out", type=click.Path(dir_okay=False, path_type=Path), default=Path("traces/demo.pftrace"), show_default=True, help="Where the trace goes.")  # fmt: skip
@click.option(
    "--compare/--no-compare", "compare_too", default=True, help="Run all again, one step at a time, for the comparison."
)
@click.option(
    "--daemon-log", type=click.Path(dir_okay=False, path_type=Path), help="Keep the daemon's log in this file."
)
@click.option("--all-steps", is_flag=True, help="Show each run's steps, not their medians.")
@click.option("--json", "as_json_object", is_flag=True, help="Print one JSON object; progress goes to standard error.")
def demo(count: int, agents: int, documents: int, models_dir: Path, pictures_dir: Path, trace_out: Path, compare_too: bool, daemon_log: Path | None, all_steps: bool, as_json_object: bool) -> int:  # fmt: skip
    """Run real agents over a real corpus and show where the time went.

    Starts a hexrtd of its own and stops it again; --socket is not looked at. Ends with 0 if every step ended well and every answer has
    text, else with 1.
    """
    make_room(trace_out.absolute())
    questions = QUESTIONS[:count]
    corpus = read_corpus(models_dir, documents, [q.title for q in questions])
    pictures = read_pictures(pictures_dir)
    options = Options(questions, agents, corpus, pictures, models_dir.absolute(), trace_out.absolute(), compare_too, daemon_log)  # fmt: skip
    try:
        with stopping_in_order():
            return go(options, as_json_object, all_steps)
    except Stopped as error:
        return error.status
