"""The hook of the Python build: compiles the kernels, so that an editable installation and a wheel both carry them.

A wheel with kernels is of this machine's kind; where none could be compiled it is for any machine, and the build says why on stderr.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_builder(root: Path) -> ModuleType:
    """hexrt/kernels/build.py alone: hexrt itself is not installed yet."""
    spec = importlib.util.spec_from_file_location("hexrt_kernels_build", root / "hexrt/kernels/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up there
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = load_builder(Path(self.root))
        try:
            made = builder.build()
        except builder.BuildError as error:
            self.app.display_warning(f"no kernels were compiled, the plain torch ones will be used: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in made]
