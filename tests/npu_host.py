"""A real NPU host process, spoken to as the daemon speaks to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hexrt.protocol.host import VERSION, Hello, Ready
from tests.bodies import MAX_OUTPUT_BYTES, MODELS
from tests.host_peer import EPOCH, HostPeer


class NpuHost(HostPeer):
    def __init__(self, state: Path, **npu: Any) -> None:
        super().__init__("npu")
        settings = {"max_output_bytes": MAX_OUTPUT_BYTES, "ops": {}, "npu": npu}
        self.send(Hello(VERSION, EPOCH, "npu:0", str(state), str(MODELS), settings))
        ready = self.next()
        assert isinstance(ready, Ready)
        self.ready = ready
