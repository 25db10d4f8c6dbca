"""The compiled kernels of this processor: chooses the object that `build.py` made for it, loads it and lends it torch's threads.

A process must hold one OpenMP runtime: the threads of a second one would wait, spinning, on the cores of the first. So the objects have
none, and are handed the entries of the one that torch came with. Where there is no object, `load().why` says why, and kernels run as
plain torch. A call through the library lets go of the GIL; what its pointers point to must live until it returns.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hexrt.kernels.build import OBJECTS, Level, levels, object_path

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
CAPABILITY = {  # what torch's word for a processor stands for, where /proc/cpuinfo cannot be read
    "AVX2": {"avx2", "fma", "f16c"},
    "AVX512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


@dataclass(frozen=True, slots=True)
class Native:
    """`library` is None where `why` says so; `threads`: whether it was lent torch's."""

    level: str
    library: ctypes.CDLL | None
    threads: bool = False
    why: str = ""


@cache
def load(name: str = "", folder: Path = OBJECTS) -> Native:
    """The best object that runs here, or the one of the level `name`. Never raises for want of one."""
    why = f"no kernels are written for {platform.machine()}"
    words = processor_words()
    for level in levels():
        if name and level.name != name:
            continue
        if missing := sorted(level.needs - words):
            why = f"the processor has no {', '.join(missing)}"
            continue
        found = _open(level, folder)
        if found.library is not None:
            return found
        why = found.why
    return Native("", None, why=why)


def _open(level: Level, folder: Path) -> Native:
    path = object_path(level, folder)
    if not path.exists():
        return Native("", None, why="the kernels are not compiled: `make setup` does it where a C compiler is")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return Native(
            "", None, why=f"the compiled kernels cannot be loaded: {str(error).replace(str(path), path.name)}"
        )
    return Native(level.name, library, _lend_threads(library))


def _lend_threads(library: ctypes.CDLL) -> bool:
    """False where torch has no OpenMP: kernels then run on the calling thread."""
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:  # a symbol is looked for in what is loaded already and in all that it was linked with
        runtime = ctypes.CDLL(str(torch_cpu), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        entries = [ctypes.cast(getattr(runtime, entry), ctypes.c_void_p) for entry in OPENMP]
    except (OSError, AttributeError):
        return False
    library.hx_team_lend.argtypes = (ctypes.c_void_p,) * 3
    library.hx_team_lend.restype = None
    library.hx_team_lend(*entries)
    return True


def processor_words() -> frozenset[str]:
    """What the processor can do, in the words of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset(CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ()))
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
