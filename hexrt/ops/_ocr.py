"""The work of `image.text`: text detection and recognition by the RapidOCR models."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hexrt.errors import Unavailable
from hexrt.ops._models import OcrCard, model_folder, read_card
from hexrt.ops._picture import open_picture
from hexrt.ops.spec import StepContext

MAX_SIDE = 1_600
MIN_SIDE = 8


@lru_cache(maxsize=2)
def _engine(folder: Path) -> Any:
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise Unavailable(f"image.text needs the package rapidocr-onnxruntime and its requirements: {error}") from error
    logging.getLogger("RapidOCR").setLevel(logging.ERROR)
    return RapidOCR(
        det_model_path=str(folder / "detect.onnx"),
        rec_model_path=str(folder / "recognise.onnx"),
        cls_model_path=str(folder / "direction.onnx"),
        det_limit_type="max",  # else a thin strip is blown up until its shorter side has 736 pixels
        intra_op_num_threads=1,
        inter_op_num_threads=1,
    )


def _scale(width: int, height: int) -> float:
    """What a picture's sides are multiplied with: small print is doubled, and no side is longer than `MAX_SIDE`."""
    longer = max(width, height)
    return 2.0 if 2 * longer <= MAX_SIDE else min(1.0, MAX_SIDE / longer)


def read_text(context: StepContext, model: str, data: bytes, min_score: float) -> list[dict[str, Any]]:
    """The lines from top to bottom: `text`, `score` and `box`, four corners (x, y) in pixels of the upright picture."""
    folder = model_folder(context, model)
    read_card(context, folder, OcrCard)
    picture = open_picture(data, f"{context.step}.inputs.image")
    scale = _scale(*picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    if min(width, height) < MIN_SIDE:
        return []  # no letter has room in such a strip, and the detector fails on it
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    found, _ = _engine(folder)(pixels[:, :, ::-1])
    return [
        {"text": text, "score": float(score), "box": [[float(x) / scale, float(y) / scale] for x, y in box]}
        for box, text, score in found or ()
        if float(score) >= min_score
    ]
