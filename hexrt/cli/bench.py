"""`hexrt bench`: measures hexrt on this machine beside a limit and its peers, all in the same run.

Each command prints one table, or with `--json` one object: {"bench", "machine", "rows": [{"name", "value", "unit", "limit", "ratio"}]}.
`limit` is what the row is held against, measured in this run; `ratio` is value / limit. Rows of `memory` and `llm` say more: "asked", "met". Owns the daemon that it starts.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import click

import hexrt
from hexrt.cli import bench_llm
from hexrt.cli.bench_llm_load import Sizes
from hexrt.cli.bench_memory import FAULT_PAGES, SIZE_MIB
from hexrt.cli.bench_memory import measure as measure_memory
from hexrt.cli.bench_peers import layered_predecessors, measure_floor, measure_peers
from hexrt.cli.own_daemon import OwnDaemon
from hexrt.client import Client
from hexrt.core import Durability
from hexrt.workflow.model import StepSpec, Workflow

INDEPENDENT, CHAIN, ROUND_TRIPS, COMMITS = 10_000, 2_000, 300, 200
PASSES = 5
GROWN_BYTES = 16 << 20
TABLES: dict[str, dict[str, object]] = {
    "pool": {"workers": 2},
    "cpu": {"enabled": False},
    "npu": {"enabled": False},
    "limits": {"kept_mib": 64},
}
READY_LIMIT_S, RSS_LIMIT_MIB = 0.2, 40.0
TERMINATED = 143

Row = dict[str, Any]


@click.group()
def bench() -> None:
    """Measure hexrt on this machine, beside a limit and its peers in the same run."""


def row(name: str, value: float | None, unit: str, limit: float | None = None, note: str = "") -> Row:
    made: Row = {"name": name, "value": value, "unit": unit, "limit": limit}
    made["ratio"] = value / limit if value is not None and limit else None
    return made | ({"note": note} if note else {})


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.processor())  # fmt: skip
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "hexrt": hexrt.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def show(name: str, about: dict[str, object], rows: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"bench": name, "machine": about, "rows": rows}))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"hexrt bench {name}: " + ", ".join(f"{key} {value}" for key, value in about.items()), soft_wrap=True)
    asked = any("asked" in each for each in rows)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0 if asked else 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("name", "value", "unit", "limit", "ratio", *(("asked", "met") if asked else ())):
        table.add_column(
            heading,
            justify="right" if heading in ("value", "limit", "ratio") else "left",
            no_wrap=True,
            min_width=4 if heading in ("met", "unit") else 5,
        )
    for each in rows:
        more = (each["asked"], {True: "yes", False: "no"}.get(each["met"], "")) if asked else ()
        table.add_row(
            each["name"], number(each["value"]), each["unit"], number(each["limit"]), number(each["ratio"]), *more
        )
    console.print(table)
    for note, group in groupby(rows, lambda each: each.get("note", "")):
        names = [each["name"] for each in group]
        if note:
            hint = "; the extra [peers] brings it" if "No module named" in note else ""
            about_which = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            console.print(f"{about_which}: {note}{hint}", markup=False, soft_wrap=True)


def shapes() -> dict[str, tuple[Workflow, int]]:
    """The workflows and how many tasks each has. Their outputs are cut to one step, as the peers' are awaited and not fetched."""
    last = {"last": {"$ref": "s0"}}
    layered = layered_predecessors(0)
    return {
        "independent": (Workflow(tuple(StepSpec(f"s{i}", "noop") for i in range(INDEPENDENT)), outputs=last), INDEPENDENT),
        "chain": (Workflow(tuple(StepSpec(f"s{i}", "noop", after=(f"s{i - 1}",) if i else ()) for i in range(CHAIN)), outputs=last), CHAIN),
        "layered": (Workflow(tuple(StepSpec(f"s{i}", "noop", after=tuple(f"s{j}" for j in before)) for i, before in enumerate(layered)), outputs=last), len(layered)),
    }  # fmt: skip


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure_daemon(client: Client, durability: Durability, limits: dict[str, float]) -> Iterator[Row]:
    """Medians over passes, each from the submission of a ready-made workflow to its result in the client."""
    suffix = "" if durability is Durability.NONE else f" {durability}"
    for name, (workflow, tasks) in shapes().items():
        client.run(workflow, durability).check()
        took = statistics.median(timed(lambda w=workflow: client.run(w, durability).check()) for _ in range(PASSES))  # type: ignore[misc]
        yield row(f"hexrt {name}{suffix}", took / tasks * 1e6, "us/task", limits[name])
    one = Workflow((StepSpec("a", "noop"),))
    took = statistics.median(timed(lambda: client.run(one, durability).check()) for _ in range(ROUND_TRIPS))
    yield row(f"hexrt round trip{suffix}", took * 1e6, "us", limits["round trip"])


def measure_commit(directory: Path) -> float:
    """Microseconds of one small durable commit, bare: SQLite, WAL of its final size, synchronous=FULL."""
    import apsw

    connection = apsw.Connection(str(directory / "commit.db"))
    for name, value in (("journal_mode", "WAL"), ("synchronous", "FULL"), ("wal_autocheckpoint", "0")):
        connection.pragma(name, value)
    connection.execute("CREATE TABLE t(x)")
    connection.execute("INSERT INTO t VALUES(zeroblob(?))", (GROWN_BYTES,))
    connection.pragma("wal_checkpoint", "RESTART")  # what follows overwrites the file instead of growing it
    took = [timed(lambda: connection.execute("INSERT INTO t VALUES(?)", (b"x" * 300,))) for _ in range(COMMITS)]
    connection.close()
    return statistics.median(took) * 1e6


