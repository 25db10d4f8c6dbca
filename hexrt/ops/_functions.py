"""The work of `map.python`: finds a function that may be called, and calls it.

A function is looked up only after its module was found allowed, and must be defined in an allowed module itself, so that what a module
has merely imported (`os.system`) is not offered along with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import msgspec

from hexrt.errors import BadRequest, TaskFailed, Unavailable
from hexrt.ops._settings import read_settings
from hexrt.ops.spec import StepContext

GROUP = "hexrt.functions"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[ops."map.python"]` of the config: "pkg.mod" allows that module, "pkg." all that is below pkg."""

    modules: tuple[str, ...] = ()

    def allows(self, module: str) -> bool:
        return any(module == m or (m.endswith(".") and len(m) > 1 and module.startswith(m)) for m in self.modules)


def call(context: StepContext, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Raises Unavailable where the function may not or cannot be had, BadRequest where it does not take these arguments."""
    settings = read_settings(context, "map.python", Settings)
    where = f"{context.step}.params.function"
    function = _find(name, settings, where)
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        raise BadRequest(f"{name} does not take these: {error}", f"{context.step}.inputs") from None
    except ValueError:  # a C function that tells nothing of its arguments
        pass
    return function(*positional, **named)


@lru_cache(maxsize=256)
def _find(name: str, settings: Settings, where: str) -> Callable[..., Any]:
    for entry in importlib.metadata.entry_points(group=GROUP):
        if name in (entry.name, entry.value):
            return _check(_load(entry.load, name, where), name, where)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise Unavailable(f"no installed package registers a function {name!r} (entry point group {GROUP})", where)
    if not settings.allows(module):
        raise Unavailable(
            f'module {module!r} is not allowed: whoever runs hexrtd may list it under modules in [ops."map.python"] of the config,'
            f" or a package may register the function by entry point (group {GROUP})",
            where,
        )
    function = _check(_load(lambda: getattr(importlib.import_module(module), attribute), name, where), name, where)
    home = getattr(function, "__module__", None)
    if not isinstance(home, str) or not settings.allows(home):
        raise Unavailable(f"{name} is defined in {home}, which is not allowed", where)
    return function


def _load(load: Callable[[], Any], name: str, where: str) -> Any:
    try:
        return load()
    except AttributeError:
        raise Unavailable(f"there is no {name}", where) from None
    except ImportError as error:
        raise Unavailable(f"{name} cannot be loaded: {error}", where) from None


def _check(found: Any, name: str, where: str) -> Callable[..., Any]:
    if not isinstance(found, FunctionType | BuiltinFunctionType):
        raise Unavailable(f"{name} is a {type(found).__name__}, not a plain function", where)
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise TaskFailed(f"{name} is async or a generator; a plain function is needed", where)
    return found
