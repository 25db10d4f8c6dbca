"""The entry point `hexrt`: finds the command, and turns every error into one line and an exit code.

Owns the table of commands and the exit codes. A command's file is imported when it is called, so that help and completion are quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

import hexrt
from hexrt.errors import HexrtError

COMMANDS = {
    "run": ("hexrt.cli.runs:run", "Submit a workflow, follow it and print its result."),
    "submit": ("hexrt.cli.runs:submit", "Submit a workflow and print the run's id."),
    "status": ("hexrt.cli.runs:status", "Show a run and its steps."),
    "list": ("hexrt.cli.runs:list_", "List runs, the newest first."),
    "watch": ("hexrt.cli.runs:watch", "Follow a run from its beginning to its end."),
    "result": ("hexrt.cli.runs:result", "Wait for a run's end and print its outputs."),
    "cancel": ("hexrt.cli.runs:cancel", "Cancel a run."),
    "trace": ("hexrt.cli.files:trace", "Write the timeline of runs as a Perfetto trace."),
    "validate": ("hexrt.cli.files:validate", "Check a workflow file without running it."),
    "schema": ("hexrt.cli.files:schema", "Print the JSON Schema of workflow files."),
    "devices": ("hexrt.cli.machine:devices", "List the devices, and why one is missing."),
    "memory": ("hexrt.cli.memory:memory", "Show the tiers of memory, and who holds it."),
    "models": ("hexrt.cli.models:models", "List the models, and where each is loaded."),
    "statistics": ("hexrt.cli.machine:statistics", "Print the daemon's counters."),
    "shutdown": ("hexrt.cli.machine:shutdown", "Stop the daemon."),
    "config": ("hexrt.cli.configs:config", "Check and show the daemon's configuration."),
    "bench": ("hexrt.cli.bench:bench", "Measure hexrt on this machine."),
    "demo": ("hexrt.cli.demo:demo", "Run several agents on real models and documents."),
}

OK, RUN_FAILED, USAGE, NO_DAEMON, NOT_FOUND, TRY_LATER, UNAVAILABLE, BUG, INTERRUPTED, NO_READER = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    70,
    130,
    141,
)
EXIT_OF_KIND = {
    "bad_request": USAGE, "disconnected": NO_DAEMON, "not_found": NOT_FOUND, "overloaded": TRY_LATER, "out_of_memory": TRY_LATER,
    "unavailable": UNAVAILABLE, "invariant_violation": BUG,
}  # fmt: skip

EPILOG = """\b
Exit codes:
    0  done, and the run succeeded
    1  the run failed or was cancelled
    2  wrong usage, or a bad workflow, value or file
    3  hexrtd cannot be reached
    4  there is no such run, or it is somebody else's
    5  hexrtd is full: try again later
    6  what is needed is not installed or not allowed here
   70  a bug in hexrt
  130  Ctrl-C
  141  nobody reads the output any more

\b
HEXRT_SOCKET names the daemon's socket where --socket does not.
"""


class NoReader(Exception):
    """Standard output was closed at its other end."""


class LazyGroup(click.Group):
    """Knows its commands by name and one line of help, and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise click.ClickException(f"`hexrt {cmd_name}` needs {error.name}, which is not installed here") from error
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise NoReader from error  # click would exit with 1, which says that the run failed

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's socket.")
@click.version_option(hexrt.__version__, prog_name="hexrt")
@click.pass_context
def hexrt_command(ctx: click.Context, socket: Path | None) -> None:
    """Runs AI-agent workflows on this machine, through the daemon hexrtd."""
    ctx.obj = socket


def fail(text: str) -> None:
    print(f"hexrt: {' '.join(text.split())}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    try:
        code = hexrt_command.main(args=arguments, prog_name="hexrt", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "hexrt"
        fail(f"{error.format_message().rstrip('.')}. See `{path} --help`.")
        return USAGE
    except click.ClickException as error:
        fail(error.format_message())
        return UNAVAILABLE if isinstance(error.__cause__, ModuleNotFoundError) else USAGE
    except HexrtError as error:
        fail(str(error))
        return EXIT_OF_KIND.get(error.kind, RUN_FAILED)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (BrokenPipeError, NoReader):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would complain once more
        return NO_READER


if __name__ == "__main__":
    sys.exit(main())
