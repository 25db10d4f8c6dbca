"""Between LLM steps and sequences: which model is meant, its shape, the request that a step makes, and the outputs of its parts.

Used by the daemon and by the tokenise body. Opens no file. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from hexrt.core import TokenLogprob
from hexrt.errors import BadRequest, InvariantViolation, NotFound, Unavailable
from hexrt.llm.outcome import Ended
from hexrt.llm.sequence import SequenceRequest
from hexrt.protocol.host import Grammar, Sampling

DEFAULT = "default"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Tokenised(msgspec.Struct, frozen=True):
    """The output of tokenise and of prefill, and the beginning of a decode step's."""

    ids: tuple[int, ...]
    prompt_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """The output of `llm.generate` and `llm.decode`. `ids` are the prompt's and the answer's, the end-of-text token among them."""

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    finish: str
    logprobs: tuple[TokenLogprob, ...] | msgspec.UnsetType = (
        msgspec.UNSET
    )  # of each answer token, where they were asked for
    messages: tuple[dict[str, str], ...] | msgspec.UnsetType = (
        msgspec.UNSET
    )  # the conversation with the answer, of an endpoint's, which gives no ids


class ModelShape(msgspec.Struct, frozen=True):
    """What a model's config.json says about its pages and its context."""

    layers: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    vocabulary: int

    def page_bytes(self, dtype: str, page_tokens: int) -> int:
        """Bytes of one page: K and V of all layers."""
        return self.layers * 2 * page_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


_tokenised = msgspec.msgpack.Decoder(Tokenised)
_encoder = msgspec.msgpack.Encoder()


def resolve_model(name: str, configured: Iterable[str]) -> str:
    """The configured model that `name` means; "default" is the first one, where none is called so. Raises NotFound."""
    names = list(configured)
    if name in names:
        return name
    if not names:
        raise NotFound(
            f"there is no model {name!r}: the config's [models] names none, and daemon.models_dir holds none;"
            " `make setup` prepares some in .models",
            "params.model",
        )
    if name == DEFAULT:
        return names[0]
    raise NotFound(f"there is no model {name!r}; configured are: {', '.join(sorted(names))}", "params.model")


def check_numerics(numerics: str, model: str, is_exact: bool) -> None:
    """Raises Unavailable where exact numerics are asked of a model whose dtype, weights, KV pages or server cannot keep them."""
    if numerics == "exact" and not is_exact:
        raise Unavailable(
            f"exact numerics need a model of float32 in weights and pages, and {model!r} is configured otherwise: ask for "
            "fast, or another model",
            "params.numerics",
        )


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """From the parsed config.json. Raises Unavailable naming the field that is missing or makes no sense."""
    text = config.get("text_config")
    source: Mapping[str, Any] = text if isinstance(text, dict) else config

    def number(field: str, otherwise: int | None = None) -> int:
        value = source.get(field)
        value = otherwise if value is None else value
        if not isinstance(value, int) or value < 1:
            raise Unavailable(f"the model's config.json has no usable {field!r}", "params.model")
        return value

    heads = number("num_attention_heads")
    head_dim = number("head_dim", number("hidden_size", 1) // heads)
    return ModelShape(
        number("num_hidden_layers"), number("num_key_value_heads", heads), head_dim, number("max_position_embeddings"),
        number("vocab_size"),
    )  # fmt: skip


def check_room(model: str, prompt_tokens: int, context_tokens: int) -> None:
    """Raises BadRequest where a prompt leaves no place for even one answer token."""
    if prompt_tokens >= context_tokens:
        raise BadRequest(
            f"the prompt has {prompt_tokens} tokens, and the context of {model!r} holds {context_tokens} with the answer: "
            f"shorten it to at most {context_tokens - 1}",
            "inputs.prompt",
        )


def request_of(
    op: str,
    params: Any,
    tokenised: bytes | msgspec.Raw | None,
    answered: tuple[int, ...],
    key: Hashable,
    parent: Hashable | None,
    retain: bool,
    priority: int,
    answered_text: str = "",
) -> SequenceRequest:
    """The sequence of an LLM step.

    `tokenised` is the output of its tokenise part, or for `llm.decode` the whole output of the llm.prefill step that `prefix` names;
    `answered` and `answered_text` are what its Emitted facts hold from before a restart; `parent` is the key of the step continued from.
    Raises BadRequest.
    """
    try:
        given = _tokenised.decode(tokenised) if tokenised is not None else None
    except msgspec.MsgspecError:
        given = None
    if given is None or not given.ids:
        raise BadRequest("give it the whole output of an llm.prefill step by $ref", "inputs.prefix")
    sampling = None if op == "llm.prefill" else sampling_of(params, key)
    return SequenceRequest(key, given.ids, sampling, answered, parent, retain, priority, answered_text)


def sampling_of(params: Any, key: Hashable) -> Sampling:
    """`key`: of the sequence, which gives the seed where none was asked for."""
    seed = own_seed(key) if params.seed is None else params.seed
    return Sampling(
        params.temperature, params.top_k, params.top_p, seed, params.stop, params.max_tokens, params.ignore_eos,
        params.min_p, params.repetition_penalty, params.stop_tokens,
        -1 if params.logprobs is None else params.logprobs, grammar_of(params),
    )  # fmt: skip


def own_seed(key: Hashable) -> int:
    """Another one for each sequence, and the same after a restart."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def grammar_of(params: Any) -> Grammar | None:
    if params.json_schema is not None:
        return Grammar("json_schema", msgspec.json.encode(params.json_schema).decode())
    return Grammar("regex", params.regex) if params.regex is not None else None


def output_of_prefill(request: SequenceRequest) -> bytes:
    """The encoded output of a prefill part."""
    return _encoder.encode(Tokenised(request.ids, len(request.ids)))


def output_of_decode(request: SequenceRequest, ended: Ended) -> bytes:
    """The encoded output of a decode part."""
    if request.key != ended.key:
        raise InvariantViolation(f"the end of {ended.key!r} for the request of {request.key!r}")
    prompt = len(request.ids)
    logprobs = ended.logprobs or msgspec.UNSET
    return _encoder.encode(Answer(ended.text, request.ids + ended.ids, prompt, len(ended.ids), ended.finish, logprobs))
