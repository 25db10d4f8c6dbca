"""What the daemon and its device hosts say to each other, over one socketpair a host.

Owns the message types of both directions. A frame to a host is a msgpack array of messages; a frame from a host is
`[host_epoch, [messages]]`. The daemon drops a frame of an old epoch, and a report whose (command, attempt) it does not wait for.
A host refuses a page binding of an older version than it has. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hexrt.errors import ErrorRecord

VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# --- to a host --------------------------------------------------------------------------------------------------


class Hello(Message, tag=0):
    """First message. `settings` is the part of the config that the host's program and its ops need."""

    version: int
    host_epoch: int
    device: str
    state_dir: str
    models_dir: str
    settings: dict[str, Any]


class Binding(Message):
    """Puts a value into a task's inputs: at `to` (keys and list positions), from `path` inside `value`.

    `local` != 0 names an earlier Launch to this very host whose output is meant; `value` is then nil.
    """

    to: tuple[str | int, ...]
    path: tuple[str | int, ...]
    value: msgspec.Raw
    local: int = 0


class Launch(Message, tag=1):
    """Run one task. Launches of a pool worker are run in order; one whose local producer failed is not begun: HostFailed of kind
    `dropped`, like that of a Cancel that came before the beginning. Every Launch that is not withdrawn gets exactly one last report."""

    command: int
    attempt: int
    op: str
    part: int  # of the op
    run: bytes
    step: str
    uid: int
    timeout_s: float
    params: msgspec.Raw
    inputs: msgspec.Raw
    bindings: tuple[Binding, ...] = ()
    report_start: bool = False


class LoadModel(Message, tag=2):
    command: int
    model: str
    path: str  # folder with safetensors, config and tokeniser
    dtype: str
    arena_bytes: int  # as many page frames as fit are held for it; how many is in the output
    page_tokens: int


class UnloadModel(Message, tag=3):
    command: int
    model: str


class Copy(Message, tag=4):
    """Copy whole page frames within the model's arena: source[i] to target[i]."""

    command: int
    model: str
    source: tuple[int, ...]
    target: tuple[int, ...]


class BindPages(Message, tag=5):
    """Entries `first`.. of a sequence's page table become `frames`."""

    model: str
    sequence: int
    first: int
    frames: tuple[int, ...]
    version: int


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """temperature 0 is greedy. The draw for answer position i depends on (seed, i) alone."""

    temperature: float
    top_k: int  # 0: off
    top_p: float  # 1: off
    seed: int
    stop: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool = False


class ChunkSequence(Message):
    """One sequence of a chunk. `ids` are the prompt slice that starts at `position`; empty for pure decoding, where `position` is the number
    of tokens whose K and V are in the pages.

    `last` says that the slice ends the prompt, so that pass 1 samples. `sampling` and `answered` come with the first chunk that names
    the sequence: `answered` are answer ids from before a restart or preemption, already part of what is prefilled.
    """

    sequence: int
    position: int
    ids: tuple[int, ...]
    last: bool
    sampling: Sampling | None = None
    answered: tuple[int, ...] = ()


class Chunk(Message, tag=6):
    """`passes` forward passes over a fixed set of sequences."""

    command: int
    model: str
    passes: int
    sequences: tuple[ChunkSequence, ...]


class Withdraw(Message, tag=7):
    """Forget a command that has not begun; no report follows if it had not."""

    command: int


class Cancel(Message, tag=8):
    """Stop a command as soon as can be; a Failed of kind `cancelled` follows. A Chunk that has begun ends and is reported as any other."""

    command: int


class Release(Message, tag=9):
    """The sequence's state and page table in the host are no longer needed. In chunks on their way it takes no part from the next pass on."""

    model: str
    sequence: int


class Ping(Message, tag=10):
    """Asks the host's loop for a sign of life: Stats without values follows, after a running body where that runs on the loop."""


ToHost = Hello | Launch | LoadModel | UnloadModel | Copy | BindPages | Chunk | Withdraw | Cancel | Release | Ping

# --- from a host ------------------------------------------------------------------------------------------------


class Ready(Message, tag=0):
    """`facts` describe the device for people (`hexrt devices`): threads, provider, dtype, why something is missing."""

    version: int
    pid: int
    facts: dict[str, Any]


class HostStarted(Message, tag=1):
    command: int
    attempt: int
    start_ns: int


class HostFinished(Message, tag=2):
    command: int
    attempt: int
    start_ns: int
    end_ns: int
    output: msgspec.Raw  # for LoadModel: a map {page_bytes, context_tokens, eos, ...}


class Token(Message):
    """What one sequence gained in a chunk. `finish`: "" while it goes on, else "stop", "length" or "error: ..." (then it is failed)."""

    sequence: int
    ids: tuple[int, ...]
    text: str
    finish: str


class Chunked(Message, tag=3):
    command: int
    start_ns: int
    end_ns: int
    tokens: tuple[Token, ...]


class Copied(Message, tag=4):
    command: int
    start_ns: int
    end_ns: int
    bytes: int


class HostFailed(Message, tag=5):
    command: int
    attempt: int
    start_ns: int
    end_ns: int
    error: ErrorRecord


class Stats(Message, tag=6):
    values: dict[str, float]


FromHost = Ready | HostStarted | HostFinished | Chunked | Copied | HostFailed | Stats
