"""The configuration as one frozen record. Its sources, and the merging of them, are in `hexrt.cli.settings`.

Owns the fields, their ranges and defaults. A function elsewhere takes the values it uses, never the whole of it.
Times in the file are seconds; sizes are MiB where the name says so. `LIVE` names what a SIGHUP changes without a restart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Cores = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Daemon(_Section):
    socket: str = ""  # "" : the runtime directory's hexrt.sock
    state_dir: str = ""  # "" : the user's state directory
    models_dir: str = ""  # "" : state_dir/models
    admin_gids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)], ...] = ()
    drain_s: Seconds = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    check_integrity: bool = False  # for tests: counts all over when nothing is in flight; a difference stops the daemon


class Limits(_Section):
    max_frame_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    max_steps: Positive = 100_000
    max_tasks: Positive = 1_000_000  # of a run, its maps included
    max_depth: Positive = 10_000
    max_graph_mib: Positive = 64
    max_nesting: Annotated[int, msgspec.Meta(ge=4, le=64)] = 32  # of lists and dicts in inputs and params
    max_output_mib: Positive = 32  # of one task
    max_open_runs: Positive = 10_000
    max_open_tasks: Positive = 2_000_000  # of all open runs: steps, and the elements of their maps
    max_run_mib: Positive = 1024  # inputs, tasks and outputs of one run in memory
    max_held_mib: Positive = 4096  # of all open runs together
    max_clients: Positive = 256
    max_unsent_mib: Positive = 8  # to a client that does not read
    half_frame_s: Seconds = 30.0  # how long a frame may stay unfinished
    kept_runs: Positive = 1_000  # ended runs kept in memory
    kept_mib: Positive = 256  # of ended runs in memory; they give way where max_held_mib is reached


class Steps(_Section):
    timeout_s: Seconds = 600.0  # of one attempt, where the step says nothing


class Pool(_Section):
    workers: Cores = 0  # 0: the number of cores
    window: Positive = 64  # tasks sent ahead to a worker


class Memory(_Section):
    """What lies between a device's own memory and recomputing. Taken from the machine as it is first used, the NVMe file when it is first needed."""

    host_mib: Positive = 1024
    nvme_mib: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 4096  # 0: no file
    nvme_path: str = ""  # "": pages in the state directory
    ring_mib: Positive = 64  # for the tensors that one host process has put out and nobody has moved yet
    policy: Literal["next_use", "lru"] = "next_use"
    wait_s: Seconds = 30.0  # how long a step may wait for a copy of pages, its expected time not counted; then the host that copies is replaced


class Cpu(_Section):
    enabled: bool = True
    threads: Cores = 0  # 0: the number of cores
    arena_mib: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 512  # 0: pages are used in place in the host's memory
    weights_mib: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = (
        0  # of all models that are loaded at a time; 0: half of the machine's memory
    )
    token_budget: Positive = 512  # prompt tokens of one chunk
    passes: Positive = 4  # forward passes of one chunk


class Llm(_Section):
    """How language models' KV pages are shared and kept, on any device."""

    share_prefixes: Literal["off", "user", "all"] = "user"  # between whose sequences: nobody's, one user's, everybody's
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = (
        2.0  # how long at most a conversation's pages stay pinned while its tool runs; 0: never
    )


class Npu(_Section):
    enabled: bool = True
    provider: str = ""  # "": the first NPU provider found, else the CPU provider, said so
    threads: Cores = 1


class Model(_Section):
    """A model that `llm.*` steps may name: of `path`, run here, or of `endpoint`, a server that speaks OpenAI's protocol."""

    path: str = ""  # a folder (safetensors, config.json, tokenizer.json, tokenizer_config.json) or one .gguf file; relative to models_dir
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of what is computed
    weights: Literal["as_dtype", "int8", "int4"] = "as_dtype"  # how the weights of linear layers are kept in memory
    kv_dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # of KV pages; "": dtype
    endpoint: str = ""  # http://HOST:PORT/v1
    endpoint_model: str = ""  # what the server calls it; "": the first that it offers
    api_key_file: str = ""  # holds the key that the endpoint asks for
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8  # requests to the endpoint at a time
    connect_s: Seconds = 5.0
    idle_s: Seconds = 120.0  # how long the endpoint may say nothing in the middle of an answer
    tries: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4  # of one request, where the server is busy or not there


class Config(_Section):
    daemon: Daemon = Daemon()
    limits: Limits = Limits()
    steps: Steps = Steps()
    pool: Pool = Pool()
    memory: Memory = Memory()
    cpu: Cpu = Cpu()
    npu: Npu = Npu()
    llm: Llm = Llm()
    models: dict[str, Model] = {}
    ops: dict[str, dict[str, Any]] = {}  # [ops.NAME]: settings of an op, checked by the op


LIVE = frozenset(
    {"daemon.log_level", "daemon.admin_gids", "daemon.drain_s", "steps"}
    | {f"limits.{name}" for name in Limits.__struct_fields__ if name != "max_output_mib"}
)  # hosts are told max_output_mib and [ops] when they start
