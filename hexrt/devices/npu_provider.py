"""Which ONNX Runtime execution provider an NPU host uses, and why.

Owns the search: providers built into the installed ONNX Runtime, then plug-in packages. A provider is taken only if it is there; one
asked for by name that is not there stops the host with an error instead of leaving the work to the CPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hexrt.devices.onnx import CPU, Target
from hexrt.errors import Unavailable

BUILT_IN = {
    "QNNExecutionProvider": (("backend_path", "libQnnHtp.so"),),
    "VitisAIExecutionProvider": (),
    "OpenVINOExecutionProvider": (("device_type", "NPU"),),
}
"""Providers that a build of ONNX Runtime may hold, with the options that make them use the NPU."""


@dataclass(frozen=True, slots=True)
class PlugIn:
    """A package that brings a provider library."""

    package: str
    module: str
    provider: str
    options: tuple[tuple[str, str], ...]
    software: str  # what to say where there is no such processor and the provider computes what it would do


PLUG_INS = (
    PlugIn(
        "onnxruntime-qnn",
        "onnxruntime_qnn",
        "QNNExecutionProvider",
        # A Hexagon v73 of the SoC model 60; without a SoC named the software backend takes an older one with fewer operators.
        (("backend_type", "htp"), ("soc_model", "60"), ("htp_arch", "73")),
        "no Hexagon NPU in this machine: its software model computes the same on the CPU, slowly",
    ),
)


def choose_provider(settings: Mapping[str, Any]) -> tuple[Target, dict[str, Any]]:
    """The target of all sessions, and the facts of Ready. `settings` is the config's `[npu]`.

    Raises Unavailable where onnxruntime is not installed, or the provider named there is not.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise Unavailable(
            "onnxruntime is not installed: install hexrt with one of its extras cpu, cuda12, cuda13"
        ) from error
    wanted = str(settings.get("provider") or "")
    threads = int(settings.get("threads") or 1)
    present = onnxruntime.get_available_providers()
    facts: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "threads": threads}
    why = "no NPU execution provider is installed; the CPU provider serves the queue"
    for provider, options in BUILT_IN.items():
        if provider in present and wanted in ("", provider):
            return Target(provider, False, options, threads), {**facts, "provider": provider, "npu": True}
    for plug_in in PLUG_INS:
        if wanted in ("", plug_in.provider) and importlib.util.find_spec(plug_in.module) is not None:
            on_npu = _register(onnxruntime, plug_in)
            if on_npu or wanted:
                target = Target(plug_in.provider, True, plug_in.options, threads)
                facts |= {"provider": plug_in.provider, "npu": on_npu, "package": _version(plug_in.package)}
                return target, facts if on_npu else {**facts, "why": plug_in.software}
            why = f'{plug_in.package} finds no NPU here; npu.provider = "{plug_in.provider}" would take its software model'
    if wanted not in ("", CPU):
        known = ", ".join((CPU, *BUILT_IN))
        raise Unavailable(f"npu.provider is {wanted!r}, which is not installed here; known are {known}", "npu.provider")
    if wanted:
        why = "the config asks for the CPU provider"
    return Target(CPU, threads=threads), {**facts, "provider": CPU, "npu": False, "why": why}


def _register(onnxruntime: Any, plug_in: PlugIn) -> bool:
    """Loads the provider library. True if it found an NPU, False if it will compute in software."""
    library = importlib.import_module(plug_in.module).get_library_path()
    onnxruntime.register_execution_provider_library(plug_in.provider, library)
    devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == plug_in.provider]
    if not devices:
        raise Unavailable(f"{plug_in.package} offers no device here", "npu.provider")
    return any(d.device.type.name == "NPU" for d in devices)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
