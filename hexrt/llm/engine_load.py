"""Weights, shape and end tokens of a model, from its folder.

Owns nothing. Nothing is fetched and no code of a model is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hexrt.errors import Unavailable
from hexrt.llm.engine_attention import NAME, paged_attention
from hexrt.llm.steps import ModelShape, model_shape


def read_shape(name: str, folder: Path) -> ModelShape:
    try:
        return model_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Unavailable(
            f"the folder of the model {name!r} is missing or has no config.json", "params.model"
        ) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"the config.json of the model {name!r} cannot be read", "params.model") from error


def load_weights(name: str, folder: Path, dtype: str) -> Any:
    """The model, with our attention. Raises Unavailable where weights are missing or do not fit; nothing is fetched and no code is run."""
    from safetensors import SafetensorError
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging  # untyped
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    AttentionInterface.register(NAME, paged_attention)
    auto: Any = AutoModelForCausalLM  # its return type knows nothing of `output_loading_info`
    try:
        model, report = auto.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation=NAME, local_files_only=True,
            trust_remote_code=False, use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ImportError) as error:
        text = str(error).replace(str(folder), "its folder").splitlines()[0] if str(error) else type(error).__name__
        raise Unavailable(f"the model {name!r} cannot be loaded: {text}", "params.model") from error
    if lacking := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise Unavailable(
            f"the model {name!r} cannot be loaded: {len(lacking)} weights are missing or of another shape, "
            f"among them {lacking[0]!r}",
            "params.model",
        )
    return model.eval().requires_grad_(False)


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end an answer, as the model's generation config says, else its config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
