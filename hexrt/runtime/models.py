"""Answers about the models of the config: what each is, where it is loaded, and what its weights take. Pure; reads the brain's tables, changes nothing."""

from __future__ import annotations

from pathlib import PurePath
from urllib.parse import urlsplit

from hexrt.brain.decide import Brain
from hexrt.brain.entry import Entry
from hexrt.brain.models import ModelSource
from hexrt.brain.shelf import UNLIMITED, Shelf, Stand
from hexrt.brain.view import Device
from hexrt.protocol.messages import ModelList
from hexrt.protocol.models import ModelPlace, ModelStatus, WeightsBudget
from hexrt.runtime.machine import MOST_WHY

NAMED = frozenset({"architecture", "parameters", "dtype", "weights", "kv_dtype"})
"""Facts of a loaded model that have fields of their own."""


def models_of(brain: Brain, now_ns: int, is_admin: bool) -> ModelList:
    """`is_admin`: whether paths and URLs are told in full."""
    loading = brain.engines.loading
    devices = [brain.devices[name] for name in loading.devices if name in brain.devices]
    return ModelList(
        0,
        tuple(
            _served(name, source, brain, now_ns, is_admin) if source.endpoint else _loaded(name, source, brain, devices, now_ns, is_admin)
            for name, source in brain.engines.models.items()
        ),
        tuple(
            WeightsBudget(device.name, shelf.used_bytes, shelf.budget_bytes)
            for device in devices
            if (shelf := loading.shelf(device.name)).budget_bytes != UNLIMITED
        ),
    )  # fmt: skip


def _loaded(name: str, source: ModelSource, brain: Brain, devices: list[Device], now_ns: int, is_admin: bool) -> ModelStatus:  # fmt: skip
    """A model that hosts load."""
    entries = {device.name: brain.engines.entry(device.name, name) for device in devices}
    about = next((entry.about for entry in entries.values() if entry is not None and entry.about is not None), None)
    facts = about.facts if about is not None else {}
    path = PurePath(source.path)
    return ModelStatus(
        name,
        "gguf" if path.suffix.lower() == ".gguf" else "folder",
        str(path) if is_admin else path.name,
        source.dtype,
        source.weights,
        source.kv_dtype or source.dtype,
        str(facts.get("architecture", "")),
        int(facts.get("parameters", 0)),
        about.context_tokens if about is not None else source.context_tokens,
        about.page_bytes if about is not None else source.page_bytes,
        (about.weight_bytes if about is not None else 0) or source.weight_bytes,
        {key: value for key, value in facts.items() if key not in NAMED},
        tuple(_place(name, brain, device, entries[device.name], now_ns) for device in devices),
    )


def _place(name: str, brain: Brain, device: Device, entry: Entry | None, now_ns: int) -> ModelPlace:
    shelf = brain.engines.loading.shelf(device.name)
    state, why = _state(name, brain, device, entry, now_ns)
    weights, used_ns = shelf.find(name), shelf.last_used_ns(name)
    engine = entry.engine if entry is not None else None
    found = engine.statistics() if engine is not None else None
    waiting = (len(entry.waiting) if entry is not None else 0) + (found.waiting + found.parked if found else 0)
    tokens, busy_ns = found.answer_tokens if found else 0, entry.busy_ns if entry is not None else 0
    return ModelPlace(
        device.name, state, why[:MOST_WHY], weights.bytes if weights is not None else 0,
        found.live + found.loading if found else 0, waiting, found.retained if found else 0, 0,
        (now_ns - used_ns) / 1e9 if used_ns else None, tokens, tokens / (busy_ns / 1e9) if busy_ns else 0.0,
    )  # fmt: skip


def _state(name: str, brain: Brain, device: Device, entry: Entry | None, now_ns: int) -> tuple[str, str]:
    loading = brain.engines.loading
    shelf = loading.shelf(device.name)
    if device.lost or not device.ready:
        return _state_of(device)
    if (text := loading.too_large(device.name, name)) is not None:
        return "refused", text
    weights = shelf.find(name)
    if weights is None:
        return _absent(shelf, name, entry, now_ns, brain.engines.models[name].why)
    if weights.draining:
        return "draining", shelf.why_making_way
    return {Stand.LOADING: "loading", Stand.LOADED: "loaded", Stand.UNLOADING: "unloading"}[weights.stand], ""


def _absent(shelf: Shelf, name: str, entry: Entry | None, now_ns: int, why: str) -> tuple[str, str]:
    """`why`: what was wrong with its files at the start."""
    if (refusal := shelf.last_refusal(name)) is not None:
        again = f", {refusal.times} times in a row" if refusal.times > 1 else ""
        return "refused", f"{refusal.error.message} (tried {(now_ns - refusal.at_ns) // 10**9} s ago{again})"
    if entry is not None and entry.waiting:
        return "waiting", ""
    return ("unreadable", why) if why else ("unloaded", "")


def _state_of(device: Device) -> tuple[str, str]:
    return ("lost", device.lost) if device.lost else ("ready" if device.ready else "starting", "")


def _served(name: str, source: ModelSource, brain: Brain, now_ns: int, is_admin: bool) -> ModelStatus:
    """A model that a server answers for: its device is the server."""
    device = brain.devices.get(f"endpoint:{name}")
    url = urlsplit(source.endpoint)
    host = url.netloc.rpartition("@")[2]  # no name or password
    places: tuple[ModelPlace, ...] = ()
    if device is not None:
        state, why = _state_of(device)
        why = why or str(device.facts.get("why", ""))
        state = "unreachable" if state == "ready" and device.facts.get("reachable") is False else state
        used_ns, tokens = brain.engines.endpoints.used(device.name)
        ago_s = (now_ns - used_ns) / 1e9 if used_ns else None
        places = (
            ModelPlace(
                device.name, state, why[:MOST_WHY], live=len(device.window), limit=source.concurrency,
                used_s=ago_s, answer_tokens=tokens,
            ),
        )  # fmt: skip
    facts = (
        {key: value for key, value in device.facts.items() if key not in ("url", "why", "reachable")} if device else {}
    )
    return ModelStatus(name, "endpoint", url._replace(netloc=host).geturl() if is_admin else host, facts=facts, places=places)  # fmt: skip
