"""ONNX Runtime sessions for step bodies, opened once a process on the processor that the host chose.

A host that has a processor of its own enters `Execution`; elsewhere the CPU provider with one thread is used. Bodies call `open_session`
and `run`, and need not know where they are. Owns the cache of sessions. A session may be run from one thread at a time.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.errors import Cancelled, Unavailable

if TYPE_CHECKING:
    import numpy as np

CPU = "CPUExecutionProvider"
Dimensions = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """The processor that sessions are opened on. A `plugin` is a provider library that the host has registered."""

    provider: str = CPU
    plugin: bool = False
    options: tuple[tuple[str, str], ...] = ()
    threads: int = 1

    @property
    def static_shapes(self) -> bool:
        """Every extent must be known when the session is opened."""
        return self.provider != CPU


@dataclass(eq=False, slots=True)
class Execution:
    """One launch on one target, and the means to stop it from another thread.

    `with execution:` makes it the surroundings of the bodies that the entering thread runs.
    """

    target: Target = Target()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _options: Any = None
    _cancelled: bool = False
    _token: Token[Execution | None] | None = None

    def __enter__(self) -> Execution:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """From any thread: the run that goes on is terminated as soon as ONNX Runtime looks, and no further one begins."""
        with self._lock:
            self._cancelled = True
            if self._options is not None:
                self._options.terminate = True

    def run(self, session: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Raises Cancelled where `cancel` was called before; a run that it ends raises an error of ONNX Runtime."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        with self._lock:
            if self._cancelled:
                raise Cancelled("cancelled while it ran")
            self._options = options
        try:
            outputs: list[np.ndarray] = session.run(None, feeds, options)
        finally:
            with self._lock:
                self._options = None
        return outputs


_current: ContextVar[Execution | None] = ContextVar("hexrt_onnx_execution", default=None)


def execution() -> Execution:
    """The surroundings of the calling body."""
    return _current.get() or Execution()


def open_session(path: Path, dimensions: Dimensions = ()) -> Any:
    """The session of the model at `path` on the current target, its named free extents fixed to `dimensions`.

    Raises Unavailable where ONNX Runtime is not installed, cannot read the model, or cannot place all of it on the target.
    """
    return _open(path, dimensions, execution().target)


def _open_errors() -> tuple[type[Exception], ...]:
    """ONNX Runtime's own, which have no base class of their own, and those of its Python side."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (
        "Fail",
        "InvalidArgument",
        "NoSuchFile",
        "InvalidProtobuf",
        "RuntimeException",
        "NotImplemented",
        "InvalidGraph",
        "EPFail",
    )
    return (*(getattr(state, name) for name in own), RuntimeError, ValueError)


@lru_cache(maxsize=32)
def _open(path: Path, dimensions: Dimensions, target: Target) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Unavailable(
            "onnxruntime is not installed: install hexrt with one of its extras cpu, cuda12, cuda13"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = target.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a waiting thread must not take a core
    for name, extent in dimensions:
        options.add_free_dimension_override_by_name(name, extent)
    providers: list[Any] | None = [(target.provider, dict(target.options))]
    if target.provider != CPU:
        # Without it, what the processor cannot do runs on the CPU and nobody is told.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if target.plugin:
        devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == target.provider]
        options.add_provider_for_devices(devices, dict(target.options))
        providers = None
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except _open_errors() as error:
        reason = str(error).replace(str(path), path.name)
        raise Unavailable(f"{path.parent.name} cannot be opened on {target.provider}: {reason}") from error
    if session.get_providers()[0] != target.provider:
        raise Unavailable(f"{path.parent.name} was placed on {session.get_providers()[0]}, not on {target.provider}")
    return session
