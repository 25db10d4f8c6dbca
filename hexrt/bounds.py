"""A bound on the memory that a piece of work may take, for what comes from strangers.

Owns the process's address-space limit while it is held: for processes that do one thing at a time.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

EXTRA_BYTES = 256 << 20
"""What the work may take beyond what the process has."""


@contextmanager
def memory_limit() -> Iterator[None]:
    """What is done inside takes no more than EXTRA_BYTES beyond what the process has; else it meets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now_bytes + EXTRA_BYTES
    for other in (soft, hard):
        if other != resource.RLIM_INFINITY:
            limit = min(limit, other)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
