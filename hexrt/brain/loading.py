"""Loading and unloading of models: one shelf of weights a device, and the commands that put models on it and take them off.

Owns the shelves. Called by `brain.engines`, which owns the entries; changes of an entry only what is of loading. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hexrt.brain.entry import Entry
from hexrt.brain.models import PAGE_TOKENS, LoadedModel, ModelSource, check_fits
from hexrt.brain.shelf import Refusal, Shelf, Stand, Want
from hexrt.brain.view import Device
from hexrt.errors import BadRequest, ErrorRecord, HexrtError
from hexrt.llm.steps import resolve_model
from hexrt.memory.keeper import Keeper
from hexrt.protocol.host import HostFailed, HostFinished, LoadModel, UnloadModel
from hexrt.workflow.graph import Node

BUDGET_KEY = "cpu.weights_mib"
MIB = 1 << 20


class Loading:
    def __init__(self, models: Mapping[str, ModelSource], budgets: Mapping[str, int]) -> None:
        """`budgets`: bytes of weights, by device; a device that is not among them has no limit."""
        self._models = models
        self._budgets = budgets
        self._shelves: dict[str, Shelf] = {}

    def shelf(self, device: str) -> Shelf:
        found = self._shelves.get(device)
        if found is None:
            found = self._shelves[device] = Shelf(self._budgets[device]) if device in self._budgets else Shelf()
        return found

    @property
    def devices(self) -> list[str]:
        """On which models were or may be loaded."""
        return sorted({*self._budgets, *self._shelves})

    def _size(self, device: str, model: str) -> int:
        return self.shelf(device).size_of(model, self._models[model].weight_bytes)

    def refusal(self, device: str, model: str, now_ns: int) -> ErrorRecord | None:
        """Why a task of a model that is not loaded need not wait for it."""
        if (text := self.too_large(device, model)) is not None:
            return ErrorRecord("unavailable", text, "params.model")
        refusal = self.shelf(device).refusal(model, now_ns)
        return _again(refusal, now_ns) if refusal is not None else None

    def too_large(self, device: str, model: str) -> str | None:
        """What is wrong where the weights of a model are more than the device may ever have of any; None where nothing is."""
        shelf = self.shelf(device)
        if shelf.fits(model, self._models[model].weight_bytes):
            return None
        return (
            f"the weights of {model!r} take {_mib(self._size(device, model))} MiB, and all models on {device} may take "
            f"{shelf.budget_bytes // MIB} MiB together: raise {BUDGET_KEY}, or keep its weights in fewer bits"
        )

    def check(self, node: Node, keeper: Keeper, devices: Sequence[str]) -> None:
        """Raises BadRequest, naming the step, where the weights of its model or the pages of its answer are more than any of these devices may have."""
        params: Any = node.params
        try:
            model = resolve_model(params.model, self._models)
        except HexrtError:
            return  # said by the step's first part
        if self._models[model].endpoint:
            return
        texts = [self.too_large(device, model) for device in devices]
        if texts and all(texts):
            raise BadRequest(str(texts[0]), f"steps.{node.id}.params.model")
        check_fits(node, self._models, keeper, devices)

    def waits_for(self, device: str, entry: Entry) -> str:
        """What the tasks in `entry.waiting` wait for, and who holds it."""
        shelf = self.shelf(device)
        wanted = f"the model {entry.model!r} to be loaded"
        if entry.load_command:
            return wanted
        others = [w for w in shelf.holders() if w.bytes and w.model != entry.model]
        held = ", ".join(f"{w.model!r}: {_mib(w.bytes)} MiB" for w in others[:3])
        if shelf.find(entry.model) is not None:  # its weights are there, and go
            return f"{wanted} again: {shelf.why_making_way}"
        if shelf.used_bytes + self._size(device, entry.model) <= shelf.budget_bytes or not held:
            return wanted
        return (
            f"{wanted}, {_mib(self._size(device, entry.model))} MiB of {shelf.budget_bytes // MIB} MiB on {device}; "
            f"held by {held}"
        )

    # --- what is sent ---------------------------------------------------------------------------------------------

    def decide(self, device: Device, entries: Mapping[str, Entry], now_ns: int) -> list[LoadModel | UnloadModel]:
        """Commands for the device's host; sets which entries drain."""
        shelf = self.shelf(device.name)
        wants = [
            Want(e.model, self._size(device.name, e.model), e.waiting[0].placed_ns)
            for e in entries.values()
            if e.waiting and shelf.find(e.model) is None
        ]
        if not wants and not shelf.is_over and not shelf.is_draining:
            return []
        plan = shelf.plan(wants, {e.model for e in entries.values() if e.is_idle}, now_ns)
        messages: list[LoadModel | UnloadModel] = []
        for model in plan.unload:
            entry = entries[model]
            entry.unload_command = device.next_command()
            messages.append(UnloadModel(entry.unload_command, model))
        for model in plan.load:
            entry, source = entries[model], self._models[model]
            entry.load_command = device.next_command()
            messages.append(
                LoadModel(entry.load_command, model, source.path, source.dtype, PAGE_TOKENS, source.weights, source.kv_dtype)
            )  # fmt: skip
        for entry in entries.values():
            weights = shelf.find(entry.model)
            entry.draining = weights is not None and (weights.draining or weights.stand is Stand.UNLOADING)
        return messages

    # --- from the hosts -------------------------------------------------------------------------------------------

    def finished(self, device: str, entries: Iterable[Entry], report: HostFinished) -> tuple[Entry, LoadedModel] | None:
        """The entry whose model is loaded now, and what the host says of it; None for any other report."""
        shelf = self.shelf(device)
        for entry in entries:
            if entry.load_command and entry.load_command == report.command:
                about = msgspec.msgpack.decode(report.output, type=LoadedModel)
                entry.load_command, entry.loaded = 0, True
                _take_over(entry, about)
                shelf.loaded(entry.model, about.weight_bytes, report.end_ns - report.start_ns, report.end_ns)
                return entry, about
            if entry.unload_command and entry.unload_command == report.command:
                self._unloaded(shelf, entry)
        return None

    def failed(self, device: str, entries: Iterable[Entry], report: HostFailed) -> Entry | None:
        """The entry whose model could not be loaded; None for any other report."""
        shelf = self.shelf(device)
        for entry in entries:
            if entry.load_command and entry.load_command == report.command:
                entry.load_command = 0
                shelf.failed(entry.model, report.error, report.end_ns)
                return entry
            if entry.unload_command and entry.unload_command == report.command:
                self._unloaded(shelf, entry)  # a host forgets a model before anything that can fail
        return None

    @staticmethod
    def _unloaded(shelf: Shelf, entry: Entry) -> None:
        entry.unload_command, entry.loaded, entry.draining = 0, False, False
        shelf.unloaded(entry.model)

    def device_lost(self, device: str) -> None:
        self.shelf(device).lost()


def _take_over(entry: Entry, about: LoadedModel) -> None:
    """Notes what the host says. What is retained of other weights than these is let go: the model's files have changed since."""
    before, engine = entry.about, entry.engine
    entry.about, entry.page_bytes = about, about.page_bytes
    if before is None or engine is None or before.digest == about.digest:
        return
    for key in entry.kept:
        engine.release(key)
    entry.kept.clear()
    if (before.page_bytes, before.context_tokens) != (about.page_bytes, about.context_tokens):
        engine.pages.prefixes.clear()
        entry.engine = None


def _again(refusal: Refusal, now_ns: int) -> ErrorRecord:
    ago_s, wait_s = (now_ns - refusal.at_ns) // 10**9, -(-(refusal.until_ns - now_ns) // 10**9)
    text = f"{refusal.error.message} (tried {ago_s} s ago, {refusal.times} times in a row; tried again in {wait_s} s)"
    return msgspec.structs.replace(refusal.error, message=text)


def _mib(size: int) -> int:
    return -(-size // MIB)
