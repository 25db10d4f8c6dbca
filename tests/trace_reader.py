"""Reads a trace with the real trace processor, as far as set-up could fetch it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

TOOLS = Path(__file__).parent / "tools"
ERRORS = "select name, value, severity from stats where value != 0 and severity in ('error', 'data_loss')"
Query = Callable[[str], list[dict[str, Any]]]


def _fetched() -> Path | None:
    spec = importlib.util.spec_from_file_location("fetch_trace_processor", TOOLS / "fetch_trace_processor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TARGET if module.is_complete(module.TARGET) else None


@contextmanager
def opened(path: Path) -> Iterator[Query]:
    """Loads the trace; gives a function from SQL to rows. Skips the test where there is no trace processor, and fails it in CI."""
    folder = _fetched()
    if folder is None or shutil.which("node") is None:
        what = "the trace processor is not here: run `make setup` (it needs node and npm)"
        pytest.fail(what) if os.environ.get("CI") else pytest.skip(what)
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    config = TraceProcessorConfig(bin_path=str(TOOLS / "trace_processor_shell"))
    with mock.patch.dict(os.environ, {"TP_WASM_DIR": str(folder)}):
        processor = TraceProcessor(trace=str(path), config=config)
    try:
        yield lambda sql: [dict(row.__dict__) for row in processor.query(sql)]
    finally:
        processor.close()
