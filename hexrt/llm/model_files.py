"""The files of a model on disk: which there are, what they say of its shape and size, and whether they are still the same.

Reads config.json and the beginning of GGUF files, never weights, and imports nothing that a daemon may not hold. A path is a folder with
safetensors, or one .gguf file.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hexrt.errors import Unavailable
from hexrt.llm.gguf_config import model_config
from hexrt.llm.gguf_folder import is_gguf
from hexrt.llm.gguf_header import read_shape_meta
from hexrt.llm.steps import DTYPE_BYTES

T = TypeVar("T")
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PACKED_BYTES = {"int8": 1.06, "int4": 0.65}
"""Of a parameter, its scales included."""
MAX_JSON_BYTES = 64 << 20


def find_models(models_dir: Path) -> dict[str, Path]:
    """Every model of the folder by its name: folders that hold weights and a tokeniser, and GGUF files, of which no folder has the name."""
    try:
        entries = sorted(models_dir.iterdir())
    except OSError:
        return {}
    folders = {e.name: e for e in entries if (e / "tokenizer.json").is_file() and any((e / w).is_file() for w in (WHOLE, INDEX))}  # fmt: skip
    files = {entry.stem: entry for entry in entries if is_gguf(entry) and entry.is_file()}
    return dict(sorted((files | folders).items()))


def read_config(path: Path) -> dict[str, Any]:
    """config.json, or what the GGUF file says instead. Raises OSError, ValueError (msgspec's and GgufFault are such) or HexrtError."""
    if is_gguf(path):
        return model_config(read_shape_meta(path), (), "float32")
    return read_table(path / "config.json")


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object of a model's folder. Raises OSError or ValueError."""
    return _decoded(path, dict[str, Any])


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


def read_file(path: Path) -> bytes:
    """Of a model's folder, what may be taken into memory at once. Raises OSError or ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        raise ValueError(f"{path.name} is no file")
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_JSON_BYTES} bytes")
    return data


def weight_files(path: Path) -> list[Path]:
    """By name. Raises OSError or ValueError, and Unavailable where an index names a file that is not there or lies elsewhere."""
    if is_gguf(path):
        return [path]
    index = path / INDEX
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    shards = _decoded(index, _Index).weight_map.values()
    files = sorted({path / shard for shard in shards})
    for file in files:
        if file.parent != path:
            raise Unavailable(f"its index names a file outside of its folder: {file.name!r}")
        if not file.is_file():
            raise Unavailable(f"the file {file.name!r} is missing, which its index names")
    return files


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def about_weight_bytes(path: Path, config: Mapping[str, Any], dtype: str, weights: str) -> int:
    """About what the weights take in memory: by the sizes of the files, or for a GGUF file, which is packed, by the model's shape."""
    if is_gguf(path):
        parameters = about_parameters(config)
    else:
        stored = config.get("dtype") or config.get("torch_dtype")
        parameters = sum(file.stat().st_size for file in weight_files(path)) // DTYPE_BYTES.get(str(stored), 2)
    return int(parameters * PACKED_BYTES.get(weights, DTYPE_BYTES[dtype]))


def about_parameters(config: Mapping[str, Any]) -> int:
    """Of a dense decoder with gated layers, norms and biases left out; 0 where the config does not say what that takes."""
    text = config.get("text_config")
    source = text if isinstance(text, dict) else config
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    numbers = [number for name in names if isinstance(number := source.get(name), int) and number > 0]
    if len(numbers) < len(names):
        return 0
    width, heads, layers, inner, vocabulary = numbers
    head = source.get("head_dim") or width // heads
    attention = 2 * width * head * (heads + (source.get("num_key_value_heads") or heads))
    return int(layers * (attention + 3 * width * inner) + vocabulary * width)


def check_size(config: Mapping[str, Any], most: int) -> None:
    """Raises Unavailable where a config speaks of far more than the `most` numbers that the files can hold, before anything is taken for them."""
    claimed = about_parameters(config)
    if claimed > 2 * most:
        raise Unavailable(f"its config speaks of about {claimed} weights, and its files hold at most {most}")


def model_digest(path: Path, *settings: str) -> str:
    """Of the config and the names, sizes and times of the weights, and of how they are used. Raises as `weight_files`."""
    digest = hashlib.blake2b(digest_size=16)
    if not is_gguf(path):
        digest.update(read_file(path / "config.json"))
    for file in weight_files(path):
        facts = file.stat()
        digest.update(f"\0{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    digest.update("\0".join(("", *settings)).encode())
    return digest.hexdigest()
