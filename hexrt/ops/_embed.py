"""The work of `embed.text`: tokens in, one pooled vector out, a text at a time.

One text a run: no padding on the CPU, a vector that does not depend on its neighbours, and a cancel that takes hold between texts.
On a processor with static shapes a text is padded to the next length of `LENGTHS`; the mask keeps the padding out of the mean.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hexrt.errors import BadRequest
from hexrt.ops._models import EmbedderCard, model_folder, read_card
from hexrt.ops.spec import StepContext

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LENGTHS = (16, 32, 64, 128, 256, 512)
MAX_CHARACTERS_PER_TOKEN = 64
"""Of a text longer than this allows, only the beginning is tokenised: a page of blanks must not cost a second."""


@lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def embed(context: StepContext, model: str, texts: list[str], max_tokens: int, normalize: bool) -> np.ndarray:
    """float32 [texts, dimension]. Raises BadRequest for an empty list or more tokens than the model takes, NotFound for the model."""
    from hexrt.devices.onnx import execution, open_session

    if not texts:
        raise BadRequest("is an empty list: give at least one text", f"{context.step}.inputs.texts")
    folder = model_folder(context, model)
    card = read_card(context, folder, EmbedderCard)
    if max_tokens > card.max_tokens:
        raise BadRequest(
            f"{max_tokens} is more than the {card.max_tokens} tokens that {model!r} takes",
            f"{context.step}.params.max_tokens",
        )
    tokenizer = _tokenizer(folder)
    tokenizer.enable_truncation(max_tokens)
    here = execution()
    vectors = np.empty((len(texts), card.dimension), np.float32)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text[: max_tokens * MAX_CHARACTERS_PER_TOKEN]).ids
        length = next(n for n in LENGTHS if n >= len(ids)) if here.target.static_shapes else len(ids)
        tokens = np.zeros((1, length), np.int64)
        tokens[0, : len(ids)] = ids
        mask = np.zeros((1, length), np.int64)
        mask[0, : len(ids)] = 1
        session = open_session(folder / "model.onnx", (("tokens", length),) if here.target.static_shapes else ())
        vectors[row] = here.run(session, {"input_ids": tokens, "attention_mask": mask})[0][0]
    if normalize:
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors
