"""Vector indexes on disk: whole generations, each written beside the last and put in place by one rename.

    state_dir/ops/index/<uid>/<name>/manifest.json     names the generation that counts
                                    <generation>.faiss, <generation>.documents
    state_dir/ops/index/<uid>/.locks/<name>            held by whoever writes

Writers of an index wait for each other; readers never wait: they open what the manifest names, and look again where a writer has
meanwhile removed it (the generation before the last is kept, so that is rare). Only files that hexrt wrote are opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hexrt.errors import BadRequest, NotFound, TaskFailed
from hexrt.ops.spec import StepContext

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEPT_ADDITIONS = 10_000
TRIES = 5


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal and hashed by its generation, a name that is never given twice."""

    generation: str
    kind: str
    metric: str
    m: int
    ef_construction: int
    dimension: int
    count: int
    index_digest: str
    documents_digest: str
    additions: dict[str, int] = {}  # who added -> the first id it was given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and other.generation == self.generation

    def __hash__(self) -> int:
        return hash(self.generation)

    @property
    def number(self) -> int:
        return int(self.generation.partition("-")[0])


class IndexFolder:
    """One index of one user."""

    def __init__(self, context: StepContext, name: str, where: str) -> None:
        """Raises BadRequest for a name that is not a plain word."""
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"{name[:80]!r} is no name of an index: letters, digits, . _ - and at most 64 of them", where
            )
        self.name = name
        self.where = where
        self.home = Path(context.state_dir) / "ops" / "index" / str(context.uid)
        self.path = self.home / name

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other writers of this index out, in this and in other processes."""
        locks = self.home / ".locks"
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(locks / self.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def manifest(self) -> Manifest | None:
        try:
            return msgspec.json.decode((self.path / "manifest.json").read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            raise _damaged(self.path) from None

    def require(self) -> Manifest:
        manifest = self.manifest()
        if manifest is None:
            raise NotFound(f"there is no index {self.name!r} of yours; make it with index.build", self.where)
        return manifest

    def names(self) -> int:
        """How many indexes this user has."""
        return sum(not entry.name.startswith(".") for entry in os.scandir(self.home)) if self.home.is_dir() else 0

    def write(self, manifest: Manifest, index: memoryview, documents: bytes) -> Manifest:
        """Makes these the current generation; durable on return. Call it within `writing`. Returns the manifest as written."""
        before = self.manifest()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = before.number + 1 if before else 1
        manifest = msgspec.structs.replace(
            manifest,
            generation=f"{number:08d}-{secrets.token_hex(4)}",
            index_digest=_digest(index),
            documents_digest=_digest(documents),
            additions=dict(list(manifest.additions.items())[-KEPT_ADDITIONS:]),
        )
        self._put(manifest.generation + ".faiss", index)
        self._put(manifest.generation + ".documents", documents)
        self._put("manifest.new", msgspec.json.encode(manifest))
        os.rename(self.path / "manifest.new", self.path / "manifest.json")
        for folder in (self.path, self.home, self.home.parent):
            _sync_folder(folder)
        kept = {manifest.generation, before.generation if before else ""}
        for entry in os.scandir(self.path):
            if entry.name != "manifest.json" and entry.name.rpartition(".")[0] not in kept:
                os.unlink(entry)
        return manifest

    def drop(self) -> bool:
        """Call it within `writing`. False where there was no index."""
        if not self.path.exists():
            return False
        grave = self.home / f".dropped-{secrets.token_hex(4)}"
        os.rename(self.path, grave)
        _sync_folder(self.home)
        for old in self.home.glob(".dropped-*"):  # one more where a process died right here
            shutil.rmtree(old, ignore_errors=True)
        return True

    def _put(self, name: str, data: bytes | memoryview) -> None:
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_generation(path: Path, manifest: Manifest) -> tuple[bytes, bytes]:
    """The bytes of index and documents. Raises FileNotFoundError where the generation is gone, TaskFailed where it is damaged."""
    parts = []
    for suffix, digest in ((".faiss", manifest.index_digest), (".documents", manifest.documents_digest)):
        data = (path / (manifest.generation + suffix)).read_bytes()
        if _digest(data) != digest:
            raise _damaged(path)
        parts.append(data)
    return parts[0], parts[1]


def _damaged(path: Path) -> TaskFailed:
    return TaskFailed(f"index {path.name!r} is damaged on disk; drop it with index.drop and build it again")


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
