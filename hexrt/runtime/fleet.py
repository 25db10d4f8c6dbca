"""The devices of this daemon: their hosts' lives, what is sent to them, and what their reports mean.

Owns the links and keeps each brain-side `Device` true to its host. A report of an old epoch, command or attempt is dropped here, so
that whatever is posted as an event is about the current attempt. A host that dies is replaced; whoever it was running is blamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hexrt.brain.decide import SHORT_NS, Brain
from hexrt.brain.engines import Engines
from hexrt.brain.view import Device
from hexrt.clock import Clock
from hexrt.core import DeviceKind, TaskState
from hexrt.devices.io import IoDevice
from hexrt.devices.link import HostLink
from hexrt.errors import ErrorRecord, HexrtError
from hexrt.events import DeviceDown, DeviceUp, Event, Failed, Finished, Started
from hexrt.llm.endpoint import EndpointReport
from hexrt.protocol.host import Cancel, FromHost, Hello, HostFailed, HostFinished, HostStarted, Ready
from hexrt.runtime.arenas import Arenas
from hexrt.runtime.entities import Task
from hexrt.runtime.retries import DROPPED, NOT_BEGUN
from hexrt.runtime.tensors import Tensors
from hexrt.runtime.watchdog import STALLED_NS, Watchdog
from hexrt.values import NAMING, names_any

if TYPE_CHECKING:  # brings an HTTP client
    from hexrt.devices.endpoint import EndpointDevice

log = logging.getLogger("hexrtd")
GRACE_NS = 50_000_000
"""How long a stopped task may go on before its worker is killed for it."""
STARTS = 3
"""Failed starts in a row after which a device is given up."""
FAULTS = ("SIGSEGV", "SIGBUS")
WROTE = "it may have written to an input: these are read-only; copy what you change"
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
PASSED_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "HEXRT_HOST_")


def host_environ(environ: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """What a host process sees of the daemon's environment, and where it may put temporary files.

    Hubs and ONNX Runtime's telemetry are shut off: nothing leaves the machine.
    """
    kept = {k: v for k, v in environ.items() if k in PASSED_ON or k.startswith(PASSED_PREFIXES)}
    return kept | {
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary / "torchinductor"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }


@dataclass(eq=False, slots=True)
class Member:
    """A device with the current life of its host."""

    device: Device
    program: str  # "" for one in the daemon's own loop
    link: HostLink | IoDevice | EndpointDevice
    failed_starts: int = 0
    respawn: asyncio.TimerHandle | None = None
    died_of: dict[int, ErrorRecord] = field(default_factory=dict)  # why we killed it, by command
    stopping: dict[int, int] = field(default_factory=dict)  # command -> when it was told to stop
    watch: Watchdog = field(default_factory=Watchdog)


class Fleet:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        brain: Brain,
        engines: Engines,
        clock: Clock,
        post: Callable[[Event], None],
        wake: Callable[[], None],
        turn: Callable[[], None],
        hello: Callable[[str, int], Hello],
        first_epoch: int,
        environ: dict[str, str],
        tensors: Tensors,
        arenas: Arenas,
    ) -> None:
        self._loop = loop
        self._brain = brain
        self._engines = engines
        self._clock = clock
        self._post = post
        self._wake = wake
        self._turn = turn
        self._hello = hello
        self._epoch = first_epoch
        self._environ = environ
        self._tensors = tensors
        self._arenas = arenas
        self._holding = brain.table.holding
        self._members: dict[str, Member] = {}
        self._checked_ns = 0
        self._closing = False

    # --- lives --------------------------------------------------------------------------------------------------

    def add(self, device: Device, program: str) -> None:
        """Starts a device's host process."""
        self._brain.add_device(device)
        self._members[device.name] = Member(device, program, self._spawn(device, program))

    def add_inside(self, device: Device, link: IoDevice | EndpointDevice) -> None:
        self._brain.add_device(device)
        self._members[device.name] = Member(device, "", link)
        device.ready = True

    def start_wanted(self) -> None:
        """Starts a host that is not there before there is work for it."""
        self._arenas.serve()

    def _spawn(self, device: Device, program: str) -> HostLink:
        self._epoch += 1
        device.epoch = self._epoch
        device.command = 0
        device.last_report_ns = self._clock.now_ns()
        link = HostLink(
            self._loop, program, self._hello(device.name, self._epoch), self._on_reports, self._on_death, self._environ,
        )  # fmt: skip
        self._tensors.host_started(link)
        self._arenas.host_started(link, device.kind)
        return link

    def _on_death(self, link: HostLink, reason: str) -> None:
        member = self._members[link.device]
        if member.link is not link or self._closing:
            return
        device, now = member.device, self._clock.now_ns()
        reason = member.watch.hung or reason
        if not member.died_of:
            log.warning("the host of %s died with %d tasks: %s", device.name, len(device.window), reason)
        member.watch = Watchdog()
        was_ready, device.ready = device.ready, False
        culprit = link.last_command or link.last_begun  # the last may have ended just now, and its report is lost
        culprit = culprit if culprit in device.window else 0
        for command, task in list(device.window.items()):
            wrote = command == culprit and task.tensors and reason.startswith(FAULTS)
            why = f"{reason}; {WROTE}" if wrote else reason
            self._drop(device, command)
            self._post(self._lost(member, task, command, culprit, link.last_begun, why, now))
        self._tensors.host_gone(link)
        self._engines.device_lost(device.name)
        member.stopping.clear()
        killed = bool(member.died_of)
        member.died_of.clear()
        self._post(DeviceDown(device.name, device.epoch, now, reason))
        member.failed_starts = 0 if was_ready else member.failed_starts + 1
        if member.failed_starts >= STARTS:
            device.lost = f"its host could not be started {STARTS} times: {reason}"
            self._arenas.host_lost(device)
            return
        delay = 0.0 if killed or was_ready else 0.2 * 2**member.failed_starts
        member.respawn = self._loop.call_later(delay, self._respawn, member)

    def _respawn(self, member: Member) -> None:
        if not self._closing:
            member.link = self._spawn(member.device, member.program)

    def _lost(self, member: Member, task: Task, command: int, culprit: int, begun: int, reason: str, now_ns: int) -> Failed:  # fmt: skip
        device = member.device
        blame = command == culprit
        if blame:
            error = member.died_of.get(command) or ErrorRecord("worker_died", f"the worker that ran it died ({reason})")
        elif device.kind is DeviceKind.POOL and command > begun:
            if culprit:  # it waited behind the one to blame
                error = ErrorRecord(DROPPED, "not begun")
            else:
                error = ErrorRecord(NOT_BEGUN, f"its worker died before it began ({reason})")
        else:
            stopped = member.died_of.get(command) or self._engines.why_stopping(task)
            error = stopped or ErrorRecord("device_lost", f"{device.name} went away ({reason})")
            blame = stopped is not None
        start = task.start_ns or task.placed_ns
        return Failed(
            task.run.id, task.step.node.index, task.part, task.attempt, device.name, start, now_ns, error, blame
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def send(self, device: str, messages: list[Any]) -> None:
        self._members[device].link.send(messages)

    def map(self, device: str, places: set[int]) -> None:
        """Launches that read there are sent next."""
        link = self._members[device].link
        if isinstance(link, HostLink):
            self._tensors.map(link, places)

    def _drop(self, device: Device, command: int) -> Task | None:
        """The launch has ended, or never will; what it read is not needed for it any more. None for one that is not waited for."""
        task = device.drop(command)
        if task is not None and task.tensors:
            self._holding.unpin(task)
        return task

    def begin(self, device: str, launch: Any, task: Task) -> None:
        """Sends a launch that was held back until its start was recorded. One that was stopped meanwhile never begins."""
        member = self._members[device]
        if member.stopping.pop(task.command, None) is None:
            member.link.send([launch])
            return
        self._drop(member.device, task.command)
        error, now_ns = ErrorRecord("cancelled", "cancelled before it began"), self._clock.now_ns()
        self._post(Failed(task.run.id, task.step.node.index, task.part, task.attempt, device, now_ns, now_ns, error))

    def on_inside_report(self, device: str, report: FromHost | EndpointReport) -> None:
        self._report(self._members[device], report)

    def _on_reports(self, link: HostLink, reports: list[FromHost]) -> None:
        member = self._members[link.device]
        if member.link is not link:
            return
        device = member.device
        device.last_report_ns = self._clock.now_ns()
        for report in reports:
            if (
                type(report) is HostFinished and (task := device.drop(report.command)) is not None
            ):  # it reads on until its output is taken
                self._finished(member, task, report)
            else:
                self._report(member, report)
        self._turn()

    def _finished(self, member: Member, task: Task, report: HostFinished) -> None:
        device = member.device
        if member.stopping:
            member.stopping.pop(report.command, None)
        device.done += 1
        if task.learn is not None:
            task.learn(report.end_ns - report.start_ns)
        output = report.output.copy()
        if (report.tensors or task.tensors or (len(output) > NAMING and names_any(output))) and not self._take_tensors(member, task, report, output):  # fmt: skip
            return
        self._post(
            Finished(
                task.run.id, task.step.node.index, task.part, report.attempt, device.name, report.start_ns, report.end_ns,
                output,
            )
        )  # fmt: skip

    def _take_tensors(self, member: Member, task: Task, report: HostFinished, output: msgspec.Raw) -> bool:
        """Takes over what the output names; what was sent ahead to the same worker reads it there. False where the task failed of it."""
        device, link = member.device, member.link if isinstance(member.link, HostLink) else None
        try:
            tensors = self._tensors.accept(link, task.run, task.step.node.index, output, report.tensors)
        except HexrtError as error:
            self._post(Failed(task.run.id, task.step.node.index, task.part, report.attempt, device.name, report.start_ns, report.end_ns, error.record()))  # fmt: skip
            return False
        finally:
            self._holding.unpin(task)
        for index in task.step.node.successors if tensors else ():
            for ahead in task.run.steps[index].tasks[:1]:
                if device.window.get(ahead.command) is ahead and ahead.device == device.name:
                    self._holding.pin(ahead, tensors)
        return True

    def _report(self, member: Member, report: FromHost | EndpointReport) -> None:
        device = member.device
        if isinstance(report, HostFinished):
            task = device.drop(report.command)
            if task is not None:
                self._finished(member, task, report)
            else:
                self._refuse(member, report)
                self._engines.finished(device, report)
                self._wake()
        elif isinstance(report, HostStarted):
            task = device.window.get(report.command)
            if task is not None and task.step.node.idempotent:
                self._post(Started(task.run.id, task.step.node.index, task.part, task.attempt, device.name, report.start_ns))  # fmt: skip
            elif task is not None:
                task.start_ns = report.start_ns
        elif isinstance(report, HostFailed):
            self._failed(member, report)
        elif isinstance(report, Ready):
            device.ready, device.facts = True, report.facts | {"pid": report.pid}
            member.failed_starts = 0
            self._arenas.host_ready(device.name, report.facts)
            self._post(DeviceUp(device.name, device.epoch, self._clock.now_ns()))
        elif isinstance(report, EndpointReport):
            self._engines.endpoints.report(device, report)
            self._wake()
        else:
            self._engines.report(device, report)
            self._wake()

    def _refuse(self, member: Member, report: HostFinished) -> None:
        """Nobody waits for this report."""
        if report.tensors and isinstance(member.link, HostLink):
            self._tensors.refuse(member.link, report.tensors)

    def _failed(self, member: Member, report: HostFailed) -> None:
        device = member.device
        task = self._drop(device, report.command)
        if task is None:
            self._engines.command_failed(device, report)
            self._wake()
            return
        stopped = member.stopping.pop(report.command, None) is not None
        error = report.error
        if error.kind == "cancelled" and not stopped and report.command in member.died_of:
            error = member.died_of.pop(report.command)
        self._post(Failed(task.run.id, task.step.node.index, task.part, report.attempt, device.name, report.start_ns, report.end_ns, error))  # fmt: skip

    # --- stopping -----------------------------------------------------------------------------------------------

    def stop(self, task: Task) -> None:
        """Ends a task in flight: at once where its host can, else by killing the host after a grace."""
        member = self._members.get(task.device)
        if member is None or task.command not in member.device.window:
            return
        if task.command not in member.stopping:
            member.stopping[task.command] = self._clock.now_ns()
            member.link.send([Cancel(task.command)])
            self._loop.call_later(GRACE_NS / 1e9, self._stop_hard, member, task.command)

    def _stop_hard(self, member: Member, command: int) -> None:
        link = member.link
        if command in member.stopping and command in member.device.window and isinstance(link, HostLink):
            if link.running_command == command or member.device.kind is not DeviceKind.POOL:
                self._kill(member, command, ErrorRecord("cancelled", "cancelled while it ran"))
            else:  # it waits behind another task of this worker
                self._loop.call_later(GRACE_NS / 1e9, self._stop_hard, member, command)

    def _kill(self, member: Member, command: int, error: ErrorRecord) -> None:
        member.died_of[command] = error
        if isinstance(member.link, HostLink):
            member.link.kill()

    def check_timeouts(self, now_ns: int) -> None:
        """Stops every task that has run longer than its step allows, and replaces hosts that hang."""
        stalled, self._checked_ns = now_ns - self._checked_ns > STALLED_NS, now_ns
        late = set() if stalled else self._engines.keeper.traffic.overdue(now_ns)
        for member in self._members.values():
            device, link = member.device, member.link
            if device.name in late and isinstance(link, HostLink):
                member.watch.hung = "a copy of pages did not end"
                link.kill()
            if stalled:  # this process did not run, or no run was open: what the hosts said may lie unread
                device.last_report_ns, member.watch = now_ns, Watchdog()
            if isinstance(link, HostLink) and member.watch.is_hung(device, link, self._engines, now_ns):
                link.kill()
                continue
            if device.kind is DeviceKind.POOL and isinstance(link, HostLink):
                command = link.running_command
                task = device.window.get(command)
                if task is not None and now_ns - max(task.placed_ns, device.last_report_ns, task.start_ns) > task.step.node.timeout_ns:  # fmt: skip
                    self._kill(member, command, timed_out(task))
                continue
            for command, task in list(device.window.items()):
                since_ns = task.start_ns if task.state == TaskState.RUNNING else task.placed_ns
                if (task.state == TaskState.RUNNING or task.predicted_ns < SHORT_NS) and now_ns - since_ns > task.step.node.timeout_ns:  # fmt: skip
                    self._time_out(member, command, task, now_ns)

    def _time_out(self, member: Member, command: int, task: Task, now_ns: int) -> None:
        if self._engines.owns(task):
            self._engines.stop([task], now_ns, timed_out(task))
            self._wake()
        elif command not in member.died_of:
            member.died_of[command] = timed_out(task)
            member.link.send([Cancel(command)])
            if member.program:
                self._loop.call_later(1.0, self._kill_if_there, member, command, member.device.epoch)

    def _kill_if_there(self, member: Member, command: int, epoch: int) -> None:
        if member.device.epoch == epoch and command in member.device.window and command in member.died_of:
            self._kill(member, command, member.died_of[command])

    async def close(self) -> None:
        """Ends every host and waits until none is left."""
        self._closing = True
        for member in self._members.values():
            if member.respawn is not None:
                member.respawn.cancel()
            if isinstance(member.link, HostLink):
                member.link.close()
            else:
                await member.link.close()


def timed_out(task: Task) -> ErrorRecord:
    seconds = task.step.node.timeout_ns / 1e9
    return ErrorRecord("timed_out", f"ran longer than its timeout of {seconds:g} s", task.step.node.id)
