"""Turns one GGUF file into a model folder: safetensors, config.json, tokenizer.json, tokenizer_config.json, generation_config.json.

`python -m hexrt.llm.convert SOURCE TARGET [--dtype float32]` (SOURCE may be `package:NAME`), or `convert_gguf`. A GGUF file is served as it is too;
the folder loads sooner. What is not known in the file is refused by name. The folder appears whole or not at all; `conversion.json` in it holds the digests of
the source and of every file, so that a second call with the same source only verifies them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hexrt.errors import BadRequest, HexrtError, NotFound
from hexrt.llm.gguf_folder import write_folder, write_json
from hexrt.llm.gguf_header import GgufFault, Header, read_header

FORMAT = 1
MANIFEST = "conversion.json"
DTYPES = ("float32", "bfloat16", "float16")


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_converted(target: Path, source_digest: str, dtype: str) -> bool:
    """Whether `target` was made from that source for that dtype and all its files are as they were written."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        if (manifest["format"], manifest["source"], manifest["dtype"]) != (FORMAT, source_digest, dtype):
            return False
        return all(file_digest(target / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert_gguf(source: Path, target: Path, dtype: str = "float32") -> bool:
    """Writes the model folder `target`; returns False where it was there already and verified.

    Raises NotFound for a missing source, BadRequest for a file that is no GGUF or lies about itself, Unavailable for a model or
    tokeniser that is not known here. Nothing is left at `target` then, or what was there before.
    """
    if dtype not in DTYPES:
        raise BadRequest(f"{dtype!r} is none of {', '.join(DTYPES)}", "dtype")
    if not source.is_file():
        raise NotFound(f"there is no file {source.name!r}", "source")
    digest = file_digest(source)
    if is_converted(target, digest, dtype):
        return False
    header = _header(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        config = write_folder(header, work, dtype)
        _write_weights(source, header, config, dtype, work / "model.safetensors")
        files = {path.name: file_digest(path) for path in sorted(work.iterdir())}
        manifest = {"format": FORMAT, "source": digest, "source_name": source.name, "dtype": dtype, "files": files}
        write_json(work / MANIFEST, manifest)
        _settle(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _header(source: Path) -> Header:
    try:
        return read_header(source)
    except GgufFault as error:
        raise BadRequest(f"{source.name!r} is not a readable GGUF file: {error}", "source") from error


def _settle(work: Path, target: Path) -> None:
    """Puts the finished folder in its place, durably; an older one is set aside first and then removed."""
    for path in [*work.iterdir(), work]:
        path.chmod(0o755 if path is work else 0o644)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if target.exists():
        old = work.with_name(work.name + ".old")
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old)
    else:
        work.rename(target)


def _write_weights(source: Path, header: Header, config: dict[str, Any], dtype: str, target: Path) -> None:
    from safetensors.torch import save_file

    from hexrt.llm.gguf_weights import state_dict, weight_names

    names = weight_names(config)
    weights = state_dict(source, header, config, names, dtype)
    if missing := names.keys() - weights.keys():
        raise BadRequest(f"{len(missing)} tensors are missing, among them {min(missing)!r}", "source")
    for name, values in weights.items():
        if values.shape != names[name]:
            raise BadRequest(f"the tensor {name!r} is {list(values.shape)}, not {list(names[name])}", "source")
    save_file(weights, str(target), metadata={"format": "pt"})


def packaged(name: str) -> Path:
    """The one GGUF file inside the installed package `name`, which is not imported. Raises NotFound."""
    spec = importlib.util.find_spec(name)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("**/*.gguf"))]
    if len(found) != 1:
        raise NotFound(f"the package {name!r} is not installed or holds {len(found)} GGUF files, not one", "source")
    return found[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("hexrt.llm.convert", description="Turn a GGUF file into a model folder.")
    parser.add_argument("source", help="a GGUF file, or package:NAME for the one inside an installed package")
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    given = parser.parse_args(arguments)
    try:
        kind, _, name = given.source.partition(":")
        source = packaged(name) if kind == "package" else Path(given.source)
        made = convert_gguf(source, given.target, given.dtype)
    except HexrtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given.target}: {'converted' if made else 'already there, verified'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
