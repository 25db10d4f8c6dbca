"""What the daemon tells of the models of its config. Part of `protocol.messages`. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model on one device, or with the server that answers for it."""

    device: str
    state: str  # unloaded, waiting (for room), loading, loaded, draining, unloading, refused, unreadable; of a server or device: ready, unreachable, starting, lost
    why: str = ""  # it is refused, unreadable, drains, or its device is lost
    weight_bytes: int = 0  # that it takes there now
    live: int = 0  # sequences that are computed
    waiting: int = 0  # for the model, or for pages
    retained: int = 0  # for steps that go on from them
    limit: int = 0  # of requests that a server is given at a time
    used_s: float | None = None  # ago
    answer_tokens: int = 0  # since the daemon started
    tokens_per_s: float = 0.0  # of those, by the time that its chunks took


class ModelStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model of the config. What only its files or its server know is 0 or empty until they were read."""

    name: str
    kind: str  # folder, gguf, endpoint
    source: str  # its path or URL, for others than admins its last part
    dtype: str = ""
    weights: str = ""  # as_dtype, int8, int4
    kv_dtype: str = ""
    architecture: str = ""
    parameters: int = 0
    context_tokens: int = 0
    page_bytes: int = 0
    weight_bytes: int = 0  # about what it takes in memory
    facts: dict[str, Any] = {}  # of the host or server: attention, levers, threads
    places: tuple[ModelPlace, ...] = ()


class WeightsBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the weights of all models on a device take and may take."""

    device: str
    used_bytes: int
    budget_bytes: int
