"""What `hexrt bench overhead` is compared with, measured on this machine: the floor, Ray and Dask.distributed, 2 workers each.

Owns the processes that it starts: all are gone when a function returns. Each peer runs in a process of its own, so that neither its
threads nor its garbage are ours; that process is this module again, run by any interpreter that has the peer and msgspec. Prints
nothing. A row is {"name", "value", "unit"} and, where there is more to say, "note"; a peer that cannot run is a row without a value.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

WORKERS = 2
WINDOW = 32
INDEPENDENT, CHAIN, LAYERS, WIDTH, PREDECESSORS, ROUND_TRIPS = 10_000, 2_000, 100, 100, 3, 200
PEERS = ("ray", "dask")
PASSES = 3
"""Of each floor; the median is taken, since a socketpair has a fast and a slow mood on virtual machines."""
WARM_UP = 200
BUDGET_S = 20.0
"""A measurement that would take longer is made with fewer tasks, and says how many."""
GRACE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]

Row = dict[str, Any]


def layered_predecessors(
    seed: int, layers: int = LAYERS, width: int = WIDTH, predecessors: int = PREDECESSORS
) -> list[tuple[int, ...]]:
    """The predecessors of each task of a layered graph: task n is in layer n // width, and waits for distinct tasks of the layer before."""
    rng = random.Random(seed)
    graph: list[tuple[int, ...]] = [()] * width
    for layer in range(1, layers):
        before = range((layer - 1) * width, layer * width)
        graph += [tuple(sorted(rng.sample(before, predecessors))) for _ in range(width)]
    return graph


# --- the floor ----------------------------------------------------------------------------------------------------


def measure_floor(tasks: int = INDEPENDENT, chain: int = CHAIN, round_trips: int = CHAIN) -> dict[str, float]:
    """Microseconds: `independent` and `chain` for a task that bare workers echo as msgpack, `round trip` of a bare request."""
    with _workers(WORKERS) as sockets:
        _echo_windows(sockets, WARM_UP)
        independent = statistics.median(_echo_windows(sockets, tasks) for _ in range(PASSES))
        in_turn = statistics.median(_echo_in_turn(sockets[0], chain) for _ in range(PASSES))
    with _server() as client:
        _ask(client, WARM_UP)
        round_trip = statistics.median(_ask(client, round_trips))
    return {"independent": independent, "chain": in_turn, "round trip": round_trip}


@contextmanager
def _workers(count: int) -> Iterator[list[socket.socket]]:
    """Echo processes, each at the other end of a socketpair; they end when it is closed."""
    sockets: list[socket.socket] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            sockets.append(ours)
            with theirs:
                processes.append(_start("worker", str(theirs.fileno()), pass_fds=(theirs.fileno(),)))
        yield sockets
    finally:
        for ours in sockets:
            ours.close()
        for process in processes:
            process.wait()


@contextmanager
def _server() -> Iterator[socket.socket]:
    """A connection to a process that answers each request on a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="hexrt-"))
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(str(folder / "floor.sock"))
            listener.listen(1)
            process = _start("server", str(listener.fileno()), pass_fds=(listener.fileno(),))
            client.connect(str(folder / "floor.sock"))
            yield client
        process.wait()
    finally:
        shutil.rmtree(folder)


def _start(*arguments: str, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hexrt.cli.bench_peers", *arguments], pass_fds=pass_fds, env=_environment()
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


def _receive(sock: socket.socket) -> bytes:
    """One frame; empty at the end of the stream."""
    data = sock.recv(1 << 16)
    while data and len(data) < 4 + int.from_bytes(data[:4], "little"):
        more = sock.recv(1 << 16)
        if not more:
            return b""
        data += more
    return data[4:]


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(4, "little") + body)


def _echo_windows(sockets: list[socket.socket], tasks: int) -> float:
    """Microseconds a task, up to WINDOW of them at each worker; those that came back together are replaced together."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[tuple[int, str, None]]).decode
    left, done = tasks, 0

    def launch(sock: socket.socket, count: int) -> None:
        nonlocal left
        batch = [(command, "noop", None) for command in range(left, max(0, left - count), -1)]
        left -= len(batch)
        if batch:
            _send(sock, encode(batch))

    start = time.perf_counter()
    poll = select.poll()
    by_fd = {sock.fileno(): sock for sock in sockets}
    for sock in sockets:
        poll.register(sock, select.POLLIN)
        launch(sock, WINDOW)
    while done < tasks:
        for fd, _ in poll.poll():
            count = len(decode(_receive(by_fd[fd])))
            done += count
            launch(by_fd[fd], count)
    return (time.perf_counter() - start) / tasks * 1e6


def _echo_in_turn(sock: socket.socket, tasks: int) -> float:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[tuple[int, str, None]]).decode
    start = time.perf_counter()
    for command in range(tasks):
        _send(sock, encode([(command, "noop", None)]))
        decode(_receive(sock))
    return (time.perf_counter() - start) / tasks * 1e6


def _ask(client: socket.socket, times: int) -> list[float]:
    """Microseconds of each request."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        _send(client, b"request")
        _receive(client)
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


def _work(sock: socket.socket) -> None:
    """A bare worker: reads tasks, answers with their results, until the other end closes."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[tuple[int, str, None]]).decode
    while body := _receive(sock):
        _send(sock, encode([(command, "done", None) for command, _, _ in decode(body)]))


