"""`embed.text`: sentence embeddings by a small transformer, through ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from hexrt.core import DeviceKind, TensorMeta
from hexrt.ops.spec import OpSpec, Part, Port, StepContext

if TYPE_CHECKING:
    import numpy as np

DIMENSION = 384


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")] = "minilm"
    normalize: bool = True  # to unit length, so that a dot product is the cosine
    max_tokens: Annotated[int, msgspec.Meta(ge=3, le=512)] = 256  # of one text; what is beyond is not looked at


def run(context: StepContext, params: Params, inputs: dict[str, Any]) -> np.ndarray:
    from hexrt.ops._embed import embed

    texts = inputs["texts"]
    return embed(
        context, params.model, [texts] if isinstance(texts, str) else texts, params.max_tokens, params.normalize
    )


OP = OpSpec(
    name="embed.text",
    doc="A vector for each text: float32 [texts, 384]. Texts of like meaning lie near each other.",
    parts=(Part("run", (DeviceKind.NPU, DeviceKind.POOL), "hexrt.ops.embed_text:run"),),
    params=Params,
    inputs={"texts": Port(list[str] | str, doc="a list of texts, or one text (then there is one row)")},
    output=TensorMeta("float32", (None, DIMENSION)),
)
