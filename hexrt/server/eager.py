"""Runs a coroutine as far as it goes without waiting, so that a request that need not wait costs no asyncio task.

Owns nothing. The first part runs in the caller's context, outside any task (see Backend).
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Rest(Generic[T]):
    """The rest of a coroutine that has begun to wait; to be awaited once, in a task."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    raise
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(sent)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            self._coroutine.close()


def begin(coroutine: Coroutine[Any, Any, T]) -> tuple[T, None] | tuple[None, Rest[T]]:
    """The result, or what is left to wait for. Raises what the coroutine raises before its first wait."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration as stop:
        return stop.value, None
    return None, Rest(coroutine, waits_for)
