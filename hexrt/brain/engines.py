"""The LLM engines of all devices: which models are loaded where, and which task is which sequence.

Owns one `llm.batch.Engine` for each loaded (device, model); their pages are the keeper's. An `llm.generate` step is one sequence that two tasks, prefill and decode,
share; what the engine reports is turned into events here. A sequence is named by (run, step index, first part). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hexrt.brain.ahead import need_of
from hexrt.brain.endpoints import Endpoints
from hexrt.brain.entry import Entry
from hexrt.brain.loading import Loading
from hexrt.brain.models import PAGE_TOKENS, ModelSource
from hexrt.brain.sequences import Key, Sharing, heirs, key_of, parent_of, request_for, root_of
from hexrt.brain.view import Device
from hexrt.errors import ErrorRecord, HexrtError
from hexrt.events import Emitted, Event, Failed, Finished, Started
from hexrt.llm.batch import Emitted as Tokens
from hexrt.llm.batch import Ended, Engine, Outcome, Prefilled, Refused
from hexrt.llm.steps import check_numerics, output_of_decode, output_of_prefill, resolve_model
from hexrt.memory.keeper import Keeper
from hexrt.memory.pool import Page
from hexrt.protocol.host import Chunk, Chunked, Copied, FromHost, HostFailed, HostFinished
from hexrt.runtime.entities import Run, Task

ELSEWHERE = 1 << 60
CANCELLED = ErrorRecord("cancelled", "cancelled while it ran")
CHUNK_NS, FIRST_CHUNK_NS, LOAD_NS = 30_000_000_000, 600_000_000_000, 1_800_000_000_000
"""How long a chunk may take at least, the first one of a model, and the loading of a model, before the host is taken for hung."""
SLOWER = 20
"""How many times as long a token may take as in the slowest chunk so far."""


def _holder(task: Task, entry: Entry, key: Any) -> str:
    """Whose sequence holds pages that a task waits for, as the task's own user may know it."""
    holder = entry.live.get(key)
    step = holder.step.node.id if holder is not None and holder.run.uid == task.run.uid else key[1]
    return f"step {step}" if key[0] == task.run.id else f"run {key[0].hex()} step {step}"


def tokens_of(chunk: Chunk) -> int:
    """About what a chunk has to do: its prompt tokens, and one token of each sequence a pass."""
    return sum(len(s.ids) for s in chunk.sequences) + chunk.passes * len(chunk.sequences)


