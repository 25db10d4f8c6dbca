"""hexrt as `hexrt bench llm` measures it: a daemon of its own for each form of the model, asked through the real client.

Owns the daemon from start to end of a measurement. Prompts of ids are the literal prefix of an `llm.decode` step, those of text an
`llm.generate` step; the reader follows each run and takes the time when a piece of text reaches it. Runs are as durable as by default.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexrt.cli.bench_llm_load import PAGE_TOKENS, Findings, Sizes, Stream, measure
from hexrt.cli.own_daemon import OwnDaemon
from hexrt.client import AsyncClient, Outcome
from hexrt.errors import TaskFailed
from hexrt.llm.steps import ModelShape
from hexrt.protocol.messages import Update
from hexrt.workflow.build import WorkflowBuilder
from hexrt.workflow.model import Workflow

MODEL = "bench"
ROOM = 1.25
"""Of pages, beside those that are in use at a time: what was computed before stays for others until the room is wanted."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is kept and computed, as [models.NAME] says it."""

    name: str
    dtype: str
    weights: str
    kv_dtype: str

    @property
    def is_exact(self) -> bool:
        return (self.dtype, self.weights, self.kv_dtype) == ("float32", "as_dtype", "float32")


def forms(multiplies_bf16: bool) -> dict[str, Form]:
    """The forms that a processor has a use for, by name. Where it multiplies bf16, the fast forms compute in it."""
    dtype = "bfloat16" if multiplies_bf16 else "float32"
    made = [
        Form("exact", "float32", "as_dtype", "float32"),
        Form("int8", dtype, "int8", "bfloat16"),
        Form("int4", dtype, "int4", "bfloat16"),
    ]
    if multiplies_bf16:
        made.append(Form("bf16", dtype, "as_dtype", "bfloat16"))
    return {form.name: form for form in made}


def tables(form: Form, model: Path, shape: ModelShape, threads: int, sizes: Sizes) -> dict[str, dict[str, object]]:
    """The daemon's configuration: all prompts of a measurement fit into the arena at a time."""
    pages = ROOM * sizes.most_tokens / PAGE_TOKENS + 2 * max(sizes.clients, *sizes.sequences)
    arena = int(pages * shape.page_bytes(form.kv_dtype, PAGE_TOKENS)) // MIB + 64
    given: dict[str, object] = {"path": model.name, "dtype": form.dtype, "weights": form.weights}
    if form.kv_dtype != form.dtype:
        given["kv_dtype"] = form.kv_dtype
    return {
        "daemon": {"models_dir": str(model.parent)},
        "pool": {"workers": 1},
        "npu": {"enabled": False},
        "cpu": {"threads": threads, "arena_mib": arena},
        f"models.{MODEL}": given,
    }


class DaemonServer:
    """Answers over the clients' connections. Raises what a run ended with."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients

    async def complete(self, ids: Sequence[int], tokens: int, client: int) -> Stream:
        prefix = {"ids": list(ids), "prompt_tokens": len(ids)}
        return await self._follow("llm.decode", tokens, {"prefix": prefix}, client)

    async def chat(self, text: str, tokens: int, client: int) -> Stream:
        return await self._follow("llm.generate", tokens, {"prompt": text}, client)

    async def _follow(self, op: str, tokens: int, inputs: Mapping[str, Any], client: int) -> Stream:
        workflow = _workflow(op, tokens, inputs)
        asked_s, came_s, got = time.perf_counter(), [], 0
        async with aclosing(self._clients[client].follow(workflow)) as news:  # type: ignore[type-var]
            async for message in news:
                if isinstance(message, Update):
                    if message.event == "tokens":
                        came_s.append(time.perf_counter())
                elif isinstance(message, Outcome):
                    got = message.check().outputs["tokens"]
        if got != tokens:
            raise TaskFailed(f"an answer has {got} tokens, not {tokens}")
        return Stream(asked_s, tuple(came_s) or (time.perf_counter(),), got)


def _workflow(op: str, tokens: int, inputs: Mapping[str, Any]) -> Workflow:
    builder = WorkflowBuilder("bench")
    step = builder.step(op, id="a", params={"model": MODEL, "max_tokens": tokens, "ignore_eos": True}, inputs=inputs)
    builder.output("tokens", step["answer_tokens"])
    return builder.build()


@dataclass(frozen=True, slots=True)
class About:
    """What the daemon says of the model once it is loaded."""

    weight_bytes: int
    words: str


def measure_form(
    form: Form, model: Path, shape: ModelShape, threads: int, sizes: Sizes, wanted: frozenset[str], into: Findings,
    rate: float = 0.0,
) -> tuple[About, float]:  # fmt: skip
    """One form, by a daemon of its own; also gives the rate of arrivals. Raises HexrtError, with what was found until then in `into`."""
    with OwnDaemon(tables(form, model, shape, threads, sizes)) as daemon:
        return asyncio.run(_measure(daemon.socket, sizes, wanted, shape, into, rate))


async def _measure(
    socket: os.PathLike[str], sizes: Sizes, wanted: frozenset[str], shape: ModelShape, into: Findings, rate: float
) -> tuple[About, float]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(socket)) for _ in range(sizes.clients)]
        rate = await measure(DaemonServer(clients), sizes, wanted, shape.vocabulary, into, rate)
        (status,) = (await clients[0].models()).models
        facts = status.facts
        words = [str(facts.get("attention", "")), *facts.get("levers", ())]
        weight_bytes = next((place.weight_bytes for place in status.places), 0) or status.weight_bytes
        return About(weight_bytes, ", ".join(filter(None, words))), rate
