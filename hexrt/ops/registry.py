"""Finds the ops: hexrt's own files and those that installed packages offer by the entry point group `hexrt.ops`.

Owns nothing after `load_ops` returned; the caller keeps the mapping. A package's op that cannot be imported is reported, not raised,
so that one bad plug-in does not stop the daemon.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import hexrt.ops
from hexrt.ops.spec import OpSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    for entry in _offered():
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


def _offered() -> Iterator[EntryPoint]:
    """The entry points of our group. To see that there are none, as on most machines, takes a tenth of loading importlib.metadata."""
    if any(f"[{ENTRY_POINT_GROUP}]" in text for text in _entry_point_files()):
        from importlib.metadata import entry_points

        yield from entry_points(group=ENTRY_POINT_GROUP)


def _entry_point_files() -> Iterator[str]:
    """What the packages in the folders of `sys.path` offer, one text a package."""
    import os

    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:  # a zip file, or nothing at all
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                        yield file.read()
                except OSError:  # it offers nothing
                    continue
