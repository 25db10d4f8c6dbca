"""What the daemon and its device hosts say to each other, over one socketpair a host.

Owns the message types of both directions. A frame to a host is a msgpack array of messages; a frame from a host is
`[host_epoch, [messages]]`. File descriptors come with the frame of their Map, in order. The daemon drops a frame of an old epoch, and a report whose (command, attempt) it does not wait for.
A host refuses a page binding of an older version than it has. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hexrt.core import TokenLogprob
from hexrt.errors import ErrorRecord

VERSION = 3

# Places: how a host addresses memory. Greater numbers are segments that the daemon names by Map.
DEVICE, HOST, NVME, FIRST_SEGMENT = 0, 1, 2, 16


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


class Located(Message):
    """Where the bytes of a tensor lie that a value names by its handle."""

    handle: int
    place: int
    offset: int
    bytes: int


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
    tensors: tuple[Located, ...] = ()  # of the inputs; valid until the last report


class LoadModel(Message, tag=2):
    """The output of its HostFinished is a `brain.models.LoadedModel`."""

    command: int
    model: str
    path: str  # a folder with safetensors, config and tokeniser, or one GGUF file
    dtype: str  # of what is computed
    page_tokens: int
    weights: str = "as_dtype"  # or int8, int4
    kv_dtype: str = ""  # of K and V in pages; "": dtype


class UnloadModel(Message, tag=3):
    command: int
    model: str


class Piece(Message):
    """`pages` pages that are neighbours at both ends. `sums`: from NVME, the xxh3_64 that each page must have; else empty."""

    source: int  # a place
    source_offset: int
    target: int
    target_offset: int
    page_bytes: int
    pages: int
    sums: tuple[int, ...] = ()


class Copy(Message, tag=4):
    """Move bytes between places, beside what else the host does. Nothing else touches them until Copied."""

    command: int
    pieces: tuple[Piece, ...]


class BindPages(Message, tag=5):
    """Entries `first`.. of a sequence's page table become `frames`, counted by the model's page over the whole arena."""

    model: str
    sequence: int
    first: int
    frames: tuple[int, ...]
    version: int


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an answer's text must match."""

    kind: str  # json_schema, regex
    source: str  # the schema as JSON, or the expression


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """temperature 0 is greedy. The draw for answer position i depends on (seed, i) alone.

    Applied in this order: repetition penalty, grammar, temperature, top_k, top_p, min_p.
    """

    temperature: float
    top_k: int  # 0: off
    top_p: float  # 1: off
    seed: int
    stop: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool = False
    min_p: float = 0.0  # of the likeliest token's probability; 0: off
    repetition_penalty: float = 1.0  # over prompt and answer; 1: off
    stop_tokens: tuple[int, ...] = ()
    logprobs: int = -1  # of the drawn token, and so many of the likeliest; -1: off
    grammar: Grammar | None = None


class ChunkSequence(Message):
    """One sequence of a chunk. `ids` are the prompt slice that starts at `position`; empty for pure decoding, where `position` is the number
    of tokens whose K and V are in the pages.

    `last` says that the slice ends the prompt, so that pass 1 samples. `sampling`, `answered` and `prompt` come with the first chunk that names
    the sequence: `answered` are answer ids from before a restart or preemption, already part of what is prefilled; `prompt` are all of the
    prompt's ids where a repetition penalty reads them, else none.
    """

    sequence: int
    position: int
    ids: tuple[int, ...]
    last: bool
    sampling: Sampling | None = None
    answered: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()


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


class Map(Message, tag=11):
    """A place that the host may address from now on; one file descriptor comes with it. `ring`: the host's own, for its outputs."""

    place: int
    bytes: int
    writable: bool = False
    ring: bool = False


class Unmap(Message, tag=12):
    place: int


ToHost = (
    Hello | Launch | LoadModel | UnloadModel | Copy | BindPages | Chunk | Withdraw | Cancel | Release | Ping | Map | Unmap
)  # fmt: skip

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


class Made(Message):
    """A tensor that an output names by its handle: new in a slot of the host's ring, or with slot -1 one of the inputs passed on."""

    handle: int
    slot: int
    offset: int
    bytes: int


class HostFinished(Message, tag=2):
    command: int
    attempt: int
    start_ns: int
    end_ns: int
    output: msgspec.Raw  # for LoadModel: a map {page_bytes, context_tokens, eos, ...}
    tensors: tuple[Made, ...] = ()


class Token(Message):
    """What one sequence gained in a chunk. `finish`: "" while it goes on, else "stop", "length" or "error: ..." (then it is failed)."""

    sequence: int
    ids: tuple[int, ...]
    text: str
    finish: str
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of ids, where they were asked for


class Chunked(Message, tag=3):
    command: int
    start_ns: int
    end_ns: int
    tokens: tuple[Token, ...]


class CopyFault(Message):
    """A page that was not copied; its number counts through all pieces."""

    page: int
    kind: str  # io, short, checksum, full
    message: str


class Copied(Message, tag=4):
    """`sums`: the xxh3_64 of each page written to NVME, in order; else empty. Pages not in `faults` are whole at their target."""

    command: int
    start_ns: int
    end_ns: int
    bytes: int
    sums: tuple[int, ...] = ()
    faults: tuple[CopyFault, ...] = ()


class HostFailed(Message, tag=5):
    command: int
    attempt: int
    start_ns: int
    end_ns: int
    error: ErrorRecord


class Stats(Message, tag=6):
    values: dict[str, float]


FromHost = Ready | HostStarted | HostFinished | Chunked | Copied | HostFailed | Stats
