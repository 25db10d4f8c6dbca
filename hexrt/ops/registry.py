"""Finds the ops: hexrt's own files and those that installed packages offer by the entry point group `hexrt.ops`.

Owns nothing after `load_ops` returned; the caller keeps the mapping. A package's op that cannot be imported is reported, not raised,
so that one bad plug-in does not stop the daemon.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping

import hexrt.ops
from hexrt.ops.spec import OpSpec

ENTRY_POINT_GROUP = "hexrt.ops"
NOT_OPS = frozenset({"spec", "registry"})


def load_ops() -> tuple[Mapping[str, OpSpec], Mapping[str, str]]:
    """All ops by name, and by entry point name why one of another package was left out."""
    ops: dict[str, OpSpec] = {}
    refused: dict[str, str] = {}
    for module in pkgutil.iter_modules(hexrt.ops.__path__):
        if module.name not in NOT_OPS and not module.name.startswith("_"):
            loaded = importlib.import_module(f"hexrt.ops.{module.name}")
            for op in getattr(loaded, "OPS", None) or (loaded.OP,):
                ops[op.name] = op
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            op = entry.load()
        except (ImportError, AttributeError, SyntaxError) as error:
            refused[entry.name] = f"cannot be loaded: {error}"
            continue
        if not isinstance(op, OpSpec):
            refused[entry.name] = f"is a {type(op).__name__}, not an OpSpec"
        elif op.name in ops:
            refused[entry.name] = f"op {op.name!r} exists already"
        else:
            ops[op.name] = op
    return ops, refused
