"""Where a step body finds a prepared model: a folder under the configured `models_dir`.

Owns the rule for model names, so that a name never leaves that folder. What the folders hold is written by `hexrt.cli.prepare`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from hexrt.errors import NotFound
from hexrt.ops.spec import StepContext

S = TypeVar("S", bound=msgspec.Struct)


def model_folder(context: StepContext, name: str) -> Path:
    """Raises NotFound where the model was never prepared here. `name` was checked by the op's parameters."""
    folder = Path(context.models_dir) / name
    if not (folder / "hexrt.json").is_file():
        raise NotFound(
            f"model {name!r} is not in the daemon's models_dir; prepare it with `python -m hexrt.cli.prepare --models-dir DIR`",
            f"{context.step}.params.model",
        )
    return folder


def read_card(context: StepContext, folder: Path, kind: type[S]) -> S:
    """The model's `hexrt.json`. Raises NotFound where it describes another kind of model."""
    try:
        return msgspec.json.decode((folder / "hexrt.json").read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise NotFound(
            f"model {folder.name!r} is not of the kind that this step takes: {error}", f"{context.step}.params.model"
        ) from None


class EmbedderCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text_embedder"):
    """`model.onnx`: int64 input_ids and attention_mask [1, tokens] to float32 `sentence` [1, dimension], pooled."""

    dimension: int
    max_tokens: int


class ClassifierCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image_classifier"):
    """`model.onnx`: float32 image [1, 3, side, side] to `embedding` [1, dimension] and `probabilities` [1, classes].

    A pixel p of 0..255 goes in as (p - mean) / scale; the shorter side is first scaled to side / crop.
    """

    dimension: int
    side: int
    crop: float
    mean: float
    scale: float
    labels: tuple[str, ...]


class OcrCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ocr"):
    """`detect.onnx`, `recognise.onnx` and `direction.onnx`."""
