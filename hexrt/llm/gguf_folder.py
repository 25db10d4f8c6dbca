"""The folder that stands for a GGUF file: config.json, tokenizer.json and tokenizer_config.json, made once from its metadata.

Whoever needs it first makes it, under `state_dir/gguf`; its name says of which file, by name, size and time of change. It appears
whole or not at all, and older ones of the same file are removed. Holds no weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexrt.errors import BadRequest, HexrtError, Unavailable
from hexrt.llm.gguf_config import model_config
from hexrt.llm.gguf_header import GgufFault, Header, read_header
from hexrt.llm.gguf_tokeniser import write_tokeniser

FORMAT = 1
"""Of the folder; raised when what is written changes."""


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(".gguf")


def folder_of(path: Path, name: str, state_dir: Path) -> Path:
    """Where config and tokeniser of the model `name` at `path` lie: the folder itself, or the one that stands for a GGUF file.

    Raises Unavailable, naming the model, for a GGUF file that is missing, is none, or holds what is not known.
    """
    if not is_gguf(path):
        return path
    try:
        target = _place(path, state_dir)
        if not target.is_dir():
            _make(read_header(path), target)
    except FileNotFoundError:
        raise Unavailable(f"the file of the model {name!r} does not exist: its path is taken from daemon.models_dir", "params.model") from None  # fmt: skip
    except GgufFault as error:
        raise Unavailable(f"the file of the model {name!r} is no usable GGUF file: {error}", "params.model") from None
    except HexrtError as error:
        raise Unavailable(f"the model {name!r} cannot be loaded: {error.message}", "params.model") from None
    except OSError as error:
        raise Unavailable(f"the file of the model {name!r} cannot be used: {error.strerror}", "params.model") from None
    return target


def _place(path: Path, state_dir: Path) -> Path:
    real = os.path.realpath(path, strict=True)
    facts = os.stat(real)
    origin = hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()
    version = hashlib.blake2b(f"{FORMAT} {facts.st_size} {facts.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    return state_dir / "gguf" / f"{origin}-{version}"


def _make(header: Header, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        write_folder(header, work, "float32")
        for old in target.parent.glob(f"{target.name.partition('-')[0]}-*"):
            shutil.rmtree(old, ignore_errors=True)
        try:
            work.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_folder(header: Header, folder: Path, dtype: str) -> dict[str, Any]:
    """Config and tokeniser of a GGUF file; returns the config. Raises Unavailable and BadRequest as their makers do."""
    config = model_config(header.meta, {tensor.name for tensor in header.tensors}, dtype)
    for name in ("bos_token_id", "eos_token_id"):
        ids = config[name] if isinstance(config[name], list) else [config[name]]
        if any(token is not None and not 0 <= token < config["vocab_size"] for token in ids):
            raise BadRequest(f"the {name} {config[name]!r} is none of {config['vocab_size']} tokens", "source")
    write_tokeniser(header.meta, folder, config["max_position_embeddings"])
    write_json(folder / "config.json", config)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    write_json(folder / "generation_config.json", ends)
    return config


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