class Engines:
    def __init__(
        self, models: Mapping[str, ModelSource], keeper: Keeper, token_budget: int, passes: int,
        weights: Mapping[str, int] | None = None, sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        """`weights`: bytes that all models on a device may take together, by device."""
        self.models = models
        self.loading = Loading(models, weights or {})
        self.keeper = keeper
        keeper.when_freed.append(self._frames_freed)
        self._token_budget = token_budget
        self._passes = passes
        self._sharing = sharing or Sharing()
        # What a step of a run is expected to take, as the brain knows once it is there.
        self.expected_ns: Callable[[Run, int], float] = lambda run, step: 0.0
        self._entries: dict[str, dict[str, Entry]] = {}
        self.keeping: set[bytes] = set()  # runs with kept sequences
        self._dropped: list[tuple[str, int]] = []  # (device, command) of tasks that ended
        self._events: list[Event] = []
        self.endpoints = Endpoints(models, self._events.append, self._end, self._fail)

    # --- from the brain -----------------------------------------------------------------------------------------

    def start(self, task: Task, device: str, now_ns: int) -> None:
        """A prefill or decode task was placed on `device`."""
        if self.endpoints.start(task, device, now_ns):
            return
        try:
            name = self._model_name(task)
            check_numerics(task.step.node.params.numerics, name, self.models[name].is_exact)  # type: ignore[attr-defined]
        except HexrtError as error:
            self._fail(task, error.record(), now_ns)
            return
        entry = self._entries.setdefault(device, {}).setdefault(name, Entry(name))
        key = key_of(task)
        node = task.step.node
        self._events.append(Started(task.run.id, node.index, task.part, task.attempt, device, now_ns))
        if key in entry.live:
            entry.live[key] = task
            for outcome in entry.early.pop(key, ()):
                self._outcome(entry, outcome, now_ns)
        elif (why := self.loading.refusal(device, name, now_ns)) is not None:
            self._fail(task, why, now_ns)
        elif entry.admits:
            self._add(entry, task, now_ns)
        else:
            entry.waiting.append(task)
        self.loading.shelf(device).used(name, now_ns)

    def _model_name(self, task: Task) -> str:
        return resolve_model(task.step.node.params.model, self.models)  # type: ignore[attr-defined]

    def _add(self, entry: Entry, task: Task, now_ns: int) -> None:
        assert entry.engine is not None
        key = key_of(task)
        try:
            request = request_for(task, root_of(task, entry.about, self._sharing))
            entry.engine.add(request, now_ns)
        except HexrtError as error:
            self._fail(task, error.record(), now_ns)
            return
        entry.live[key] = task
        if request.retain:
            entry.kept[key] = task.run, task.step.node.index
            self.keeping.add(task.run.id)

    def look_ahead(self, run: Run, now_ns: int) -> None:
        """Something of the run became ready: what its kept sequences hold is read sooner than it was."""
        for entries in self._entries.values():
            for entry in entries.values():
                for key, (of, index) in list(entry.kept.items()):
                    if of is run and entry.engine is not None:
                        need = need_of(run, heirs(run, index), self.expected_ns, now_ns, self._sharing.hold_ns)
                        if need is None:  # everything that could go on from it has ended
                            del entry.kept[key]
                            entry.engine.release(key)
                        else:
                            entry.engine.will_be_read(key, need)

    def bring_ns(self, task: Task, device: str) -> int:
        """What it takes on a device to bring up the pages that the task's sequence goes on from; ELSEWHERE where they are not that device's."""
        parent = parent_of(task)
        if parent is None:
            return 0
        engines = [entry.engine for entry in self._entries.get(device, {}).values() if entry.engine is not None]
        return min((ns for engine in engines if (ns := engine.bring_ns(parent)) is not None), default=ELSEWHERE)

    def owns(self, task: Task) -> bool:
        return task.step.node.op.parts[task.op_part].body is None

    def stop(self, tasks: Iterable[Task], now_ns: int = 0, error: ErrorRecord = CANCELLED) -> None:
        """Takes the sequences of these tasks out; a Failed follows for each once no chunk that is with the host names it."""
        for task in tasks:
            if self.why_stopping(task) is not None:
                continue
            why = error
            if error.kind == "timed_out" and (wanted := self.waits_for(task)):
                why = msgspec.structs.replace(
                    error, message=f"{error.message}, at the end of it in waiting for {wanted}"
                )
            self.endpoints.stop(task)
            key, leaving = key_of(task), False
            for entry in self._entries.get(task.device, {}).values():
                if task in entry.waiting:
                    entry.waiting.remove(task)
                self._forget(entry, key)
                if entry.engine is not None and entry.engine.is_leaving(key):
                    entry.stopping.append((task, why))
                    leaving = True
            if not leaving:
                self._fail(task, why, now_ns)

    def waits_for(self, task: Task) -> str:
        """What a placed task waits for and who holds it; empty for one that runs."""
        for entry in self._entries.get(task.device, {}).values():
            if task in entry.waiting:
                return self.loading.waits_for(task.device, entry)
            found = entry.engine.holders(key_of(task)) if entry.engine is not None else None
            if found is not None:
                need, holders = found
                held = ", ".join(f"{_holder(task, entry, key)}: {pages}" for key, pages in holders[:3])
                return f"{need} pages of {entry.engine.pages.capacity} on {task.device}; held by {held or 'nobody'}"  # type: ignore[union-attr]
        return ""

    def entry(self, device: str, model: str) -> Entry | None:
        return self._entries.get(device, {}).get(model)

    def engines(self) -> Iterator[Engine]:
        return (e.engine for entries in self._entries.values() for e in entries.values() if e.engine is not None)

    def holds_until_ns(self) -> int:
        """When pages that are held for a conversation are let go; 0 where none are."""
        return min((until for engine in self.engines() if (until := engine.holds_until_ns())), default=0)

    def holdings(self) -> Iterator[tuple[bytes, Sequence[Page]]]:
        """The pages of each sequence, by run."""
        for engine in self.engines():
            for key, pages in engine.holdings():
                yield key[0], pages  # type: ignore[index]

    def why_stopping(self, task: Task) -> ErrorRecord | None:
        """What a task that is being stopped will fail of; None for any other."""
        entries = self._entries.get(task.device, {}).values()
        return next((error for entry in entries for stopped, error in entry.stopping if stopped is task), None)

    def _settle_stopped(self, entry: Entry, now_ns: int) -> None:
        if entry.stopping and entry.engine is not None:
            stopping, entry.stopping = entry.stopping, []
            for task, error in stopping:
                if entry.engine.is_leaving(key_of(task)):
                    entry.stopping.append((task, error))
                else:
                    self._fail(task, error, now_ns)

    def limit_ns(self, device: str, command: int) -> int:
        """How long an engine's command may run before its host is taken for hung; 0 for a command that is no engine's."""
        for entry in self._entries.get(device, {}).values():
            if entry.load_command and entry.load_command == command:
                return LOAD_NS
            if entry.unload_command and entry.unload_command == command:
                return CHUNK_NS
            if tokens := entry.chunks.get(command):
                return max(CHUNK_NS, int(SLOWER * entry.slowest_ns * tokens)) if entry.slowest_ns else FIRST_CHUNK_NS
        return 0

    def _forget(self, entry: Entry, key: Key) -> None:
        entry.early.pop(key, None)
        if entry.live.pop(key, self) is not self and entry.engine is not None:
            entry.engine.cancel(key)

    def run_ended(self, run: bytes) -> None:
        """Nothing of the run is continued any more."""
        self.endpoints.run_ended(run)
        for entries in self._entries.values():
            for entry in entries.values():
                for key in [k for k in entry.live if k[0] == run]:
                    self._forget(entry, key)
                for key in [k for k in entry.kept if k[0] == run]:
                    del entry.kept[key]
                    if entry.engine is not None:
                        entry.engine.release(key)
        self.keeping.discard(run)

    def decide(self, now_ns: int, devices: Mapping[str, Device], send: dict[str, list[Any]], events: list[Event]) -> None:  # fmt: skip
        """Loads models that tasks wait for and lets each engine compose its next chunk."""
        for name, entries in self._entries.items():
            device = devices[name]
            if not device.ready:
                continue
            sent: list[Any] = []
            for entry in entries.values():
                self._serve(entry, device, now_ns, sent)
            sent += self.loading.decide(device, entries, now_ns)
            for entry in entries.values():
                if entry.waiting and entry.admits:  # it need not make way any more
                    self._serve(entry, device, now_ns, sent)
            if sent:
                send.setdefault(name, []).extend(sent)
        self.keeper.decide(now_ns, devices, send)
        events.extend(self._events)
        self._events.clear()
        for name, command in self._dropped:
            if devices[name].drop(command) is not None:
                devices[name].done += 1
        self._dropped.clear()

    def _serve(self, entry: Entry, device: Device, now_ns: int, sent: list[Any]) -> None:
        """One model's turn. Without weights there are retained sequences only, whose pages are let go in time."""
        if entry.waiting and entry.admits:
            self._admit(entry, now_ns)
        if entry.engine is not None:
            messages = entry.engine.decide(now_ns, device.next_command)
            entry.chunks.update((m.command, tokens_of(m)) for m in messages if isinstance(m, Chunk))
            sent += messages

    # --- from the hosts -----------------------------------------------------------------------------------------

    def report(self, device: Device, report: FromHost) -> None:
        """What a chunk's or a copy's report means; the events come out of the next `decide`."""
        if isinstance(report, Copied):
            self.keeper.copied(device.name, report)
        elif isinstance(report, Chunked):
            for entry in self._entries.get(device.name, {}).values():
                if entry.engine is not None and report.command in entry.chunks:
                    took_ns = report.end_ns - report.start_ns
                    token_ns = took_ns / entry.chunks.pop(report.command)
                    entry.busy_ns += took_ns
                    self.loading.shelf(device.name).used(entry.model, report.end_ns)
                    entry.slowest_ns = max(entry.slowest_ns, token_ns)
                    entry.engine.pages.learn(token_ns)
                    for outcome in entry.engine.chunked(report, report.end_ns):
                        self._outcome(entry, outcome, report.end_ns)
                    self._settle_stopped(entry, report.end_ns)

    def finished(self, device: Device, report: HostFinished) -> None:
        """A model is loaded, or unloaded."""
        done = self.loading.finished(device.name, self._entries.get(device.name, {}).values(), report)
        if done is None:
            return
        entry, loaded = done
        if (why := self.loading.too_large(device.name, entry.model)) is not None:
            self._fail_waiting(entry, ErrorRecord("unavailable", why, "params.model"), report.end_ns)
        if entry.engine is None:
            entry.engine = Engine(
                entry.model, device.name, self.keeper, loaded.page_bytes, PAGE_TOKENS, loaded.context_tokens,
                self._token_budget, self._passes,
            )  # fmt: skip
        self._admit(entry, report.end_ns)

    def _admit(self, entry: Entry, now_ns: int) -> None:
        waiting, entry.waiting = entry.waiting, []
        for task in waiting:
            self._add(entry, task, now_ns)

    def _fail_waiting(self, entry: Entry, error: ErrorRecord, now_ns: int) -> None:
        waiting, entry.waiting = entry.waiting, []
        for task in waiting:
            self._fail(task, error, now_ns)

    def command_failed(self, device: Device, report: HostFailed) -> None:
        """A model could not be loaded, or a chunk or copy failed as a whole."""
        if self.keeper.failed(device.name, report.command, report.error.message):
            return
        entries = self._entries.get(device.name, {}).values()
        if (failed := self.loading.failed(device.name, entries, report)) is not None:
            self._fail_waiting(failed, report.error, report.end_ns)
        for entry in entries:
            if entry.engine is not None and report.command in entry.chunks:
                del entry.chunks[report.command]
                for outcome in entry.engine.chunk_failed(report.command, report.error):
                    self._outcome(entry, outcome, report.end_ns)
                self._settle_stopped(entry, report.end_ns)

    def device_lost(self, device: str) -> None:
        """The host is gone and with it every model and what lay in its arena; its tasks are placed again by whoever lost them.

        Retained sequences stay as far as their pages lie elsewhere too.
        """
        self.keeper.device_lost(device)
        self.loading.device_lost(device)
        for name, entry in list(self._entries.get(device, {}).items()):
            if entry.engine is None:
                del self._entries[device][name]
                continue
            entry.engine.device_lost()
            self._entries[device][name] = Entry(
                entry.model, entry.engine, about=entry.about, kept=entry.kept, busy_ns=entry.busy_ns
            )

    def _frames_freed(self) -> None:
        for engine in self.engines():
            engine.frames_freed()

    def _outcome(self, entry: Entry, outcome: Outcome, at_ns: int) -> None:
        key: Key = outcome.key  # type: ignore[assignment]
        if key not in entry.live:
            return
        task = entry.live[key]
        if task is None or (task.step.node.op.parts[task.op_part].name == "prefill" and not isinstance(outcome, Prefilled | Refused)):  # fmt: skip
            entry.early.setdefault(key, []).append(outcome)
            return
        run, node = task.run, task.step.node
        if isinstance(outcome, Prefilled):
            task.pages_migrated += outcome.pages_loaded
            task.migration_bytes += outcome.pages_loaded * entry.page_bytes
            if node.op.parts[task.op_part].name == "prefill":
                self._end(task, output_of_prefill(request_for(task)), outcome.start_ns, outcome.end_ns)
                if task.op_part + 1 < len(node.op.parts):
                    entry.live[key] = None
                else:
                    del entry.live[key]
        elif isinstance(outcome, Tokens):
            self._events.append(Emitted(run.id, node.index, task.part, task.attempt, outcome.first, outcome.ids, outcome.text, at_ns, outcome.logprobs))  # fmt: skip
        elif isinstance(outcome, Ended):
            del entry.live[key]
            output = output_of_decode(request_for(task), outcome)
            self._end(task, output, task.start_ns or outcome.start_ns, outcome.end_ns)
        else:
            del entry.live[key]
            self._fail(task, outcome.error, task.start_ns)

    def _end(self, task: Task, output: bytes, start_ns: int, end_ns: int) -> None:
        self._dropped.append((task.device, task.command))
        if task.learn is not None:
            task.learn(end_ns - start_ns)
        self._events.append(
            Finished(task.run.id, task.step.node.index, task.part, task.attempt, task.device, start_ns, end_ns, msgspec.Raw(output))
        )  # fmt: skip

    def _fail(self, task: Task, error: ErrorRecord, now_ns: int) -> None:
        self._dropped.append((task.device, task.command))
        at_ns = now_ns or task.start_ns or task.placed_ns
        if error.where.startswith("params."):
            error = msgspec.structs.replace(error, where=f"{task.step.node.id}.{error.where}")
        self._events.append(Failed(task.run.id, task.step.node.index, task.part, task.attempt, task.device, task.start_ns or at_ns, at_ns, error))  # fmt: skip

    def statistics(self) -> dict[str, float]:
        moved = msgspec.structs.asdict(self.keeper.statistics())
        found = self.endpoints.statistics() | {f"memory_{name}": float(value) for name, value in moved.items()}
        return found | {
            f"{device}_{entry.model}_{name}": float(value)
            for device, entries in self._entries.items()
            for entry in entries.values()
            if entry.engine is not None
            for name, value in msgspec.structs.asdict(entry.engine.statistics()).items()
        }
