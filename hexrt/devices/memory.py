"""A host process's own memory: giving back what it has let go of, and telling an error of too little memory from others."""

from __future__ import annotations

import ctypes
import errno
import gc

ALLOCATOR = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
"""What torch and the C library say; the first is a plain RuntimeError of torch's."""


def give_back(rest_stays: bool) -> None:
    """To the system, what no object holds any more. Takes tens of milliseconds.

    `rest_stays`: what is there now is there for good, and later calls need not look through it again.
    """
    gc.collect()
    if rest_stays:
        gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in ALLOCATOR):
            return True
        error = error.__cause__
    return False
