"""The work of `image.encode`: a picture to the square that the model takes, a vector and labels out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from hexrt.ops._models import ClassifierCard, model_folder, read_card
from hexrt.ops._picture import open_picture
from hexrt.ops.spec import StepContext


def _square(picture: Image.Image, card: ClassifierCard) -> np.ndarray:
    """float32 [1, 3, side, side]: the middle of the picture, its shorter side scaled to side / crop."""
    # The part of the picture that remains is cut out first, so that a strip of 30,000 x 1 pixels is not blown up whole.
    shorter = min(picture.size)
    kept = shorter * card.crop
    left, top = (picture.width - kept) / 2, (picture.height - kept) / 2
    small = picture.resize((card.side, card.side), Image.Resampling.BICUBIC, (left, top, left + kept, top + kept))
    pixels = (np.asarray(small, np.float32) - card.mean) / card.scale
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def classify(
    context: StepContext, model: str, pictures: dict[str, bytes], top_k: int
) -> tuple[np.ndarray, list[list[dict[str, Any]]]]:
    """float32 [pictures, dimension], and for each picture its likeliest labels. `pictures` are keyed by the input they came in."""
    from hexrt.devices.onnx import execution, open_session

    folder = model_folder(context, model)
    card = read_card(context, folder, ClassifierCard)
    session = open_session(folder / "model.onnx")
    vectors = np.empty((len(pictures), card.dimension), np.float32)
    labels = []
    for row, (name, data) in enumerate(pictures.items()):
        picture = open_picture(data, f"{context.step}.inputs.{name}", wanted_side=2 * card.side)
        embedding, probabilities = execution().run(session, {"image": _square(picture, card)})
        vectors[row] = embedding[0]
        best = np.argsort(probabilities[0])[::-1][:top_k]
        labels.append([{"label": card.labels[i], "probability": float(probabilities[0][i])} for i in best])
    return vectors, labels