def _serve(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while body := _receive(connection):
            _send(connection, body)


# --- the peers ----------------------------------------------------------------------------------------------------


def measure_peers(
    interpreter: str = sys.executable, seed: int = 0, budget_s: float = BUDGET_S, timeout_s: float = 300.0
) -> list[Row]:
    """The rows of each peer, one after the other. `budget_s` is for one measurement, `timeout_s` for one peer."""
    return [row for peer in PEERS for row in measure_peer(peer, interpreter, seed, budget_s, timeout_s)]


def measure_peer(peer: str, interpreter: str, seed: int, budget_s: float, timeout_s: float) -> list[Row]:
    """Runs one peer in a process of its own and returns its rows, or one row that says why there are none."""
    return rows_of(peer, [interpreter, "-m", "hexrt.cli.bench_peers", peer], [str(seed), str(budget_s)], timeout_s)


def rows_of(name: str, command: Sequence[str], arguments: Sequence[str], timeout_s: float) -> list[Row]:
    """What `command FOLDER arguments` writes into rows.json of that temporary folder, or one row that says why there is none."""
    folder = Path(tempfile.mkdtemp(prefix="hexrt-"))
    try:
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, str(folder), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, env=_environment(),
            )  # fmt: skip
            why = _wait(process, timeout_s)
            if not why and process.returncode == 0:
                rows: list[Row] = json.loads((folder / "rows.json").read_text())
                return rows
            log.seek(0)
            lines = log.read().strip().splitlines()
        return [absent(name, why or (lines[-1] if lines else f"it ended with status {process.returncode}"))]
    except OSError as error:
        return [absent(name, f"{command[0]}: {error.strerror}")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def absent(peer: str, why: str) -> Row:
    return {"name": peer, "value": None, "unit": "absent", "note": why}


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Waits for the process and ends what is left of its session; returns why it did not end by itself."""
    why = ""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        why = f"it took longer than {timeout_s:g} s"
        _ask_to_end(process)
    except BaseException:
        _ask_to_end(process)
        raise
    finally:
        _end_session(process)
    return why


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """Lets the peer shut its own processes down, which need not be of its session."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return  # its session is killed next


def _end_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left in it
    process.wait()


Batch = Callable[[Sequence[tuple[int, ...]]], None]
"""Runs no-op tasks, given the predecessors of each by number, until all are done."""


def _measure(peer: str, run: Batch, seed: int, budget_s: float) -> list[Row]:
    """The four rows of a peer."""
    run([()] * WARM_UP)
    graph = layered_predecessors(seed)
    rows = []
    for name, tasks, step in (
        ("independent", [()] * INDEPENDENT, WARM_UP),
        ("chain", [(), *((number,) for number in range(CHAIN - 1))], WARM_UP),
        ("layered", graph, WIDTH),
    ):
        probe_s = _time(run, tasks[:WARM_UP])
        count = min(len(tasks), max(WARM_UP, int(budget_s / probe_s * WARM_UP) // step * step))
        row: Row = {"name": f"{peer} {name}", "value": _time(run, tasks[:count]) / count * 1e6, "unit": "us/task"}
        if count < len(tasks):
            row["note"] = f"{count} tasks, not {len(tasks)}"
        rows.append(row)
    trips = [_time(run, [()]) * 1e6 for _ in range(ROUND_TRIPS)]
    return [*rows, {"name": f"{peer} round trip", "value": statistics.median(trips), "unit": "us"}]


def _time(run: Batch, tasks: Sequence[tuple[int, ...]]) -> float:
    start = time.perf_counter()
    run(tasks)
    return time.perf_counter() - start


def _noop(*_predecessors: object) -> None:
    return None


def _ray(folder: Path, seed: int, budget_s: float) -> list[Row]:
    import ray

    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
        object_store_memory=256 << 20,
    )
    try:
        noop = ray.remote(_noop)

        def run(tasks: Sequence[tuple[int, ...]]) -> None:
            results: list[Any] = []
            for predecessors in tasks:
                results.append(noop.remote(*(results[number] for number in predecessors)))
            ray.get(results)

        return _measure("ray", run, seed, budget_s)
    finally:
        ray.shutdown()


def _dask(folder: Path, seed: int, budget_s: float) -> list[Row]:
    from distributed import Client, LocalCluster, wait

    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(folder)
        ) as cluster,
        Client(cluster) as client,
    ):

        def run(tasks: Sequence[tuple[int, ...]]) -> None:
            results: list[Any] = []
            for predecessors in tasks:
                results.append(client.submit(_noop, *(results[number] for number in predecessors), pure=False))
            wait(results)

        return _measure("dask", run, seed, budget_s)


def main(arguments: list[str]) -> None:
    """The processes that this module starts of itself."""
    role, *rest = arguments
    if role == "worker":
        _work(socket.socket(fileno=int(rest[0])))
    elif role == "server":
        _serve(socket.socket(fileno=int(rest[0])))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        folder = Path(rest[0])
        measure = {"ray": _ray, "dask": _dask}[role]
        rows = measure(folder, int(rest[1]), float(rest[2]))
        (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
