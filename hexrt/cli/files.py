"""Commands about files: validate, schema, trace."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from hexrt.cli.options import Shared, find_run, read_workflow, shared_options
from hexrt.cli.output import counted, print_json
from hexrt.config import Config


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def validate(file: str, as_json: bool) -> int:
    """Check the workflow in FILE (- for standard input) as the daemon would, without running it."""
    from hexrt.ops.registry import load_ops
    from hexrt.workflow.check import GraphLimits, check_workflow

    limits = Config().limits
    most = GraphLimits(limits.max_steps, limits.max_depth, limits.max_graph_mib << 20, limits.max_nesting)
    graph = check_workflow(read_workflow(file), load_ops()[0], most, Config().steps.timeout_s)
    if as_json:
        print_json({"name": graph.name, "steps": len(graph.nodes), "edges": len(graph.edges), "bytes": graph.bytes})
    else:
        print(f"{file}: good; {counted(len(graph.nodes), 'step')}, {counted(len(graph.edges), 'edge')}")
    return 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it in one line.")
def schema(as_json: bool) -> int:
    """Print the JSON Schema of workflow files, with the ops that are installed here."""
    from hexrt.ops.registry import load_ops
    from hexrt.workflow.schema import workflow_schema

    text = msgspec.json.encode(workflow_schema(load_ops()[0]))
    print((text if as_json else msgspec.json.format(text, indent=2)).decode())
    return 0


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: RUN.pftrace, in this folder."
)
@shared_options
def trace(shared: Shared, runs: tuple[str, ...], output: Path | None) -> int:
    """Write the timeline of one or more RUNs as a Perfetto trace; open it at https://ui.perfetto.dev."""
    from hexrt.tracing.perfetto import write_trace

    with shared.connect() as client:
        timelines = [client.timeline(find_run(client, run)) for run in runs]
    path = output or Path(f"{timelines[0].run.hex()[:12]}.pftrace")
    summary = write_trace(timelines, path)
    if shared.json:
        print_json(
            {"path": str(path), "attempts": summary.attempts, "tracks": summary.tracks, "slices": summary.slices}
        )
    else:
        print(path)
        size = f"{counted(summary.attempts, 'attempt')} on {counted(summary.tracks, 'track')}"
        print(f"{size}; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
