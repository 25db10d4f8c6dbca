"""Holds DESIGN.md's layer table: which module may import which, which stay pure, and where the heavy libraries may appear."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hexrt"

LAYERS: dict[str, float] = {
    # DESIGN.md's layer before the point, the order within that layer behind it. The longest prefix of a module's name counts.
    "hexrt": 0.0,
    "hexrt.core": 0.0,
    "hexrt.errors": 0.1,
    "hexrt.config": 1.0,
    "hexrt.bounds": 1.0,
    "hexrt.clock": 1.0,
    "hexrt.paths": 1.0,
    "hexrt.values": 2.0,
    "hexrt.ops": 2.1,
    "hexrt.workflow": 2.2,
    "hexrt.events": 2.3,
    "hexrt.protocol": 3.0,
    "hexrt.tracing": 3.1,
    "hexrt.memory.pool": 3.1,
    "hexrt.memory.plan": 3.1,
    "hexrt.memory.lru": 3.1,
    "hexrt.memory.audit": 3.1,
    "hexrt.memory.bits": 3.1,
    "hexrt.memory.columns": 3.1,
    "hexrt.memory.copies": 3.1,
    "hexrt.memory.counts": 3.1,
    "hexrt.memory.evict": 3.1,
    "hexrt.memory.extents": 3.1,
    "hexrt.memory.frames": 3.1,
    "hexrt.memory.tables": 3.1,
    "hexrt.memory.tiers": 3.1,
    "hexrt.runtime.state": 3.1,
    "hexrt.runtime.entities": 3.1,
    "hexrt.runtime.holding": 3.1,
    "hexrt.runtime.maps": 3.1,
    "hexrt.runtime.retries": 3.1,
    "hexrt.scheduling": 3.9,
    "hexrt.memory.keeper": 4.0,
    "hexrt.memory.prices": 4.0,
    "hexrt.memory.traffic": 4.0,
    "hexrt.llm.admission": 4.1,
    "hexrt.llm.batch": 4.1,
    "hexrt.llm.flights": 4.1,
    "hexrt.llm.holds": 4.1,
    "hexrt.llm.prefix": 4.0,
    "hexrt.llm.progress": 4.1,
    "hexrt.llm.pages": 4.1,
    "hexrt.llm.chunk": 4.1,
    "hexrt.llm.engine_grammar": 4.1,
    "hexrt.llm.sequence": 4.0,
    "hexrt.llm.outcome": 4.0,
    "hexrt.llm.steps": 4.1,
    "hexrt.llm.endpoint": 4.1,
    "hexrt.llm.endpoint_wire": 4.1,
    "hexrt.llm.tokenise": 4.1,
    "hexrt.brain": 5.0,
    "hexrt.memory": 6.0,
    "hexrt.kernels": 6.1,
    "hexrt.llm": 6.2,
    "hexrt.devices": 6.2,
    "hexrt.sim": 6.3,
    "hexrt.runtime": 7.0,
    "hexrt.client": 7.0,
    "hexrt.server": 8.0,
    "hexrt.cli": 9.0,
    "hexrt.daemon": 9.0,
}

PURE = (
    "hexrt.core", "hexrt.errors", "hexrt.values", "hexrt.events", "hexrt.workflow", "hexrt.ops", "hexrt.protocol",
    "hexrt.memory.pool", "hexrt.memory.plan", "hexrt.memory.lru", "hexrt.runtime.state",
    "hexrt.memory.audit", "hexrt.memory.bits", "hexrt.memory.columns", "hexrt.memory.copies", "hexrt.memory.counts", "hexrt.memory.evict",
    "hexrt.memory.extents", "hexrt.memory.frames", "hexrt.memory.tables", "hexrt.memory.tiers",
    "hexrt.runtime.entities", "hexrt.runtime.holding", "hexrt.runtime.maps", "hexrt.runtime.retries", "hexrt.llm.admission", "hexrt.llm.batch", "hexrt.llm.flights", "hexrt.llm.holds", "hexrt.llm.prefix", "hexrt.llm.progress",
    "hexrt.llm.chunk", "hexrt.llm.pages", "hexrt.memory.keeper", "hexrt.memory.prices", "hexrt.memory.traffic", "hexrt.llm.outcome", "hexrt.llm.sequence", "hexrt.llm.steps", "hexrt.llm.endpoint", "hexrt.llm.endpoint_wire", "hexrt.scheduling", "hexrt.brain",
)  # fmt: skip
"""No async, I/O, clock or threads. An op's file is pure where it is imported: its body may import what it needs inside its function."""

CLIENT_SIDE = ("hexrt.workflow.load",)
"""Reads the user's files, and so is not pure; the daemon never imports it."""

IMPURE = frozenset({
    "asyncio", "concurrent", "threading", "multiprocessing", "time", "datetime", "os", "io", "pathlib", "socket", "select",
    "selectors", "signal", "subprocess", "shutil", "tempfile", "mmap", "sqlite3", "apsw", "urllib", "http", "httpx",
    "uvloop", "random", "secrets", "logging", "ctypes", "fcntl", "resource",
})  # fmt: skip

