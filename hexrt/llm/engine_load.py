"""Weights, shape and end tokens of a model, from its folder or its GGUF file, and what is said of them.

Owns nothing. Nothing is fetched, no code of a model is run and no pickle is read. Whatever keeps a model from being loaded is Unavailable,
named by the model, without a path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from hexrt.brain.models import LoadedModel
from hexrt.errors import HexrtError, Unavailable
from hexrt.kernels.quantised import memory_bytes
from hexrt.llm.engine_attention import NAME, paged_attention
from hexrt.llm.gguf_config import model_config
from hexrt.llm.gguf_folder import is_gguf
from hexrt.llm.gguf_header import GgufFault, Header, read_header
from hexrt.llm.gguf_weights import state_dict, weight_names
from hexrt.llm.model_files import check_size, model_digest, read_config, weight_files
from hexrt.llm.steps import ModelShape, model_shape

if TYPE_CHECKING:
    from hexrt.llm.engine_model import PagedModel

MOST_WORDS = 400
"""Characters of a library's error that are told."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


UNUSABLE = (
    OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, AssertionError, RuntimeError, ImportError,
    MemoryError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What the libraries raise for files that are broken, or that say what no model is made of."""


def read_shape(name: str, path: Path) -> ModelShape:
    try:
        return model_shape(read_config(path))
    except FileNotFoundError:
        what = "file" if is_gguf(path) else "folder"
        missing = f"the {what} of the model {name!r} is missing" + ("" if is_gguf(path) else " or has no config.json")
        raise Unavailable(missing, "params.model") from None
    except GgufFault as error:
        raise Unavailable(f"the file of the model {name!r} is no usable GGUF file: {error}", "params.model") from None
    except HexrtError as error:
        raise Unavailable(f"the model {name!r} cannot be loaded: {error.message}", "params.model") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"the config.json of the model {name!r} cannot be read", "params.model") from error


def load_weights(name: str, path: Path, dtype: str) -> Any:
    """The model, with our attention. Raises Unavailable where weights are missing or do not fit, or the model is of a kind that is not served."""
    from transformers import AttentionInterface
    from transformers.utils import logging

    quiet: Any = logging  # untyped
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    AttentionInterface.register(NAME, paged_attention)
    try:
        if is_gguf(path):
            model, report = _of_gguf(path, dtype)
        else:
            model, report = _of_folder(path, dtype)
    except HexrtError as error:
        raise Unavailable(f"the model {name!r} cannot be loaded: {error.message}", "params.model") from None
    except UNUSABLE as error:
        text = _in_words(error).replace(str(path), "its folder")
        raise Unavailable(f"the model {name!r} cannot be loaded: {text}", "params.model") from error
    if lacking := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise Unavailable(
            f"the model {name!r} cannot be loaded: {len(lacking)} weights are missing or of another shape, "
            f"among them {lacking[0]!r}",
            "params.model",
        )
    model.hexrt_parameters = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())  # before any is packed
    return model.eval().requires_grad_(False)


def _in_words(error: Exception) -> str:
    """What a library's error says, on one line. A value that it looked up in a table of its own is all that a KeyError says."""
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"its config has a value that transformers does not know: {error.args[0]!r}"[:MOST_WORDS]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # Errors of a field say which in their first line, and the reason in the next.
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:MOST_WORDS]


def _of_folder(path: Path, dtype: str) -> tuple[Any, Mapping[str, Any]]:
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    _check_kind(path, config)
    auto: Any = AutoModelForCausalLM  # its return type knows nothing of `output_loading_info`
    model, report = auto.from_pretrained(
        str(path), dtype=getattr(torch, dtype), attn_implementation=NAME, local_files_only=True,
        trust_remote_code=False, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    return model, report


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    """Raises Unavailable for what transformers would load, but is not served here or not safe to."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise Unavailable(f"it is an encoder-decoder ({kind}), and only decoders are served")
    if kind not in CONFIG_MAPPING:
        own = (
            "needs code of its own, which is not run" if "auto_map" in config else "is not one that transformers knows"
        )
        raise Unavailable(f"its architecture {kind!r} {own}")
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise Unavailable(
            f"its weights are quantised by {method!r}, which is not read: take the model as it was before"
        )
    if (path / "adapter_config.json").exists():
        raise Unavailable("it is an adapter (adapter_config.json), not a model: merge it into its model")
    files = weight_files(path)
    if not files:
        pickled = [file.name for pattern in PICKLES for file in path.glob(pattern)]
        if pickled:
            raise Unavailable(
                f"its weights are pickled ({min(pickled)}), which is never read: convert them to safetensors"
            )
        raise Unavailable("its folder holds no safetensors")
    check_size(config, sum(file.stat().st_size for file in files))


def _of_gguf(path: Path, dtype: str) -> tuple[Any, Mapping[str, Any]]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    header = _header(path)
    settings = model_config(header.meta, {tensor.name for tensor in header.tensors}, dtype)
    check_size(settings, sum(prod(tensor.shape) for tensor in header.tensors))
    weights = state_dict(path, header, settings, weight_names(settings), dtype)
    known: Any = AutoConfig
    config = known.for_model(**settings)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=getattr(torch, dtype), attn_implementation=NAME,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    return model, report


def _header(path: Path) -> Header:
    try:
        return read_header(path)
    except GgufFault as error:
        raise Unavailable(f"its file is no usable GGUF file: {error}") from None


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end an answer, as the model's generation config says, else its config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, what several share (tied, or parts of one) counted once."""
    return memory_bytes(module)


def about(model: PagedModel, path: Path, threads: int) -> LoadedModel:
    """What the daemon and people want to know of a model that was loaded from `path`."""
    module = model.module
    parameters = getattr(module, "hexrt_parameters", 0)
    facts: dict[str, Any] = {
        "architecture": type(module).__name__,
        "parameters": parameters,
        "dtype": model.dtype,
        "weights": model.weights,
        "kv_dtype": model.kv_dtype,
        "attention": model.attend.name,
        "levers": model.levers,
        "threads": threads,
        "layers": model.shape.layers,
        "vocabulary": model.shape.vocabulary,
        "eos": sorted(model.eos),
    }
    if model.attend_why:
        facts["attention_why"] = model.attend_why
    if model.draw.why:
        facts["sampling_why"] = model.draw.why
    try:
        digest = model_digest(path, model.dtype, model.weights, model.kv_dtype)
    except (OSError, ValueError) as error:
        raise Unavailable(f"the files of the model {model.name!r} are gone or were changed", "params.model") from error
    return LoadedModel(model.page_bytes, model.shape.context_tokens, weight_bytes(module), digest, facts)
