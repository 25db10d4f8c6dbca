"""Compiles the C kernels of this folder, at set-up: one shared object for each level of instructions, all from the same sources.

`python -m hexrt.kernels.build` makes what is missing or older than a source; the hook of the Python build (hatch_build.py) does the same.
Which object a process loads is decided there and then by its processor (`native.py`), so nothing is compiled for the machine that
builds. No object is linked with an OpenMP runtime: `native.py` lends them torch's. Without a compiler nothing is made, and kernels run
as plain torch. Used by nobody at run time; imports nothing but Python's own library.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cpu"
OBJECTS = Path(__file__).resolve().parent / "objects"
COMPILERS = ("gcc", "cc", "clang")
COMMON = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fno-semantic-interposition", "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """`needs`: words of /proc/cpuinfo without which it cannot run."""

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


LEVELS: dict[str, tuple[Level, ...]] = {
    # By machine; the first that a processor can run is the one it loads.
    "x86_64": (
        Level(
            "avx512",
            ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
            frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}),
        ),
        Level("avx2", ("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
        Level("generic"),
    ),
    "aarch64": (Level("generic"),),
}


class BuildError(Exception):
    """No object was made; says why, in the compiler's words where it has any."""


def levels(machine: str = "") -> tuple[Level, ...]:
    """Those of this machine, best first; none where no kernels are written for it."""
    return LEVELS.get(machine or platform.machine(), ())


def object_path(level: Level, folder: Path = OBJECTS) -> Path:
    return folder / f"hexrt-{platform.machine()}-{level.name}.so"


def find_compiler() -> list[str]:
    """The command of a C compiler: $CC, or the first that is there. Raises BuildError."""
    if asked := shlex.split(os.environ.get("CC", "")):
        return asked
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise BuildError("there is no C compiler: install gcc, or name one in $CC")


def is_current(target: Path, sources: Sequence[Path]) -> bool:
    try:
        made = target.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return all(source.stat().st_mtime_ns <= made for source in sources)


def build(folder: Path = OBJECTS, more: Sequence[str] = (), force: bool = False) -> list[Path]:
    """The objects of this machine, made where they are missing or old. `more`: further compiler flags. Raises BuildError.

    Each appears whole or not at all, and a process that has loaded an older one keeps it.
    """
    sources = sorted(SOURCES.glob("*.c"))
    known = [*sources, *SOURCES.glob("*.h"), Path(__file__)]
    found = levels()
    if not found:
        raise BuildError(f"there are no kernels for {platform.machine()!r}")
    if not sources:
        raise BuildError("there are no sources")
    old = [level for level in found if force or not is_current(object_path(level, folder), known)]
    if old:
        compiler = find_compiler()
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(min(len(old), os.cpu_count() or 1)) as threads:
            list(threads.map(lambda level: _compile(compiler, level, sources, folder, more), old))
    return [object_path(level, folder) for level in found]


def _compile(compiler: list[str], level: Level, sources: Sequence[Path], folder: Path, more: Sequence[str]) -> None:
    target = object_path(level, folder)
    partial = target.with_suffix(f".{os.getpid()}.part")
    command = [*compiler, *COMMON, *level.flags, *more, "-o", str(partial), *map(str, sources), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{compiler[0]} cannot be run: {error.strerror}") from error
    try:
        if done.returncode:
            raise BuildError(f"{level.name}: {compiler[0]} failed:\n{done.stderr.strip()}")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def main(folder: Path = OBJECTS) -> int:
    try:
        made = build(folder)
    except BuildError as error:
        print(f"kernels: {error}\nkernels: the plain torch ones are used", file=sys.stderr)
        return 0
    print("kernels:", *(path.name for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
