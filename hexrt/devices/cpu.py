"""`cpu:0`: torch on the CPU as an accelerator. Streams are threads: one computes for language models, one copies pages, one runs plain
bodies.

Owns the device's arena, which all models share, the loaded models and the three threads. Each thread takes its messages in the order in
which they came; what must not wait (masking a released sequence, taking back what has not begun) is done on the loop. torch is imported at start, transformers with the first model.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec

from hexrt.devices.body import Bodies, describe
from hexrt.devices.copies import carry_out, measure_link
from hexrt.devices.host import HostProgram
from hexrt.devices.memory import give_back, is_out_of_memory
from hexrt.devices.places import anonymous
from hexrt.errors import ErrorRecord, InvariantViolation, NotFound, OutOfMemory
from hexrt.ops.registry import load_ops
from hexrt.protocol.host import (
    DEVICE,
    HOST,
    BindPages,
    Cancel,
    Chunk,
    Copy,
    FromHost,
    HostFailed,
    HostFinished,
    HostStarted,
    Launch,
    LoadModel,
    Release,
    Stats,
    ToHost,
    UnloadModel,
    Withdraw,
)

if TYPE_CHECKING:
    from hexrt.llm.engine import ModelEngine


COPY_NICENESS = 10
"""Of the thread that copies. Decoding one sequence in float32 on 2 cores: 79 to 84 ms a token alone, 115 to 141 beside copies without end,
93 to 112 where they are as nice as this; what is left is the memory's bandwidth, shared."""


