"""`hexrtd`: puts the parts together, serves until it is told to stop, and leaves nothing behind.

Owns the order of start and end. Start: config, state directory, replay, socket, READY, then the hosts. End: drain, hosts, server, store.
The daemon's process imports no torch, onnxruntime or faiss; those live in the hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

import hexrt
from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines
from hexrt.brain.sequences import Sharing
from hexrt.brain.view import Device
from hexrt.cli.settings import live_changes, load_config, socket_path, state_dir
from hexrt.clock import SystemClock
from hexrt.config import Config, Model
from hexrt.core import DeviceKind
from hexrt.devices.body import Bodies
from hexrt.devices.io import IoDevice
from hexrt.errors import HexrtError
from hexrt.events import Recovered
from hexrt.llm.model_files import find_models
from hexrt.ops.registry import load_ops
from hexrt.ops.spec import OpSpec
from hexrt.protocol.host import VERSION, Hello
from hexrt.runtime.answers import ended_of_lost
from hexrt.runtime.arenas import Arenas, keeper_of, model_source
from hexrt.runtime.fleet import Fleet, host_environ
from hexrt.runtime.holding import NO_LIMIT
from hexrt.runtime.recount import Recount
from hexrt.runtime.service import Service
from hexrt.runtime.state import RunTable
from hexrt.runtime.store import Store
from hexrt.runtime.tensors import Tensors
from hexrt.runtime.weights import weights_budgets
from hexrt.scheduling.cost import CostModel
from hexrt.server.connection import ConnectionLimits
from hexrt.server.listen import Listener, bind, inherited
from hexrt.server.server import Server, ServerLimits
from hexrt.workflow.check import GraphLimits, check_in_slices, check_workflow
from hexrt.workflow.ports import OpFacts

log = logging.getLogger("hexrtd")
SAVE_S = 30.0


class Daemon:
    """One daemon, from the first fact replayed to the last host reaped. Runs on the main thread's loop."""

    def __init__(self, config: Config, reload: Callable[[], Config], listener: Listener, directory: Path, ops: Mapping[str, OpSpec]) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self.config = config
        self._reload = reload
        self._ops = ops
        self._directory = directory
        self._temporary = directory / "tmp"
        self._clock = SystemClock()
        self._stop: asyncio.Future[bool] = self._loop.create_future()
        self.failure: BaseException | None = None
        self._facts: dict[str, OpFacts] = {}
        self._saving: asyncio.TimerHandle | None = None
        self._listener = listener
        self.store = Store(directory, self._committed, self._store_failed, self._loop.call_soon_threadsafe)
        self.cost = CostModel()
        self.table = RunTable(lambda workflow: check_workflow(workflow, ops, self._recorded_limits(), self.config.steps.timeout_s), config.limits.max_tasks)  # fmt: skip
        self.keeper = keeper = keeper_of(config.memory, {"cpu:0": config.cpu.arena_mib} if config.cpu.enabled else {})
        self._saved = {name: self.store.load(name) or b"" for name in ("cost", "links")}
        self._load_learnt("cost", self.cost.load)
        self._load_learnt("links", keeper.load_links)
        sources = self._sources = {
            name: model_source(self._model_path(m.path), m) for name, m in self._models().items()
        }
        sharing = Sharing(config.llm.share_prefixes, int(config.llm.hold_s * 1e9))
        engines = Engines(
            sources, keeper, config.cpu.token_budget, config.cpu.passes, weights_budgets(config.cpu), sharing
        )
        self.brain = Brain(self.table, self.cost, engines)
        self.arenas = Arenas(config.memory, keeper, self._start_disk)
        self.tensors = Tensors(
            self.table.holding,
            config.memory.ring_mib << 20,
            self.brain.staging,
            self.arenas,
            config.limits.max_output_mib << 20,
        )
        self.service = Service(
            self._loop, self.table, self.brain, self.store, self._clock, config.limits, config.daemon.admin_gids,
            lambda workflow: check_in_slices(workflow, ops, self._graph_limits(), self.config.steps.timeout_s, self._facts), self.stop, self.tensors,
            self.arenas.facts,
        )  # fmt: skip
        if config.daemon.check_integrity:
            owner = self.service.owner
            owner.recount = Recount(self._loop, self.table, self.brain, self.tensors, owner.is_due)
        self.server = Server(self.service, self._server_limits(), self._bug)

    def _graph_limits(self) -> GraphLimits:
        limits = self.config.limits
        return GraphLimits(limits.max_steps, limits.max_depth, limits.max_graph_mib << 20, limits.max_nesting, limits.max_tasks)  # fmt: skip

    def _recorded_limits(self) -> GraphLimits:
        """Of workflows from the store: they were taken once, and have the bytes of their client's tensors in them by now."""
        return msgspec.structs.replace(self._graph_limits(), max_bytes=NO_LIMIT)

    def _server_limits(self) -> ServerLimits:
        limits = self.config.limits
        return ServerLimits(ConnectionLimits(limits.max_frame_mib << 20, limits.max_unsent_mib << 20), limits.max_clients, limits.half_frame_s)  # fmt: skip

    def _models_dir(self) -> str:
        return os.path.abspath(self.config.daemon.models_dir or self._directory / "models")

    def _models(self) -> Mapping[str, Model]:
        """The models of the config; where it names none, every model of models_dir, a GGUF file without its ending."""
        if self.config.models:
            return self.config.models
        return {name: Model(path.name) for name, path in find_models(Path(self._models_dir())).items()}

    def _model_path(self, path: str) -> str:
        return os.path.join(self._models_dir(), path)

    # --- start --------------------------------------------------------------------------------------------------

    def _limit_table(self) -> None:
        """What all runs together may hold depends on the moment: a replay, which only repeats what was, goes without."""
        limits, table = self.config.limits, self.table
        table.max_tasks, table.max_open_tasks = limits.max_tasks, limits.max_open_tasks
        table.holding.max_run_bytes, table.holding.max_held_bytes = limits.max_run_mib << 20, limits.max_held_mib << 20

    def recover(self) -> None:
        """Replays what the store has; what was in flight when the last daemon stopped is settled by one Recovered."""
        for event in self.store.replay():
            self.table.apply(event)
        self._limit_table()
        for damage in self.store.damaged:
            if damage.step < 0:
                self.store.close_run(ended_of_lost(damage.run, damage.uid, self._clock.wall_ns()))
        if self.table.runs:
            self.service.owner.post(Recovered(self._clock.wall_ns(), self._clock.now_ns()))

    def start_hosts(self) -> None:
        first = int.from_bytes(self.store.load("host_epoch") or b"", "little")
        self.store.save("host_epoch", (first + (1 << 20)).to_bytes(8, "little"))
        owner = self.service.owner
        self._clear_temporary()
        self._temporary.mkdir(mode=0o700)
        fleet = owner.fleet = Fleet(
            self._loop, self.brain, self.brain.engines, self._clock, owner.post, owner.wake, owner.turn_if_due, self._hello, first,
            host_environ(os.environ, self._temporary), self.tensors, self.arenas,
        )  # fmt: skip
        bodies = Bodies(self._ops, self._hello("io:0", 0), self.config.limits.max_output_mib << 20, self.tensors)
        fleet.add_inside(Device("io:0", DeviceKind.IO, 256, "io"), IoDevice(bodies, partial(fleet.on_inside_report, "io:0")))  # fmt: skip
        for index in range(self.config.pool.workers or os.cpu_count() or 1):
            fleet.add(Device(f"pool:{index}", DeviceKind.POOL, self.config.pool.window, "pool"), "pool")
        if self.config.cpu.enabled:
            fleet.add(Device("cpu:0", DeviceKind.CPU, 1 << 16, "cpu:0"), "cpu")
        if self.config.npu.enabled:
            fleet.add(Device("npu:0", DeviceKind.NPU, 2, "npu:0"), "npu")
        self._add_endpoints(fleet)

    def _add_endpoints(self, fleet: Fleet) -> None:
        for name, model in self._models().items():
            if model.endpoint:
                from hexrt.devices.endpoint import EndpointDevice  # brings an HTTP client

                device = f"{DeviceKind.ENDPOINT}:{name}"
                link = EndpointDevice(name, model, partial(fleet.on_inside_report, device))
                fleet.add_inside(Device(device, DeviceKind.ENDPOINT, model.concurrency, device), link)

    def _start_disk(self, device: Device) -> None:
        fleet = self.service.owner.fleet
        assert fleet is not None
        fleet.add(device, "disk")

    def _clear_temporary(self) -> None:
        """What hosts left in their temporary directory, those of a killed daemon too."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _hello(self, device: str, epoch: int) -> Hello:
        config = self.config
        settings: dict[str, Any] = {
            "ops": config.ops,
            "max_output_bytes": config.limits.max_output_mib << 20,
            "models": {
                n: {"path": s.path, "is_exact": s.is_exact, "is_served": bool(s.endpoint)}
                for n, s in self._sources.items()
            },
            "cpu": msgspec.to_builtins(config.cpu),
            "npu": msgspec.to_builtins(config.npu),
            "memory": {"nvme_path": config.memory.nvme_path, "nvme_bytes": config.memory.nvme_mib << 20},
        }
        return Hello(VERSION, epoch, device, str(self._directory), self._models_dir(), settings)

    def _save_learnt(self) -> None:
        """What was learnt since the last time, now and then: a killed daemon loses little of it."""
        for name, learnt in (("cost", self.cost.dump()), ("links", self.keeper.dump_links())):
            if learnt != self._saved[name]:
                self._saved[name] = learnt
                self.store.save(name, learnt)

    def _keep_saving(self) -> None:
        self._save_learnt()
        self._saving = self._loop.call_later(SAVE_S, self._keep_saving)

    def _load_learnt(self, name: str, load: Callable[[bytes], None]) -> None:
        saved = self._saved[name]
        if saved:
            try:
                load(saved)
            except msgspec.MsgspecError:
                log.warning("what was learnt of %s cannot be read; starting without it", name)

    # --- while it runs ------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        self._loop.set_exception_handler(self._on_loop_error)
        self.recover()
        self.server.start(self._listener)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
        notify("READY=1")
        log.info("ready on %s", self._listener.path or "an inherited socket")
        self.start_hosts()
        self.service.resume()
        self._keep_saving()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        drain = await self._stop
        notify("STOPPING=1")
        if drain:
            await self.service.drain(self.config.daemon.drain_s)

    def _on_signal(self) -> None:
        """The first asks for a drained stop, the second for one at once."""
        if not self._stop.done():
            log.info("stopping; running steps have %g s to end", self.config.daemon.drain_s)
            self.stop(True)
        else:
            self.service.hurry()

    def stop(self, drain: bool) -> None:
        if not self._stop.done():
            self._stop.set_result(drain)

    def on_hangup(self) -> None:
        """Takes over what may change without a restart; names what may not."""
        try:
            changed = self._reload()
        except HexrtError as error:
            log.error("the configuration stays as it was: %s", error)
            return
        merged, restart = live_changes(self.config, changed)
        if restart:
            log.warning("a restart is needed for %s", ", ".join(restart))
        self.config = merged
        self.service.limits, self.service.admin_gids = merged.limits, merged.daemon.admin_gids
        self._limit_table()
        self.server.set_limits(self._server_limits())
        logging.getLogger().setLevel(merged.daemon.log_level.upper())
        log.info("configuration reloaded")

    def _committed(self, ticket: int) -> None:
        self.service.owner.committed(ticket)

    def _store_failed(self, error: BaseException) -> None:
        """Nothing can be recorded any more: stop at once, so that nothing is acknowledged that is not on disk."""
        log.critical("the store failed, stopping: %s", error)
        self.failure = error
        self.stop(False)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback that nobody caught is a bug of ours: the state may be half changed, so nothing goes on with it."""
        error = context.get("exception")
        log.critical("%s", context.get("message"), exc_info=error)
        self._bug(error if isinstance(error, Exception) else RuntimeError(str(context.get("message"))))

    def _bug(self, error: Exception) -> None:
        self.failure = error
        self.stop(False)

    async def close(self) -> None:
        if self.service.owner.recount is not None:
            self.service.owner.recount.close()
        await self.server.close()
        fleet = self.service.owner.fleet
        if fleet is not None:
            await fleet.close()
            self._clear_temporary()
        self.service.close()
        self.tensors.close()
        self.arenas.close()
        if self._saving is not None:
            self._saving.cancel()
            self._save_learnt()
        self.store.close()


