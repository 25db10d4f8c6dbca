"""Runs the body of a step in a host process: finds it, decodes what it is given, encodes what it returns.

Owns a cache of imported bodies. Large arrays come as views of shared memory and go into the host's ring, see `hexrt.devices.tensors`. An exception of the body becomes an ErrorRecord here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from hexrt.devices.tensors import NONE_GIVEN, Desk, Given, Memory, Output, Placing
from hexrt.errors import BadRequest, ErrorRecord, HexrtError, TaskFailed, Unavailable
from hexrt.ops.spec import OpSpec, StepContext
from hexrt.protocol.host import Hello, Launch
from hexrt.values import decoder_from, encode, encoder_to, pick

EMPTY = b"\x80"
MAX_MESSAGE = 2_000
NO_OUTPUTS: Mapping[int, Output] = MappingProxyType({})


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
    """The bodies that one host process can run. Without `memory` nothing is shared: every tensor goes inline."""

    def __init__(self, ops: Mapping[str, OpSpec], hello: Hello, max_output_bytes: int, memory: Memory | None = None) -> None:  # fmt: skip
        self._ops = ops
        self._hello = hello
        self._max_output_bytes = max_output_bytes
        self._desk = Desk(memory, hello.host_epoch)
        self._encoder, self._decoder = encoder_to(self._place), decoder_from(self._tensor, self._note)
        self._given = NONE_GIVEN  # these two: of what is being decoded or encoded
        self._placing: Placing | None = None
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

    def given(self, launch: Launch, local: Mapping[int, Output] = NO_OUTPUTS) -> Given:
        """The tensors that the inputs of `launch` may name; `local` are the outputs of earlier launches that it may take."""
        views = self._desk.views(launch.tensors) if launch.tensors else {}
        if local:
            for binding in launch.bindings:
                if binding.local:
                    views.update(local[binding.local].views)
        return Given(views) if views else NONE_GIVEN

    def prepare(
        self, launch: Launch, local: Mapping[int, Output] = NO_OUTPUTS, given: Given = NONE_GIVEN
    ) -> tuple[Callable[..., Any], StepContext, Any, dict[str, Any]]:
        """The body of `launch` and its three arguments. Raises HexrtError where they cannot be made."""
        self._given = given
        read = self._decoder.decode
        run, params_decoder, typed, settings = self._cache.get((launch.op, launch.part)) or self._find(
            launch.op, launch.part
        )
        inputs: dict[str, Any] = {} if launch.inputs == EMPTY else read(launch.inputs)
        for binding in launch.bindings:
            if binding.to:
                value = local[binding.local].raw if binding.local else binding.value
                put(inputs, binding.to, read(pick(value, binding.path)))
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

    def _tensor(self, handle: int) -> memoryview:
        return self._given.find(handle)

    def _note(self, handle: int, flat: Any) -> None:
        self._given.note(handle, flat)

    def _place(self, array: Any) -> int | None:
        if self._placing is None:
            self._placing = Placing(self._desk, self._given)
        return self._placing.place(array)

    def encode(self, output: Any, given: Given = NONE_GIVEN) -> Output:
        """Encodes what a body returned that had these tensors. Raises TaskFailed where it cannot be sent or is too large."""
        self._given, self._placing = given, None
        done = None
        try:
            raw = encode(output, encoder=self._encoder)
            if self._placing is not None:
                done = self._placing.commit(raw, self._max_output_bytes)
                return done
        finally:
            if self._placing is not None and done is None:
                self._placing.abort()
            self._given, self._placing = NONE_GIVEN, None
        if len(raw) > self._max_output_bytes:
            raise TaskFailed(f"the output has {len(raw)} bytes, more than the {self._max_output_bytes} allowed")
        return Output(raw)

    def carry_out(self, launch: Launch, local: Mapping[int, Output] = NO_OUTPUTS) -> Output:
        """Runs a plain body to its end. Raises whatever the body raises."""
        given = self.given(launch, local) if launch.tensors or local else NONE_GIVEN
        run, context, params, inputs = self.prepare(launch, local, given)
        return self.encode(run(context, params, inputs), given)

    def run(self, launch: Launch) -> bytes:
        """Runs a plain body to its end and returns its encoded output."""
        return self.carry_out(launch).raw