def give_way() -> None:
    """The calling thread gets a tenth of what another gets that wants the same core, and all of a core that nobody wants."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)


def take_threads(count: int) -> None:
    """The calling thread computes with so many threads from now on, whatever others ask for theirs.

    A thread that torch has not seen yet takes over, when it first computes, what was set last by any other: so it is made known first.
    """
    import torch

    torch.get_num_threads()
    torch.set_num_threads(count)


class Stream:
    """A thread that works through one queue. `begin` is told the command that starts, 0 between commands."""

    def __init__(self, name: str, work: Callable[[Any], None], prepare: Callable[[], None], begin: Callable[[int], None]) -> None:  # fmt: skip
        self._work = work
        self._prepare = prepare
        self._begin = begin
        self._changed = threading.Condition()  # guards the queue
        self._queue: deque[ToHost] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, message: ToHost) -> None:
        with self._changed:
            self._queue.append(message)
            self._changed.notify()

    def take_out(self, command: int) -> ToHost | None:
        """Removes a command that has not begun and returns it. None where it has, or never came."""
        with self._changed:
            for message in self._queue:
                if getattr(message, "command", 0) == command:
                    self._queue.remove(message)
                    return message
        return None

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify()

    def _serve(self) -> None:
        self._prepare()
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                message = self._queue.popleft()
            self._begin(getattr(message, "command", 0))
            self._work(message)
            self._begin(0)


class CpuProgram(HostProgram):
    def start(self) -> dict[str, Any]:
        # Read when the libraries load. Passive: a thread that waits leaves its core to the workers beside it.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import torch

        from hexrt.kernels.native import load

        native = load()
        settings = self.hello.settings.get("cpu", {})
        self._threads = int(settings.get("threads") or len(os.sched_getaffinity(0)))
        self._bodies = Bodies(load_ops()[0], self.hello, self.hello.settings["max_output_bytes"], self.places)
        self._models: dict[str, ModelEngine] = {}  # changed on the compute thread only
        arena_bytes = int(settings.get("arena_mib", 0)) << 20
        self._arena = DEVICE if arena_bytes else HOST  # without one of its own: pages are used in place in the host's
        if arena_bytes:
            self.places.add(DEVICE, anonymous(arena_bytes))
        self._refused = 0  # messages without a number that failed; compute thread only
        self._compute = Stream("compute", self._carry_out, partial(take_threads, self._threads), self._show)
        self._copies = Stream("copies", self._carry_out, give_way, lambda command: None)
        self._plain = Stream("bodies", self._launch, partial(take_threads, 1), lambda command: None)
        return {
            "threads": self._threads,
            "torch": str(torch.__version__),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "kernels": native.level or f"plain torch: {native.why}",
            "links": measure_link(),
        }

    def stop(self) -> None:
        for stream in (self._compute, self._copies, self._plain):
            stream.stop()

    def _show(self, command: int) -> None:
        self.cell[0] = command

    # --- on the loop ------------------------------------------------------------------------------------------------

    def handle(self, message: ToHost) -> None:
        if isinstance(message, Launch):
            self._plain.put(message)
        elif isinstance(message, Copy):
            self._copies.put(message)
        elif isinstance(message, Withdraw):
            self._take_out(message.command)
        elif isinstance(message, Cancel):
            if (taken := self._take_out(message.command)) is not None:
                now = monotonic_ns()
                error = ErrorRecord("cancelled", "cancelled before it began")
                self.report(HostFailed(message.command, getattr(taken, "attempt", 0), now, now, error))
        else:
            if isinstance(message, Release) and (engine := self._models.get(message.model)) is not None:
                engine.mask(message.sequence)
            self._compute.put(message)

    def _take_out(self, command: int) -> ToHost | None:
        streams = (self._compute, self._copies, self._plain)
        return next((taken for stream in streams if (taken := stream.take_out(command)) is not None), None)

    def _post(self, report: FromHost) -> None:
        """Hands a report of a thread to the loop, which may have closed meanwhile."""
        try:
            self.loop.call_soon_threadsafe(self.report, report)
        except RuntimeError:
            self.stop()

    # --- on the threads ---------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> None:
        start = monotonic_ns()
        if launch.report_start:
            self._post(HostStarted(launch.command, launch.attempt, start))
        try:
            if any(binding.local for binding in launch.bindings):
                raise InvariantViolation(f"{self.hello.device} keeps no outputs for later launches")
            output = self._bodies.carry_out(launch)
        except BaseException as error:  # a body may raise anything, SystemExit too: border of a task
            self._post(HostFailed(launch.command, launch.attempt, start, monotonic_ns(), describe(error)))
        else:
            end = monotonic_ns()
            self._post(HostFinished(launch.command, launch.attempt, start, end, msgspec.Raw(output.raw), output.made))

    def _carry_out(self, message: LoadModel | UnloadModel | BindPages | Chunk | Copy | Release) -> None:
        start = monotonic_ns()
        try:
            report = self._do(message)
        except Exception as error:  # border of a command
            report = self._failure(message, start, error)
            error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames hold what was loaded
        if isinstance(message, LoadModel) and isinstance(report, HostFailed):
            give_back(not self._models)
        if report is not None:
            self._post(report)

    def _failure(self, message: ToHost, start: int, error: Exception) -> FromHost:
        """A command is answered; a binding or release, which has no number, is counted, and the chunk that needs it fails."""
        command = getattr(message, "command", 0)
        if command:
            return HostFailed(command, 0, start, monotonic_ns(), describe(error))
        self._refused += 1
        return Stats({"refused_messages": float(self._refused)})

    def _do(self, message: LoadModel | UnloadModel | BindPages | Chunk | Copy | Release) -> FromHost | None:
        if isinstance(message, Copy):
            return carry_out(self.places, message)
        if isinstance(message, LoadModel):
            start = monotonic_ns()
            facts = self._loaded(message)
            return HostFinished(message.command, 0, start, monotonic_ns(), msgspec.Raw(msgspec.msgpack.encode(facts)))
        if isinstance(message, UnloadModel):
            start = monotonic_ns()
            self._models.pop(message.model, None)
            give_back(not self._models)
            return HostFinished(message.command, 0, start, monotonic_ns(), msgspec.Raw(b"\xc0"))
        engine = self._models.get(message.model)
        if engine is None:
            raise NotFound(f"the model {message.model!r} is not loaded on {self.hello.device}")
        if isinstance(message, Chunk):
            return engine.run(message)
        if isinstance(message, Release):
            engine.release(message.sequence)
        elif not engine.bind(message):
            return Stats({f"{message.model}_stale_bindings": float(engine.stale_bindings)})
        return None

    def _loaded(self, message: LoadModel) -> dict[str, Any]:
        try:
            return self._load(message)
        except Exception as error:
            if is_out_of_memory(error):
                lacking = f"the weights of {message.model!r} do not fit into the memory that the machine has left"
                raise OutOfMemory(f"{lacking}: keep them in fewer bits, or run less beside", "params.model") from error
            raise

    def _load(self, message: LoadModel) -> dict[str, Any]:
        import torch

        from hexrt.llm.engine import ModelEngine
        from hexrt.llm.engine_load import about
        from hexrt.llm.engine_model import PagedModel
        from hexrt.llm.gguf_folder import folder_of
        from hexrt.llm.tokenise import load_vocabulary

        self._models.pop(message.model, None)
        path = Path(self.hello.models_dir) / message.path
        folder = folder_of(path, message.model, Path(self.hello.state_dir))
        tokeniser = load_vocabulary(folder, message.model).tokeniser
        model = PagedModel(
            message.model, path, message.dtype, self.places.view(self._arena), message.page_tokens, message.weights,
            message.kv_dtype, self._threads,
        )  # fmt: skip
        decode = partial(tokeniser.decode, skip_special_tokens=True)
        engine = ModelEngine(model, decode, partial((folder / "tokenizer.json").read_text, "utf-8"))
        engine.grammars.prepare()
        facts = msgspec.structs.asdict(about(model, path, torch.get_num_threads()))
        self._models[message.model] = engine
        return facts