HEAVY = frozenset({"torch", "transformers", "onnxruntime", "cupy", "faiss", "triton", "safetensors"})
MAY_BE_HEAVY = ("hexrt.devices", "hexrt.llm", "hexrt.kernels")
LAZY = ("hexrt.ops", "hexrt.cli")
"""May import the heavy libraries too, but only inside a function."""

TOGETHER = ({"hexrt.llm", "hexrt.devices"}, {"hexrt.cli", "hexrt.daemon"})
"""Two places of equal height that may know each other (no two modules in a circle all the same)."""


@dataclass(frozen=True)
class Import:
    source: str
    line: int
    target: str  # a module of hexrt, or a foreign module's name
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`


def module_files() -> dict[str, Path]:
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


def imports_of(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = typing_only or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(module, child.lineno, name.name, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno}: a relative import; imports are absolute"
                for name in child.names:
                    assert name.name != "*", f"{module}:{child.lineno}: import *"
                    whole = f"{child.module}.{name.name}"
                    yield Import(
                        module, child.lineno, whole if whole in FILES else str(child.module), lazy, typing_only
                    )
            else:
                yield from walk(child, inside, typed)

    yield from walk(ast.parse(FILES[module].read_text()), False, False)


ALL = [found for module in FILES for found in imports_of(module)]


def under(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def entry_of(module: str) -> str:
    """The line of the table that a module falls under."""
    while module not in LAYERS:
        module = module.rpartition(".")[0]
    return module


def folder_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def is_ours(target: str) -> bool:
    return target == "hexrt" or target.startswith("hexrt.")


def test_every_module_has_its_place_in_the_layer_table() -> None:
    unplaced = [module for module in FILES if module != "hexrt" and entry_of(module) == "hexrt"]
    assert not unplaced, f"not in the layer table of DESIGN.md and of this test: {unplaced}"


def test_imports_across_folders_point_down() -> None:
    wrong = []
    for found in ALL:
        folders = {folder_of(found.source), folder_of(found.target)}
        if not is_ours(found.target) or found.typing_only or len(folders) == 1 or folders in TOGETHER:
            continue
        if found.lazy and under(found.source, ("hexrt.ops",)):
            continue  # a step's body, which runs in a host
        above, below = LAYERS[entry_of(found.source)], LAYERS[entry_of(found.target)]
        if above <= below and below > 0:
            wrong.append(f"{found.source}:{found.line} (layer {above}) imports {found.target} (layer {below})")
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for found in ALL:
        if is_ours(found.target) and not found.lazy and not found.typing_only and found.target != found.source:
            graph[found.source].add(found.target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "a circle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_pure_modules_import_no_io_clock_thread_or_loop() -> None:
    wrong = []
    for found in ALL:
        if (
            not under(found.source, PURE)
            or is_ours(found.target)
            or found.typing_only
            or under(found.source, CLIENT_SIDE)
        ):
            continue
        if found.lazy and under(found.source, ("hexrt.ops",)):
            continue
        if under(found.source, ("hexrt.ops",)) and found.source.rpartition(".")[2].startswith("_"):
            continue  # a body's own helpers, imported inside a body; the next test holds that
        if found.target.split(".")[0] in IMPURE:
            wrong.append(f"{found.source}:{found.line} imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_helpers_of_a_step_body_are_imported_inside_functions_only() -> None:
    wrong = [
        f"{found.source}:{found.line} imports {found.target}"
        for found in ALL
        if under(found.target, ("hexrt.ops",))
        and found.target.rpartition(".")[2].startswith("_")
        and not found.lazy
        and not found.source.rpartition(".")[2].startswith("_")
    ]
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_are_imported_only_in_host_code_and_in_step_bodies() -> None:
    wrong = []
    for found in ALL:
        if found.target.split(".")[0] not in HEAVY or found.typing_only or under(found.source, MAY_BE_HEAVY):
            continue
        if not (found.lazy and under(found.source, LAZY)):
            wrong.append(f"{found.source}:{found.line} imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_within_four_hundred_lines() -> None:
    long = {m: n for m, path in FILES.items() if (n := len(path.read_text().splitlines())) > 400}
    assert not long, f"split by noun: {long}"


PROBE = """
import importlib, json, sys
from hexrt.ops.registry import load_ops
ops, refused = load_ops()
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = sorted(set(sys.modules) & {"torch", "transformers", "onnxruntime", "cupy", "faiss", "triton", "hexrt.workflow.load"})
print(json.dumps({"ops": sorted(ops), "refused": refused, "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, object]:
    daemon = [m for m in FILES if under(m, ("hexrt.daemon", "hexrt.runtime", "hexrt.server", "hexrt.scheduling"))]
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *daemon], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded: dict[str, object] = json.loads(result.stdout)
    return loaded


def test_the_daemon_with_every_op_loaded_holds_no_heavy_library(probe: dict[str, object]) -> None:
    assert probe["heavy"] == []


def test_every_op_file_and_entry_point_loads(probe: dict[str, object]) -> None:
    assert "noop" in probe["ops"]  # type: ignore[operator]
    assert probe["refused"] == {}
