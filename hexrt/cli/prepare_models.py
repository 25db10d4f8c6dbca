"""Turns packaged weights into the ONNX models that the steps run.

Called by `hexrt.cli.prepare` alone. torch, transformers and onnx are needed here, and no longer when hexrt runs.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.errors import InvariantViolation

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 512
EMBEDDER_DIMENSION = 384
CLASSIFIER = {"dimension": 1280, "side": 224, "crop": 0.875, "mean": 127.0, "scale": 128.0}


def _export(
    model: torch.nn.Module, example: tuple[Any, ...], other: tuple[Any, ...], target: Path, **names: Any
) -> None:
    """Writes the graph of `model`. Raises InvariantViolation where ONNX Runtime gets something else out of `other` than torch does.

    The tensors of `example` must be distinct objects: of two names for one tensor the exporter keeps one.
    """
    import onnxruntime
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports each library that it could have used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), example, str(target), dynamo=True, external_data=False, verbose=False, **names)
    with torch.no_grad():
        expected = model(*other)
    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    found = session.run(
        None, {port.name: tensor.numpy() for port, tensor in zip(session.get_inputs(), other, strict=True)}
    )
    for name, want, got in zip(names["output_names"], expected, found, strict=True):
        if not torch.allclose(want, torch.from_numpy(got), rtol=1e-3, atol=1e-4):
            raise InvariantViolation(f"the exported graph computes another {name} than the model")


def export_embedder(source: Path, folder: Path) -> None:
    """A BERT encoder with the mean over its tokens as one graph: ids and mask [1, tokens] to `sentence` [1, dimension]."""
    import torch
    from transformers import AutoModel

    class Sentence(torch.nn.Module):
        def __init__(self, encoder: Any) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
            kinds = torch.zeros_like(input_ids)
            # Given as numbers to add to the scores: the encoder's own way from the mask to these uses operators that NPUs lack.
            # -10,000 fits in 16 bits, and its exponential is 0.
            barred = (1.0 - attention_mask.to(torch.float32))[:, None, None, :] * -10_000.0
            barred = barred.expand(-1, 1, input_ids.shape[1], -1)
            states = self.encoder(input_ids=input_ids, attention_mask=barred, token_type_ids=kinds).last_hidden_state
            kept = attention_mask.unsqueeze(-1).to(states.dtype)
            return ((states * kept).sum(1) / kept.sum(1).clamp(min=1e-9),)

    encoder = AutoModel.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    tokens = torch.export.Dim("tokens", min=2, max=MAX_TOKENS)
    ids = torch.arange(2_000, 2_000 + 37).unsqueeze(0)
    _export(
        Sentence(encoder),
        (torch.ones(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64)),
        (ids, (torch.arange(37) < 21).long().unsqueeze(0)),
        folder / "model.onnx",
        input_names=["input_ids", "attention_mask"],
        output_names=["sentence"],
        dynamic_shapes={"input_ids": {1: tokens}, "attention_mask": {1: tokens}},
    )
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    _card(folder, {"type": "text_embedder", "dimension": EMBEDDER_DIMENSION, "max_tokens": MAX_TOKENS})


def export_classifier(weights: Path, labels: list[str], folder: Path) -> None:
    """EfficientNet-Lite0 with two outputs: the pooled features and the probabilities of its classes."""
    import torch
    from efficientnet_lite_pytorch import EfficientNet

    class Picture(torch.nn.Module):
        def __init__(self, network: Any) -> None:
            super().__init__()
            self.network = network

        def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pooled = self.network.extract_features(image).mean((2, 3))
            return pooled, self.network._fc(pooled).softmax(-1)

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    side = int(CLASSIFIER["side"])
    _export(
        Picture(network),
        (torch.zeros(1, 3, side, side),),
        (torch.linspace(-1, 1, 3 * side * side).reshape(1, 3, side, side),),
        folder / "model.onnx",
        input_names=["image"],
        output_names=["embedding", "probabilities"],
    )
    _card(folder, {"type": "image_classifier", **CLASSIFIER, "labels": labels})


def _card(folder: Path, card: dict[str, Any]) -> None:
    (folder / "hexrt.json").write_text(json.dumps(card, ensure_ascii=False) + "\n", encoding="utf-8")