def notify(state: str) -> None:
    """Tells the service manager, where there is one (sd_notify); one that has gone away is no reason to stop."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.send(state.encode())
        except OSError as error:
            log.warning("the service manager was not told %s: %s", state, error.strerror)


async def _main(config: Config, reload: Callable[[], Config]) -> int:
    directory = state_dir(config)
    ops, refused = load_ops()
    for name, why in refused.items():
        log.warning("op entry point %r left out: %s", name, why)
    listener = inherited(os.environ) or bind(socket_path(config))
    try:
        daemon = Daemon(config, reload, listener, directory, ops)
    except BaseException:
        listener.close()
        raise
    try:
        await daemon.serve()
    finally:
        await daemon.close()
    return 1 if daemon.failure is not None else 0


def _allow_files() -> None:
    """As many open files as may be: each client is one, and so is the memory that each open run was passed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: list[str] | None = None) -> int:
    """The entry point of `hexrtd`. Returns the exit status: 0 after an orderly stop, 1 after a failure, 2 where it cannot start."""
    parser = argparse.ArgumentParser(
        prog="hexrtd", description="Runs AI-agent workflows on this machine; clients use `hexrt`."
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML configuration")
    parser.add_argument("--socket", metavar="PATH", help="where to listen")
    parser.add_argument("--state-dir", metavar="DIR", help="where runs are kept; created if missing")
    parser.add_argument("--version", action="version", version=f"hexrtd {hexrt.__version__}")
    given = parser.parse_args(arguments)
    flags = {key: value for key, value in (("daemon.socket", given.socket), ("daemon.state_dir", given.state_dir)) if value is not None}  # fmt: skip
    try:
        config = load_config(flags, os.environ, given.config)
        logging.basicConfig(level=config.daemon.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)  # fmt: skip
        _allow_files()
        return uvloop.run(_main(config, lambda: load_config(flags, os.environ, given.config)))
    except HexrtError as error:
        print(f"hexrtd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
