"""Commands about runs: run, submit, status, list, watch, result, cancel.

Each opens one connection, asks, prints and returns the exit code.
"""

from __future__ import annotations

import sys

import click

from hexrt.cli.follow import View, event_line, view
from hexrt.cli.options import Shared, durability_option, find_run, read_workflow, shared_options
from hexrt.cli.output import error_text, print_json, print_outcome, print_table, print_text, seconds, wall
from hexrt.client import Client, Outcome
from hexrt.core import Durability, RunState
from hexrt.errors import BadRequest
from hexrt.protocol.messages import Accepted, Update
from hexrt.workflow.model import Workflow

INTERRUPTED = 130


def exit_code(outcome: Outcome) -> int:
    return 0 if outcome.state is RunState.SUCCEEDED else 1


@click.command()
@click.argument("file")
@durability_option
@shared_options
def run(shared: Shared, file: str, durability: str) -> int:
    """Submit the workflow in FILE (YAML or JSON; - for standard input), follow it and print its result.

    Progress goes to standard error, the outputs to standard output. Ctrl-C cancels the run; a second Ctrl-C leaves it alone.
    """
    workflow = read_workflow(file)
    with shared.connect() as client:
        outcome = _follow(shared, client, workflow, Durability(durability))
    if outcome is None:
        return INTERRUPTED
    if shared.json:
        print_json(outcome)
    else:
        print_outcome(outcome)
    return exit_code(outcome)


def _follow(shared: Shared, client: Client, workflow: Workflow, durability: Durability) -> Outcome | None:
    """None after Ctrl-C."""
    run = ""
    try:
        with view(shared.json) as shown:
            for event in client.follow(workflow, durability):
                if isinstance(event, Outcome):
                    return event
                if isinstance(event, Accepted):
                    run = event.run.hex()
                _show(shown, event)
    except KeyboardInterrupt:
        if run:
            _cancel_or_leave(shared, run)
        else:
            print("hexrt: interrupted before the run was accepted; `hexrt list` shows whether it was", file=sys.stderr)
    return None


def _show(shown: View, event: Accepted | Update) -> None:
    if isinstance(event, Accepted):
        shown.accepted(event.run.hex())
    else:
        shown.update(event)


def _cancel_or_leave(shared: Shared, run: str) -> None:
    print(f"hexrt: cancelling {run}; Ctrl-C again leaves it", file=sys.stderr)
    try:
        with shared.connect() as client:  # the first connection may have broken off in the middle of a message
            client.cancel(run, "Ctrl-C at hexrt run")
    except KeyboardInterrupt:
        print(f"hexrt: left; see `hexrt status {run}`", file=sys.stderr)
    else:
        print(f"hexrt: cancelled {run}", file=sys.stderr)


@click.command()
@click.argument("file")
@durability_option
@shared_options
def submit(shared: Shared, file: str, durability: str) -> int:
    """Submit the workflow in FILE (- for standard input) and print the run's id, without waiting for it."""
    workflow = read_workflow(file)
    with shared.connect() as client:
        run = client.submit(workflow, Durability(durability))
    if shared.json:
        print_json({"run": run})
    else:
        print(run.hex())
    return 0


@click.command()
@click.argument("run")
@shared_options
def status(shared: Shared, run: str) -> int:
    """Show RUN (its id, or the first digits of it) and its steps."""
    with shared.connect() as client:
        answer = client.status(find_run(client, run))
    if shared.json:
        print_json(answer)
        return 0
    summary = answer.summary
    print_text(f"{summary.run.hex()}  {summary.name}: {summary.state} after {seconds(summary.duration_s)}")
    print_table(
        ("step", "op", "state", "tasks", "device", "queued", "ran", "about"),
        [
            (s.id, s.op, s.state, f"{s.tasks_done}/{s.tasks}", s.device, seconds(s.queued_s), seconds(s.run_s),
             error_text(s.error) if s.error else s.waits and f"waits for {s.waits}")
            for s in answer.steps
        ],
    )  # fmt: skip
    return 0


@click.command(name="list")
@click.option("--state", type=click.Choice([each.value for each in RunState]), help="Only runs in this state.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="At most so many.")
@shared_options
def list_(shared: Shared, state: str | None, limit: int) -> int:
    """List runs, the newest first."""
    with shared.connect() as client:
        runs = client.list(RunState(state) if state else None, limit)
    if shared.json:
        print_json(runs)
        return 0
    print_table(
        ("run", "name", "state", "steps", "took", "submitted"),
        [
            (r.run.hex()[:12], r.name, r.state, f"{r.steps_done}/{r.steps}", seconds(r.duration_s), wall(r.submitted_wall_ns))
            for r in runs
        ],
    )  # fmt: skip
    return 0


@click.command()
@click.argument("run")
@shared_options
def watch(shared: Shared, run: str) -> int:
    """Follow RUN from its beginning to its end, a line an event (with --json an object a line). Ctrl-C stops only the watching."""
    with shared.connect() as client:
        for event in client.watch(find_run(client, run)):
            if shared.json:
                print_json(event)
            elif isinstance(event, Update):
                print(event_line(event), flush=True)
            if isinstance(event, Outcome):
                if not shared.json:
                    print(event.state)
                    print_outcome(event)
                return exit_code(event)
    raise AssertionError("a watch ends with an outcome")


@click.command()
@click.argument("run")
@click.option("--no-wait", is_flag=True, help="Fail while the run goes on.")
@click.option("--output", "name", help="Print this output alone.")
@shared_options
def result(shared: Shared, run: str, no_wait: bool, name: str | None) -> int:
    """Wait for the end of RUN and print its outputs."""
    with shared.connect() as client:
        outcome = client.result(find_run(client, run), wait=not no_wait)
    if name is not None and name not in outcome.outputs:
        known = ", ".join(outcome.outputs) or "none"
        raise BadRequest(f"there is no output {name!r}; there are: {known}", "--output")
    if name is not None:
        outcome = Outcome(outcome.run, outcome.state, outcome.outputs.only(name), outcome.errors)
    if shared.json:
        print_json(outcome)
    else:
        print_outcome(outcome)
    return exit_code(outcome)


@click.command()
@click.argument("run")
@click.option("--reason", default="", help="Kept with the run.")
@shared_options
def cancel(shared: Shared, run: str, reason: str) -> int:
    """Cancel RUN; returns when no work of it goes on."""
    with shared.connect() as client:
        found = find_run(client, run)
        client.cancel(found, reason)
        state = client.status(found).summary.state
    if shared.json:
        print_json({"run": found, "state": state})
    elif state is RunState.CANCELLED:
        print(f"cancelled {found.hex()}")
    else:
        print(f"{found.hex()} had ended before: {state}")
    return 0
