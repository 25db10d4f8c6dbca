"""File systems for SQLite that fail at a chosen call, or forget what was not synced."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import apsw


@dataclass
class Faults:
    """Counts calls of `kind` (open, write, sync); the `at`th fails, and with `is_lasting` each one after it."""

    kind: str
    at: int
    error: type[apsw.Error]
    is_lasting: bool = False
    seen: int = 0
    struck: int = 0

    def meet(self, kind: str) -> None:
        if kind == self.kind:
            self.seen += 1
            if self.seen == self.at or (self.is_lasting and self.seen > self.at):
                self.struck += 1
                raise self.error(f"injected: {kind} {self.seen}")

    def sync(self, fd: int) -> None:
        """In the place of os.fsync, for the files beside the database."""
        try:
            self.meet("sync")
        except apsw.Error as error:
            raise OSError(5, str(error)) from None
        os.fsync(fd)


class FaultyFile(apsw.VFSFile):
    def __init__(self, faults: Faults, name: object, flags: list[int]) -> None:
        faults.meet("open")
        self._faults = faults
        super().__init__("", name, flags)  # type: ignore[arg-type]

    def xWrite(self, data: bytes, offset: int) -> None:
        self._faults.meet("write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._faults.meet("sync")
        super().xSync(flags)


class FaultyDisk(apsw.VFS):
    def __init__(self, name: str, faults: Faults) -> None:
        self._faults = faults
        super().__init__(name, "")

    def xOpen(self, name: object, flags: list[int]) -> FaultyFile:
        return FaultyFile(self._faults, name, flags)


@dataclass
class Platter:
    """One file: what is safe, and the writes since (offset and bytes; None for a truncation to the offset)."""

    safe: bytearray = field(default_factory=bytearray)
    loose: list[tuple[int, bytes | None]] = field(default_factory=list)

    def settle(self) -> None:
        for change in self.loose:
            apply(self.safe, *change)
        self.loose = []


def apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class ForgetfulFile(apsw.VFSFile):
    def __init__(self, platter: Platter, moment: threading.Lock, name: object, flags: list[int]) -> None:
        self._platter = platter
        self._moment = moment
        super().__init__("", name, flags)  # type: ignore[arg-type]

    def xWrite(self, data: bytes, offset: int) -> None:
        with self._moment:
            super().xWrite(data, offset)
            self._platter.loose.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        with self._moment:
            super().xTruncate(newsize)
            self._platter.loose.append((newsize, None))

    def xSync(self, flags: int) -> None:
        with self._moment:
            super().xSync(flags)
            self._platter.settle()


class ForgetfulDisk(apsw.VFS):
    """Remembers for each file what a power loss would leave. The shared index of the log is memory, and goes."""

    def __init__(self, name: str) -> None:
        self._platters: dict[str, Platter] = {}
        self._moment = threading.Lock()  # a power loss meets all files at one moment
        super().__init__(name, "")

    def xOpen(self, name: object, flags: list[int]) -> ForgetfulFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        key = Path(path).name.replace(".new", "")  # the database is renamed when it is complete
        return ForgetfulFile(self._platters.setdefault(key, Platter()), self._moment, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self._platters.pop(Path(filename).name.replace(".new", ""), None)

    def write_after_power_loss(self, directory: Path, rng: random.Random) -> None:
        """The files as they may be found: what was synced, and of the rest some writes, one of them perhaps cut short."""
        with self._moment:
            found = [(name, bytearray(platter.safe), list(platter.loose)) for name, platter in self._platters.items()]
        for name, content, loose in found:
            for offset, data in loose:
                if rng.random() < 0.5:
                    cut = data if data is None or rng.random() < 0.7 else data[: rng.randrange(len(data))]
                    apply(content, offset, cut)
            if content and not name.endswith("-journal"):
                (directory / name).write_bytes(content)
