"""Large values in files of their own, named by what they hold: `blobs/ab/<BLAKE2b-256 in hex>`.

Owns that folder. A file under its final name is complete: it is written under another name, synced, and renamed. Written and removed
by the store's writer thread only; may be read from any thread. Keeps no count of who needs a file: that is in the database.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hexrt.runtime.store_records import Blob

Sync = Callable[[int], None]
"""os.fsync, or what a test puts in its place."""


class LostBlob(Exception):
    """The file is missing or has other content; the text says which, and names no path."""


def blob_of(content: bytes) -> Blob:
    return Blob(hashlib.blake2b(content, digest_size=32).digest(), len(content))


def sync_directory(path: Path, sync: Sync) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


class BlobFolder:
    def __init__(self, folder: Path, sync: Sync = os.fsync) -> None:
        self._folder = folder
        self._sync = sync
        self._lost: set[bytes] = set()  # found bad by a reader: to be written again, not taken for granted

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def write(self, contents: Mapping[Blob, bytes], is_used: Callable[[bytes], bool]) -> None:
        """Has all contents on disk when it returns. `is_used` says that a digest was written and committed before."""
        changed: set[Path] = set()
        for blob, content in contents.items():
            path = self._path(blob.digest)
            if blob.digest not in self._lost and is_used(blob.digest) and _has_size(path, blob.size_bytes):
                continue
            for folder in (self._folder, path.parent):
                if not folder.is_dir():
                    folder.mkdir(0o700)
                    changed.add(folder.parent)
            self._write(path, content)
            changed.add(path.parent)
            self._lost.discard(blob.digest)
        for folder in sorted(changed, reverse=True):
            sync_directory(folder, self._sync)

    def _write(self, path: Path, content: bytes) -> None:
        new = path.with_suffix(".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]
            self._sync(fd)
        finally:
            os.close(fd)
        new.rename(path)

    def read(self, blob: Blob) -> bytes:
        """Raises LostBlob where the content is not what was written."""
        try:
            content = self._path(blob.digest).read_bytes()
        except OSError as error:
            self._lost.add(blob.digest)
            raise LostBlob(f"the file {blob.digest.hex()} cannot be read: {error.strerror}") from None
        if blob_of(content) != blob:
            self._lost.add(blob.digest)
            raise LostBlob(f"the file {blob.digest.hex()} has other content than was written")
        return content

    def remove(self, digest: bytes) -> None:
        self._path(digest).unlink(missing_ok=True)

    def sweep(self, is_used: Callable[[bytes], bool]) -> Iterator[None]:
        """Removes what a crash left behind, one folder a step: unfinished files, and files that nothing refers to."""
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            for path in list(folder.iterdir()) if folder.is_dir() else ():
                if path.suffix == ".new" or (_is_digest(path.name) and not is_used(bytes.fromhex(path.name))):
                    path.unlink()
            yield

    def remove_empty(self) -> None:
        """Removes the folders that hold nothing."""
        if not self._folder.is_dir():
            return
        for folder in (*self._folder.iterdir(), self._folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _is_digest(name: str) -> bool:
    return len(name) == 64 and all(letter in "0123456789abcdef" for letter in name)


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False
