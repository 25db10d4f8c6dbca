"""The work of `code.python`: checks what it is given, runs it in the sandbox, says in words how it ended."""

from __future__ import annotations

import re
import signal
from typing import Any

import msgspec

from hexrt.errors import BadRequest, TaskFailed, TimedOut, Unavailable
from hexrt.ops._sandbox import Job, run
from hexrt.ops._sandbox_check import explain, ready
from hexrt.ops._sandbox_watch import DRAIN_BYTES, MAX_FILES, MIB, Limits, Outcome, is_plain_name
from hexrt.ops._settings import read_settings
from hexrt.ops.code_python import OP, Params
from hexrt.ops.spec import StepContext

MAX_CODE_BYTES = 1 * MIB
MAX_INPUT_FILES = 1_000
MAX_ARGUMENTS_BYTES = 64 << 10
FENCED = re.compile(
    r"^[ \t]*(?P<fence>```+|~~~+)[ \t]*(?:python3?|py)?[ \t]*\n(?P<code>.*?)^[ \t]*(?P=fence)", re.M | re.S | re.I
)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config's [ops."code.python"]."""

    bwrap: str = ""  # the path of bubblewrap; "": found on PATH
    site_dir: str = ""  # a folder of packages that programs may import from; "": the standard library only
    read_only: tuple[str, ...] = ()  # further folders that programs may read
    max_timeout_s: float = 3_600.0
    max_memory_mib: int = 4_096
    max_processes: int = 256
    max_disk_mib: int = 1_024


def run_program(context: StepContext, params: Params, inputs: dict[str, Any]) -> dict[str, Any]:
    """Raises BadRequest, Unavailable, TimedOut or TaskFailed, each saying why; the last two only where `params.check` is true."""
    settings = read_settings(context, OP.name, Settings)
    limits = _limits(context, params, settings)
    job = _job(context.step, params, inputs, limits)
    box = ready(settings.bwrap, settings.site_dir, settings.read_only, (context.state_dir, context.models_dir))
    outcome = run(box, job, limits)
    if not outcome.started:
        raise Unavailable(explain(outcome), context.step)
    if outcome.error:
        raise BadRequest(outcome.error, f"{context.step}.inputs.files")
    if outcome.exit_code == -signal.SIGXCPU and not outcome.stopped:
        outcome.stopped = "time"
    if params.check:
        _raise_for(context.step, outcome, limits)
    return {
        "stdout": outcome.stdout.decode("utf-8", "replace"),
        "stderr": outcome.stderr.decode("utf-8", "replace"),
        "exit_code": outcome.exit_code,
        "timed_out": outcome.stopped == "time",
        "stopped": outcome.stopped,
        "truncated": outcome.truncated,
        "seconds": outcome.seconds,
        "files": outcome.files,
        "left_out": outcome.left_out,
    }


def _limits(context: StepContext, params: Params, settings: Settings) -> Limits:
    for name in ("timeout_s", "memory_mib", "processes", "disk_mib"):
        most = getattr(settings, f"max_{name}")
        if getattr(params, name) > most:
            raise BadRequest(f"is more than the {most} that this daemon allows", f"{context.step}.params.{name}")
    return Limits(
        timeout_s=min(
            params.timeout_s, context.timeout_s * 0.95
        ),  # so that the program's end is told before the step's
        memory_bytes=params.memory_mib * MIB,
        processes=params.processes,
        disk_bytes=params.disk_mib * MIB,
        output_bytes=params.output_kib << 10,
        result_bytes=params.result_mib * MIB,
    )


def _job(step: str, params: Params, inputs: dict[str, Any], limits: Limits) -> Job:
    where = f"{step}.inputs"
    code: str = inputs["code"]
    if params.from_markdown and (block := FENCED.search(code)):
        code = block["code"]
    if not code.strip():
        raise BadRequest("there is no program in it", f"{where}.code")
    content = _bytes(code, f"{where}.code")
    if len(content) > MAX_CODE_BYTES:
        raise BadRequest(f"{len(content)} bytes of program, more than the {MAX_CODE_BYTES} allowed", f"{where}.code")
    arguments: list[str] = inputs.get("arguments") or []
    if any("\0" in argument for argument in arguments):
        raise BadRequest("an argument cannot hold a NUL character", f"{where}.arguments")
    if sum(len(argument.encode()) + 8 for argument in arguments) > MAX_ARGUMENTS_BYTES:
        raise BadRequest(f"more than the {MAX_ARGUMENTS_BYTES} bytes of arguments allowed", f"{where}.arguments")
    stdin = inputs.get("stdin")
    return Job(
        content,
        b"" if stdin is None else _bytes(stdin, f"{where}.stdin"),
        _files(inputs.get("files") or {}, f"{where}.files", limits.disk_bytes - len(content)),
        arguments,
    )


def _files(files: dict[str, Any], where: str, room: int) -> dict[str, bytes]:
    if len(files) > MAX_INPUT_FILES:
        raise BadRequest(f"{len(files)} files, more than the {MAX_INPUT_FILES} allowed", where)
    contents: dict[str, bytes] = {}
    for name, value in files.items():
        if not is_plain_name(name) or name == "program.py":
            raise BadRequest(
                f"{ascii(name)[:100]} is no name for a file: a relative path without '..', not program.py", where
            )
        contents[name] = _bytes(value, f"{where}[{name!r}]")
    total = sum(map(len, contents.values()))
    if total > room:
        raise BadRequest(f"{total} bytes of files do not fit: raise params.disk_mib or send less", where)
    return contents


def _bytes(value: Any, where: str) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise BadRequest(f"is a {type(value).__name__}; text or bytes are needed", where)


def _raise_for(step: str, outcome: Outcome, limits: Limits) -> None:
    """Raises where the program did not end well by itself."""
    if outcome.stopped == "time":
        raise TimedOut(
            f"the program ran longer than {limits.timeout_s:g} s: raise params.timeout_s, or do less in it", step
        )
    reasons = {
        "memory": f"its processes took more than {limits.memory_bytes // MIB} MiB: raise params.memory_mib, or use less",
        "files": f"it made more than {MAX_FILES} files",
        "output": f"it printed more than {DRAIN_BYTES // MIB} MiB",
    }
    if outcome.stopped:
        raise TaskFailed(f"the program was stopped: {reasons[outcome.stopped]}", step)
    if outcome.exit_code == 0 and outcome.complete:
        return
    lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
    if outcome.exit_code < 0:
        how = f"was killed by {_signal_name(-outcome.exit_code)}"
    elif outcome.exit_code:
        how = f"ended with exit code {outcome.exit_code}"
    else:
        how = "ended, but its files could not be taken over"
    raise TaskFailed(f"the program {how}" + (f": {lines[-1][:500]}" if lines else ""), step)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() and number < 32 else f"signal {number}"