@contextmanager
def own_daemon() -> Iterator[tuple[OwnDaemon, float]]:
    """A daemon for the measurement, and the seconds from its spawning to READY."""
    start = time.perf_counter()
    with OwnDaemon(TABLES) as daemon:
        ready_s = time.perf_counter() - start
        yield daemon, ready_s


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


@bench.command(short_help="Microseconds that hexrt adds to an empty task.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--peers/--no-peers", default=True, help="Measure Ray and Dask too, where the extra [peers] is installed."
)
@click.option("--peer-python", type=click.Path(exists=True, dir_okay=False), default=None, help="A Python that has Ray or Dask.")  # fmt: skip
def overhead(as_json: bool, peers: bool, peer_python: str | None) -> None:
    """Microseconds that hexrt adds to a task that does nothing, on 2 workers."""
    about = machine()
    floor = measure_floor()
    with tempfile.TemporaryDirectory(prefix="hexrt-bench-") as directory:
        commit = measure_commit(Path(directory))
    limits = {"independent": floor["independent"], "chain": floor["chain"], "layered": floor["independent"], "round trip": floor["round trip"]}  # fmt: skip
    rows = [row(f"floor {name}", value, "us" if name == "round trip" else "us/task") for name, value in floor.items()]
    rows.append(row("floor commit", commit, "us"))
    with own_daemon() as (daemon, ready_s):
        with Client(daemon.socket) as client:
            idle_mib = rss_mib(daemon.pid)
            for durability in (Durability.NONE, Durability.ASYNC, Durability.SYNC):
                more = commit if durability is Durability.SYNC else 0.0
                rows += measure_daemon(client, durability, limits | {"round trip": floor["round trip"] + more})
    rows.append(row("hexrtd ready", ready_s, "s", READY_LIMIT_S))
    rows.append(row("hexrtd idle", idle_mib, "MiB", RSS_LIMIT_MIB))
    if peers:
        rows += [row(r["name"], r["value"], r["unit"], note=r.get("note", "")) for r in measure_peers(peer_python or sys.executable)]  # fmt: skip
    show("overhead", about, rows, as_json)


@bench.command(short_help="Page copies, the page file, decisions on pages, and rings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--path", type=click.Path(exists=True, file_okay=False, writable=True), default=None, help="The folder for the page file; the temporary one by default.")  # fmt: skip
@click.option("--size-mib", type=click.IntRange(1), default=SIZE_MIB, show_default=True, help="How much is moved.")
@click.option("--most-pages", type=click.IntRange(1000), default=FAULT_PAGES[-1], show_default=True, help="Leave out decisions on more pages.")  # fmt: skip
def memory(as_json: bool, path: str | None, size_mib: int, most_pages: int) -> None:
    """How close the paged memory comes to what the machine can do, and what its decisions cost."""
    about = machine()
    pages = tuple(count for count in FAULT_PAGES if count <= most_pages)
    rows = list(measure_memory(path or tempfile.gettempdir(), size_mib, pages))
    show("memory", about, rows, as_json)


def _names(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...] | None]:
    """Reads a list of names, comma between them. Refuses one that is not known."""

    def read(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...] | None:
        if text is None:
            return None
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


@bench.command(short_help="Language models: prefill, decode and streaming clients, beside their peers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quick", is_flag=True, help="Fewer forms, sequences and repetitions.")
@click.option("--rows", callback=_names(bench_llm.ROWS), help=f"Only these, comma between them: {', '.join(bench_llm.ROWS)}.")  # fmt: skip
@click.option("--forms", callback=_names(bench_llm.FORMS), help=f"Of {', '.join(bench_llm.FORMS)}; the first is held against the peers.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=bench_llm.default_threads, help="Of hexrt and of each peer; by default one a core.")  # fmt: skip
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=None, help="A model folder; the demo's by default.")  # fmt: skip
@click.option("--gguf", "ggufs", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True, help="The same weights as a file for llama.cpp; may be given again.")  # fmt: skip
@click.option("--peers/--no-peers", default=True, help="Measure transformers, llama.cpp's server and vLLM too.")
@click.option("--vllm-python", envvar="HEXRT_BENCH_VLLM_PYTHON", type=click.Path(exists=True, dir_okay=False), default=None, help="A Python that has vLLM for the CPU.")  # fmt: skip
def llm(
    as_json: bool, quick: bool, rows: tuple[str, ...] | None, forms: tuple[str, ...] | None, threads: int,
    model: Path | None, ggufs: tuple[Path, ...], peers: bool, vllm_python: str | None,
) -> None:  # fmt: skip
    """Tokens a second of the engine through the daemon, on the same weights, threads and prompts as its peers."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(TERMINATED)
    )  # unwinds: daemon and peers end, and their folders go
    about, folder = machine(), model.resolve() if model is not None else bench_llm.MODEL
    if (words := bench_llm.busy(os.getloadavg()[0])) and not as_json:
        print(words, file=sys.stderr)
    if not as_json:
        print("this takes some minutes; what is measured now:", file=sys.stderr)
    sizes = Sizes().quick() if quick else Sizes()
    plan = bench_llm.Plan(
        folder, ggufs or bench_llm.default_ggufs(folder), threads, sizes, frozenset(rows or bench_llm.ROWS),
        forms or bench_llm.default_forms(quick), peers, vllm_python,
        (lambda text: None) if as_json else (lambda text: print(f"  {text}", file=sys.stderr, flush=True)),
    )  # fmt: skip
    found = bench_llm.measure(plan)
    about |= {"model": folder.name, "threads": threads, "load_after": round(os.getloadavg()[0], 2)}
    show("llm", about | ({"busy": words} if words else {}), found, as_json)
