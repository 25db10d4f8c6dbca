"""The peers of `hexrt bench llm` that are servers: llama.cpp's (xllamacpp) and vLLM on the CPU, asked over OpenAI's protocol.

Owns the servers that it starts: each runs in a session of its own, which is gone with its files when its measurement ends. `python -m
hexrt.cli.bench_llm_peers FILE SLOTS CONTEXT THREADS` is llama.cpp's server; it ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tenacity
from httpx_sse import aconnect_sse

from hexrt.cli.bench_llm_load import Findings, Sizes, Stream, measure
from hexrt.errors import TaskFailed, Unavailable

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S, END_S = 300.0, 600.0, 20.0
LAST = 2_000
"""Of a server's log: characters in which the reason of its end is looked for."""
PR_SET_PDEATHSIG = 1


class OpenAIServer:
    """A server at `url`. A new connection for each request, since a server may close a kept one under us."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http

    async def complete(self, ids: Sequence[int], tokens: int, client: int) -> Stream:
        return await self._ask("completions", {"prompt": list(ids)}, tokens)

    async def chat(self, text: str, tokens: int, client: int) -> Stream:
        return await self._ask("chat/completions", {"messages": [{"role": "user", "content": text}]}, tokens)

    async def _ask(self, path: str, what: Mapping[str, Any], tokens: int) -> Stream:
        body = {"model": "bench", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        asked_s, came_s, got = time.perf_counter(), [], 0
        async with aconnect_sse(self._http, "POST", f"{self._url}/v1/{path}", json=body | dict(what)) as events:
            if events.response.status_code != httpx.codes.OK:
                raise TaskFailed(f"it answers with {events.response.status_code}")
            async for event in events.aiter_sse():
                if event.data == "[DONE]":
                    break
                piece = json.loads(event.data)
                if "error" in piece:
                    raise TaskFailed(f"it answers with an error: {piece['error']}")
                got = (piece.get("usage") or {}).get("completion_tokens", got)
                if any(has_text(choice) for choice in piece.get("choices", ())):
                    came_s.append(time.perf_counter())
        if got != tokens:
            raise TaskFailed(f"an answer has {got} tokens, not {tokens}")
        return Stream(asked_s, tuple(came_s) or (time.perf_counter(),), got)


def has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a piece of an answer brings text, of a completion or of a chat."""
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


# --- servers ------------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def serving(command: Sequence[str], port: int, more: Mapping[str, str], start_s: float = START_S) -> Iterator[str]:
    """A server's address once it answers /health. Raises Unavailable with its last words where it does not."""
    folder = Path(tempfile.mkdtemp(prefix="hexrt-"))
    environ = (
        os.environ
        | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
        | dict(more)
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with (folder / "log").open("w+") as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, env=environ,
                    start_new_session=True, preexec_fn=_die_with_parent,
                )  # fmt: skip
            except OSError as error:
                raise Unavailable(f"{command[0]}: {error.strerror}") from error
            try:
                _wait_healthy(process, url, start_s, folder / "log")
                yield url
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, start_s: float, log: Path) -> None:
    """A server says that it listens to whoever asks, and to nobody else."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(httpx.HTTPError),
        stop=tenacity.stop_after_delay(start_s),
        wait=tenacity.wait_fixed(0.25),
        reraise=True,
    )

    def ask() -> None:
        if process.poll() is not None:
            raise Unavailable(last_words(log.read_text(errors="replace")) or f"it ended with {process.returncode}")
        httpx.get(f"{url}/health", timeout=5.0, trust_env=False).raise_for_status()

    try:
        attempts(ask)
    except httpx.HTTPError:
        raise Unavailable(f"it did not answer within {start_s:g} s") from None


def last_words(log: str) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for line in log[-LAST:].splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(.*\) )?[A-Za-z_.]*(Error|Exception)\b", line)]
    return next(reversed(named or lines), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end; what is left of its session then is killed."""
    assert process.stdin is not None
    process.stdin.close()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        pass  # its session is killed next
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left in it
        process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def measure_server(
    url: str, sizes: Sizes, wanted: frozenset[str], vocabulary: int, into: Findings, rate: float
) -> None:
    """The rows of a server. Raises TaskFailed where it breaks off, with what was found until then in `into`."""

    async def run() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits, headers={"Connection": "close"}, trust_env=False) as http:  # fmt: skip
            await measure(OpenAIServer(url, http), sizes, wanted, vocabulary, into, rate)

    try:
        asyncio.run(run())
    except httpx.HTTPError as error:
        raise TaskFailed(f"it broke off: {type(error).__name__} {error}".rstrip()) from error


def llama_command(file: Path, port: int, sizes: Sizes, threads: int) -> list[str]:
    slots = max(sizes.clients, *sizes.sequences)
    context = max(sizes.prefill, sizes.context, 4 * sizes.words) + sizes.answer + 32
    return [sys.executable, "-m", "hexrt.cli.bench_llm_peers", str(file), str(port), str(slots), str(context), str(threads)]  # fmt: skip


def llama_environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def vllm_command(python: str, model: Path, port: int, sizes: Sizes, dtype: str) -> list[str]:
    """Prompts that were read are kept, as hexrt and llama.cpp keep them."""
    slots = max(sizes.clients, *sizes.sequences)
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "bench",
        "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024",
        "--max-num-seqs", str(slots), "--enable-prefix-caching", "--enforce-eager",
    ]  # fmt: skip


def vllm_environment(threads: int, cache_gib: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }


def main(arguments: Sequence[str]) -> None:
    """llama.cpp's server, until its parent lets go of its input."""
    import xllamacpp

    file, port, slots, context, threads = arguments[0], *map(int, arguments[1:])
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx, params.kv_unified = slots, slots * context, False
    params.n_batch, params.n_ubatch = 2048, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib, params.fit_params = True, 0, False
    params.model_alias = {"bench"}
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
