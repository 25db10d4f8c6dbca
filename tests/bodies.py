"""Runs one step's body the way a host does: typed parameters, checked inputs, encoded output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hexrt.cli.prepare import STAMP
from hexrt.devices.body import Bodies
from hexrt.llm.convert import MANIFEST
from hexrt.ops.registry import load_ops
from hexrt.protocol.host import VERSION, Hello, Launch
from hexrt.values import decode, encode

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
IMAGES = ROOT / "tests" / "data" / "images"
MAX_OUTPUT_BYTES = 32 << 20


def is_prepared(name: str, models: Path = MODELS) -> bool:
    """Whether a model's folder is complete: what `prepare` writes last, or for a language model what `convert` does, is there."""
    return any((models / name / stamp).is_file() for stamp in (STAMP, MANIFEST))


def need_models(*names: str) -> None:
    """Skips the calling test where a model was not prepared."""
    missing = [name for name in names if not is_prepared(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not prepared: run `make setup`")


def launch(
    op: str,
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    command: int = 1,
    run: bytes = b"r" * 16,
    step: str = "s",
    uid: int = 7,
    **more: Any,
) -> Launch:
    spec = load_ops()[0][op]
    typed = msgspec.convert(dict(params or {}), spec.params)
    if spec.check:
        spec.check(typed)
    return Launch(
        command, 1, op, 0, run, step, uid, 60.0,
        msgspec.Raw(msgspec.msgpack.encode(typed)), msgspec.Raw(encode(dict(inputs or {}))), **more,
    )  # fmt: skip


class Machine:
    """A host's worth of bodies over one state directory."""

    def __init__(
        self, state: Path, settings: Mapping[str, Mapping[str, Any]] | None = None, device: str = "pool:0"
    ) -> None:
        self.hello = Hello(VERSION, 1, device, str(state), str(MODELS), {"ops": dict(settings or {})})
        self.bodies = Bodies(load_ops()[0], self.hello, MAX_OUTPUT_BYTES)

    def run(
        self, op: str, params: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None, **more: Any
    ) -> Any:
        return decode(self.bodies.run(launch(op, params, inputs, **more)))

    async def run_async(
        self, op: str, params: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None, **more: Any
    ) -> Any:
        run, context, typed, given = self.bodies.prepare(launch(op, params, inputs, **more))
        return decode(self.bodies.encode(await run(context, typed, given)).raw)
