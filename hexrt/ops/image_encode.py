"""`image.encode`: what a picture shows, as a vector and as labels. `image.text`: the words that can be read in it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hexrt.core import DeviceKind, TensorMeta
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec, Part, Port, StepContext

ModelName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]
DIMENSION = 1280


class EncodeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelName = "efficientnet-lite0"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=100)] = 5  # labels of each picture


class TextParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelName = "rapidocr"
    min_score: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5  # of a line; less sure ones are left out


def encode(context: StepContext, params: EncodeParams, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._classify import classify

    one, several = inputs.get("image"), inputs.get("images")
    if (one is None) == (several is None):
        raise BadRequest("give either image or images", f"{context.step}.inputs")
    if one is not None:
        vectors, labels = classify(context, params.model, {"image": one}, params.top_k)
        return {"embedding": vectors[0], "labels": labels[0], "label": labels[0][0]["label"]}
    if not several:
        raise BadRequest("is an empty list: give at least one picture", f"{context.step}.inputs.images")
    vectors, labels = classify(
        context, params.model, {f"images.{i}": data for i, data in enumerate(several)}, params.top_k
    )
    return {"embeddings": vectors, "labels": labels}


def text(context: StepContext, params: TextParams, inputs: dict[str, Any]) -> dict[str, Any]:
    from hexrt.ops._ocr import read_text

    lines = read_text(context, params.model, inputs["image"], params.min_score)
    return {"text": "\n".join(line["text"] for line in lines), "lines": lines}


PICTURE = "the bytes of a PNG, JPEG, WebP, GIF or BMP file (of an animation, the first frame)"

OPS = (
    OpSpec(
        name="image.encode",
        doc="A vector (float32 [1280]) and the likeliest of 1,000 labels of a picture, or of each of several.",
        parts=(Part("run", (DeviceKind.NPU, DeviceKind.POOL), "hexrt.ops.image_encode:encode"),),
        params=EncodeParams,
        inputs={
            "image": Port(bytes | None, required=False, doc=PICTURE),
            "images": Port(list[bytes] | None, required=False, doc="a list of such"),
        },
        outputs={
            "embedding": TensorMeta("float32", (DIMENSION,)),
            "embeddings": TensorMeta("float32", (None, DIMENSION)),
        },
    ),
    OpSpec(
        name="image.text",
        doc="The lines of text in a picture, each with its place (four corners in pixels) and score.",
        parts=(Part("run", (DeviceKind.POOL,), "hexrt.ops.image_encode:text"),),
        params=TextParams,
        inputs={"image": Port(bytes, doc=PICTURE)},
    ),
)
