"""`code.python`: runs a Python program that nobody vouches for, in a bubblewrap sandbox, and returns what it printed and wrote.

The program sees an empty network, a read-only system, a private /box (its current folder) and /tmp, and the standard library. Result
files are those under /box/out. Nothing is run where the sandbox cannot be set up or does not pass its own test.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hexrt.core import DeviceKind
from hexrt.ops.spec import OpSpec, Part, Port, StepContext


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 10.0  # wall clock
    memory_mib: Annotated[int, msgspec.Meta(ge=64, le=65_536)] = 512  # of all its processes together
    processes: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 32  # at a time, threads counted
    disk_mib: Annotated[int, msgspec.Meta(ge=1, le=16_384)] = 64  # of /box, and of /tmp; lies in memory
    output_kib: Annotated[int, msgspec.Meta(ge=1, le=16_384)] = 256  # of stdout, and of stderr; what is past it is cut
    result_mib: Annotated[int, msgspec.Meta(ge=0, le=256)] = 8  # of the files under /box/out
    check: bool = True  # False: a program that fails is an output like any other
    from_markdown: bool = False  # take the first fenced code block of the text, if there is one


def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._program import run_program

    return run_program(context, params, inputs)


OP = OpSpec(
    name="code.python",
    doc="Runs a Python program in a sandbox without network. Returns {stdout, stderr, exit_code, timed_out, stopped, truncated,"
    " seconds, files, left_out}; `files` are those that it left under /box/out. Fails where the program does, unless `check` is"
    " false.",
    parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.code_python:run"),),
    params=Params,
    inputs={
        "code": Port(str, doc="the program"),
        "stdin": Port(required=False, doc="text or bytes for its standard input"),
        "files": Port(dict[str, Any], required=False, doc="text or bytes by relative path, put in /box"),
        "arguments": Port(list[str], required=False, doc="its command line arguments"),
    },
)
