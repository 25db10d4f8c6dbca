"""Full KV pages by the tokens that they hold, so that whoever has the same beginning shares them.

Owns one reference on every page it names; pages are not pinned, so they move and go like others, and what is lost is forgotten. A page's key is a
chain of hashes over everything before it (as vLLM's automatic prefix caching has it; Kwon et al., SOSP 2023, section 4.4): with `root` it says whose it is,
of which model and in which numerics, so equal keys mean equal content and no other owner. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from hexrt.memory.pool import NEVER, Page, PagePool

KEY_BYTES = 20
FEW = 256
"""Entries that are not worth a look for lost pages."""


def root_key(uid: int | None, model_digest: str, numerics: str, adapter: str = "") -> bytes:
    """The beginning of the chain. `uid` None: shared by all users."""
    return blake2b(msgspec.msgpack.encode((uid, model_digest, numerics, adapter)), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of a page that holds `ids`, after the page of `parent`."""
    return blake2b(parent + array("I", ids).tobytes(), digest_size=KEY_BYTES).digest()


@dataclass(slots=True)
class _Entry:
    page: Page
    hits: int = 0


class PrefixIndex:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: dict[bytes, _Entry] = {}
        self._sweep_at = FEW

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether a page of this key is there."""
        entry = self._entries.get(key)
        return entry is not None and not self._pool.is_lost(entry.page)

    def find(self, keys: Iterable[bytes]) -> list[Page]:
        """The pages of the longest beginning of a chain that is there in full."""
        found: list[Page] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            if self._pool.is_lost(entry.page):
                self._drop(key)
                break
            found.append(entry.page)
        return found

    def used(self, keys: Iterable[bytes]) -> None:
        """Pages of these keys were taken by another sequence: they may be read yet again."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.hits += 1

    def add(self, key: bytes, page: Page) -> None:
        """Names a full page; where its key is there already, that one stays."""
        if key in self:
            return
        if key in self._entries:
            self._drop(key)
        self._pool.share((page,))
        self._entries[key] = _Entry(page)
        if len(self._entries) >= self._sweep_at:
            self.sweep()

    def left(self, keys: Iterable[bytes]) -> None:
        """A sequence of these keys is gone: what nobody ever took from it goes first when room is needed, and is not stored for later."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and self._pool.refs(entry.page) == 1:
                self._pool.set_next_use((entry.page,), None if entry.hits else NEVER)

    def sweep(self) -> None:
        """Forgets lost pages."""
        for key in [k for k, entry in self._entries.items() if self._pool.is_lost(entry.page)]:
            self._drop(key)
        self._sweep_at = FEW + 2 * len(self._entries)

    def clear(self) -> None:
        for key in list(self._entries):
            self._drop(key)

    def pages(self) -> list[Page]:
        return [entry.page for entry in self._entries.values()]

    def _drop(self, key: bytes) -> None:
        self._pool.release((self._entries.pop(key).page,))
