"""The work of `image.text`: text detection and recognition by the RapidOCR models."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hexrt.errors import Unavailable
from hexrt.ops._models import OcrCard, model_folder, read_card
from hexrt.ops._picture import open_picture
from hexrt.ops.spec import StepContext


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
        intra_op_num_threads=1,
        inter_op_num_threads=1,
    )


def read_text(context: StepContext, model: str, data: bytes, min_score: float) -> list[dict[str, Any]]:
    """The lines from top to bottom: `text`, `score` and `box`, four corners (x, y) in pixels of the upright picture."""
    folder = model_folder(context, model)
    read_card(context, folder, OcrCard)
    picture = open_picture(data, f"{context.step}.inputs.image")
    found, _ = _engine(folder)(np.asarray(picture)[:, :, ::-1])
    return [
        {"text": text, "score": float(score), "box": [[float(x), float(y)] for x, y in box]}
        for box, text, score in found or ()
        if float(score) >= min_score
    ]
