"""Runs the body of a step in a host process: finds it, decodes what it is given, encodes what it returns.

Owns a cache of imported bodies. An exception of the body becomes an ErrorRecord here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hexrt.errors import BadRequest, ErrorRecord, HexrtError, TaskFailed, Unavailable
from hexrt.ops.spec import OpSpec, StepContext
from hexrt.protocol.host import Hello, Launch
from hexrt.values import decode, encode, pick

EMPTY = b"\x80"
MAX_MESSAGE = 2_000


def describe(error: BaseException) -> ErrorRecord:
    """The record of an exception that a body raised, whatever its text does."""
    if isinstance(error, HexrtError):
        return ErrorRecord(error.kind, _sendable(error.message), _sendable(error.where), error.retryable)
    try:
        text = str(error)
    except Exception as failure:  # border of a task: the exception is the body's own code
        text = f"(its text cannot be had: {type(failure).__name__})"
    return ErrorRecord("task_failed", _sendable(f"{type(error).__name__}: {text}"))


def _sendable(text: str) -> str:
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode()


def put(inputs: dict[str, Any], to: Sequence[str | int], value: Any) -> None:
    """Sets `value` at the place `to` (keys and list positions) inside `inputs`."""
    place: Any = inputs
    for key in to[:-1]:
        place = place[key]
    place[to[-1]] = value


class Bodies:
    """The bodies that one host process can run."""

    def __init__(self, ops: Mapping[str, OpSpec], hello: Hello, max_output_bytes: int) -> None:
        self._ops = ops
        self._hello = hello
        self._max_output_bytes = max_output_bytes
        self._cache: dict[tuple[str, int], tuple[Callable[..., Any], Any, list[tuple[str, Any]], dict[str, Any]]] = {}

    def _find(self, name: str, part: int) -> tuple[Callable[..., Any], Any, list[tuple[str, Any]], dict[str, Any]]:
        op = self._ops.get(name)
        body = op.parts[part].body if op is not None and part < len(op.parts) else None
        if op is None or body is None:
            raise Unavailable(f"op {name!r} has no part {part} that this host can run", name)
        module, _, function = body.partition(":")
        try:
            run = getattr(importlib.import_module(module), function)
        except ImportError as error:
            raise Unavailable(f"op {name!r} cannot be loaded: {error}", name) from error
        typed = [(port, spec.type) for port, spec in op.inputs.items() if spec.type is not Any]
        settings = self._hello.settings.get("ops", {}).get(name, {})
        found = run, msgspec.msgpack.Decoder(op.params), typed, settings
        self._cache[name, part] = found
        return found

    def prepare(
        self, launch: Launch, local: Mapping[int, bytes] | None = None
    ) -> tuple[Callable[..., Any], StepContext, Any, dict[str, Any]]:
        """The body of `launch` and its three arguments. Raises HexrtError where they cannot be made."""
        run, params_decoder, typed, settings = self._cache.get((launch.op, launch.part)) or self._find(
            launch.op, launch.part
        )
        inputs: dict[str, Any] = {} if launch.inputs == EMPTY else decode(launch.inputs)
        for binding in launch.bindings:
            if binding.to:
                value = local[binding.local] if binding.local and local is not None else binding.value
                put(inputs, binding.to, decode(pick(value, binding.path)))
        for port, kind in typed:
            if port in inputs:
                try:
                    inputs[port] = msgspec.convert(inputs[port], kind)
                except msgspec.ValidationError as error:
                    raise BadRequest(str(error), f"{launch.step}.inputs.{port}") from None
        hello = self._hello
        context = StepContext(
            launch.run, launch.step, launch.part, launch.attempt, launch.uid, hello.device, launch.timeout_s,
            hello.state_dir, hello.models_dir, settings, hello.settings.get("models", {}),
        )  # fmt: skip
        return run, context, params_decoder.decode(launch.params), inputs

    def encode(self, output: Any) -> bytes:
        raw = encode(output)
        if len(raw) > self._max_output_bytes:
            raise TaskFailed(f"the output has {len(raw)} bytes, more than the {self._max_output_bytes} allowed")
        return raw

    def run(self, launch: Launch, local: Mapping[int, bytes] | None = None) -> bytes:
        """Runs a plain body to its end and returns its encoded output. Raises whatever the body raises."""
        run, context, params, inputs = self.prepare(launch, local)
        return self.encode(run(context, params, inputs))
