"""`llm.generate`, `llm.prefill`, `llm.decode`: text from a language model.

The tokens are made on the pool (`hexrt.llm.tokenise`), the rest by the LLM engine of a device. Parameters and inputs are checked here as
far as one field goes; what needs the model (its context, its template) is checked where the tokens are made.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from hexrt.core import DeviceKind
from hexrt.errors import BadRequest
from hexrt.ops.spec import OpSpec, Part, Port

ENGINES = (DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.ENDPOINT)
MAX_CHARACTERS = 8 << 20
MAX_SCHEMA_BYTES = 1 << 18
BYTES_PER_TOKEN = 4  # roughly, of English text

ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]


class PrefillParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model`: a name of the config's [models]; "default" is the first of them.

    `raw`: the prompt is taken as it is, without the chat template. `numerics`: "exact" asks for a float32 model, "fast" takes any.
    """

    model: ModelName = "default"
    raw: bool = False
    numerics: Literal["exact", "fast"] = "fast"


class DecodeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling. An answer ends at the model's end-of-text token, a stop string, `max_tokens`, or where the context is full.

    `temperature` 0 is greedy. The same `seed` gives the same answer, whatever runs beside it; without one, each task draws by a seed of its own,
    which stays the same over its attempts and restarts.
    """

    model: ModelName = "default"
    numerics: Literal["exact", "fast"] = "fast"
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # 0: off
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # 1: off
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None  # None: each task of each run draws its own
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=16)] = ()
    ignore_eos: bool = False
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0  # of the likeliest token's probability; 0: off
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0  # over prompt and answer; 1: off
    stop_tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] = ()
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = (
        None  # of each answer token, and so many of the likeliest beside it
    )
    json_schema: dict[str, Any] | None = None  # the answer is JSON that matches it
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)] | None = (
        None  # the answer matches it from its first character to its last
    )


class GenerateParams(DecodeParams, frozen=True, forbid_unknown_fields=True):
    """As for `llm.decode`, and `raw`: the prompt is taken as it is, without the chat template."""

    raw: bool = False


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text


class SaidMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`role` raw: the whole text of a conversation without a chat template."""

    role: Literal["system", "user", "assistant", "tool", "raw"]
    content: Text


class Continued(msgspec.Struct, frozen=True):
    """The output of an earlier LLM step, as far as a later one reads it: its ids, or where a server answered, which gives none, its messages."""

    ids: tuple[TokenId, ...] = ()
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    messages: Annotated[tuple[SaidMessage, ...], msgspec.Meta(max_length=10_001)] = ()

    def __post_init__(self) -> None:
        if not self.ids and not self.messages:
            raise ValueError("it holds neither `ids` nor `messages`: give the whole output of an LLM step")


def check(params: Any) -> None:
    """Refuses numbers that are none; msgspec refuses them by range where the schema is applied, this holds for records built in Python."""
    for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if not math.isfinite(getattr(params, field, 0.0)):
            raise BadRequest("must be a finite number", field)
    if params.json_schema is not None and params.regex is not None:
        raise BadRequest("give either json_schema or regex", "regex")
    if params.json_schema is not None and (size := len(msgspec.json.encode(params.json_schema))) > MAX_SCHEMA_BYTES:
        raise BadRequest(f"its {size} bytes of JSON are more than the {MAX_SCHEMA_BYTES} that are taken", "json_schema")


def prefill_work(params: Any, input_bytes: int) -> int:
    return 1 + input_bytes // BYTES_PER_TOKEN


def decode_work(params: Any, input_bytes: int) -> int:
    """Tokens, prompt and answer."""
    return 1 + input_bytes // BYTES_PER_TOKEN + int(params.max_tokens)


PROMPT_INPUTS = {
    "prompt": Port(Text, required=False, doc="what the user says; this or `messages`"),
    "messages": Port(
        Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=10_000)],
        required=False,
        doc="the conversation as {role, content}, instead of `prompt`",
    ),
    "system": Port(Text, required=False, doc="the system message before `prompt`"),
    "continue_from": Port(
        Continued,
        required=False,
        doc="the output of an llm.generate or llm.decode step: its ids are appended to, not encoded again",
    ),
}
TOKENISE = Part("tokenise", (DeviceKind.POOL,), "hexrt.llm.tokenise:run")
PREFILL = Part("prefill", ENGINES, None)
DECODE = Part("decode", ENGINES, None)

OPS = (
    OpSpec(
        name="llm.generate",
        doc="An answer to a prompt: {text, ids, prompt_tokens, answer_tokens, finish}; `ids` are prompt and answer, `finish` is stop or length.",
        parts=(TOKENISE, PREFILL, DECODE),
        params=GenerateParams,
        inputs=PROMPT_INPUTS,
        work=decode_work,
        check=check,
    ),
    OpSpec(
        name="llm.prefill",
        doc="Reads a prompt into the KV cache, for one or more llm.decode steps: {ids, prompt_tokens}.",
        parts=(TOKENISE, PREFILL),
        params=PrefillParams,
        inputs=PROMPT_INPUTS,
        work=prefill_work,
    ),
    OpSpec(
        name="llm.decode",
        doc="An answer to a prompt that llm.prefill has read; the output is that of llm.generate.",
        parts=(DECODE,),
        params=DecodeParams,
        inputs={"prefix": Port(Continued, doc="the whole output of an llm.prefill step")},
        work=decode_work,
        check=check,
    ),
)
