"""OpenAI's protocol as the common servers speak it: request bodies, the pieces of a streamed answer, and what a refusal says.

Owns the table of what each server calls the parameters that OpenAI's own protocol does not have. What a server is not known to take is
refused here by name: many ignore a field that they do not know, and an answer would silently not be the one that was asked for. Pure.
"""

from __future__ import annotations

import enum
import json
from typing import Any

import msgspec

from hexrt.core import TokenLogprob
from hexrt.errors import BadRequest, HexrtError, TaskFailed, Unavailable
from hexrt.llm.endpoint import Ask
from hexrt.protocol.host import Sampling

MAX_WORDS = 500
"""Characters of a server's own words in an error."""
AUTO_SEED = 0xFFFF_FFFF
"""What llama-server takes for "draw me one"."""
PENALTY_WINDOW = 32_768
"""Tokens that llama-server's repetition penalty looks back on, where its context is not known: it sets aside that much."""
TOKEN_ID = "token_id:"
STOPS = {"stop": "stop", "length": "length", "eos_token": "stop", "stop_sequence": "stop"}
NOT_OURS = {
    "content_filter": "withheld the answer by its content filter",
    "tool_calls": "answered by calling a tool, and was given none",
    "function_call": "answered by calling a function, and was given none",
}


class Dialect(enum.StrEnum):
    VLLM = "vLLM"
    SGLANG = "SGLang"
    LLAMA = "llama-server"
    TGI = "TGI"
    OTHER = "OpenAI-compatible"


OWNERS = {"vllm": Dialect.VLLM, "sglang": Dialect.SGLANG, "llamacpp": Dialect.LLAMA}
CONTINUES = (Dialect.VLLM, Dialect.SGLANG, Dialect.LLAMA)
"""Who goes on from an answer that has begun."""


class Served(msgspec.Struct, frozen=True):
    """Who answers, and for which model."""

    model: str
    dialect: Dialect = Dialect.OTHER
    context_tokens: int = 0  # 0: it does not say


# --- what a server offers ---------------------------------------------------------------------------------------


class _Meta(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...] = ()


_models = msgspec.json.Decoder(_Models)


def served_by(body: bytes, wanted: str) -> tuple[Served, tuple[str, ...]]:
    """Who answers, by its list of models, and what else it offers; `wanted` is what the config calls the model, "" the first. Raises Unavailable."""
    try:
        offered = _models.decode(body).data
    except (msgspec.MsgspecError, RecursionError):
        raise Unavailable("its list of models is not what OpenAI's protocol has there") from None
    found = next((model for model in offered if not wanted or model.id == wanted), None)
    if found is None and not wanted:
        raise Unavailable("it offers no model")
    any_model = found or next(iter(offered), None)
    dialect = OWNERS.get((any_model.owned_by or "").lower(), Dialect.OTHER) if any_model else Dialect.OTHER
    context = (found.max_model_len or (found.meta.n_ctx if found.meta else 0) or 0) if found else 0
    return Served(wanted or found.id if found else wanted, dialect, context), tuple(model.id for model in offered)


# --- what it is asked -------------------------------------------------------------------------------------------


def path_of(ask: Ask) -> str:
    return "completions" if ask.is_raw else "chat/completions"


def body_of(ask: Ask, served: Served) -> dict[str, Any]:
    """The request. Raises Unavailable, naming the parameter, for what this server is not known to take."""
    sampling, dialect = ask.sampling, served.dialect
    body: dict[str, Any] = {
        "model": served.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max(1, sampling.max_tokens - ask.tokens),
        "temperature": sampling.temperature,
        **_prompt(ask, dialect),
        **_cuts(sampling, served),
        **_ends(sampling, dialect),
        **_grammar(ask, dialect),
        **_logprobs(ask, dialect),
    }
    if sampling.temperature:
        body["seed"] = sampling.seed % AUTO_SEED if dialect is Dialect.LLAMA else sampling.seed
    return body


def _refuse(dialect: Dialect, what: str, field: str) -> Unavailable:
    return Unavailable(f"it is not known how {dialect} servers take {what}: leave it out, or ask another model", f"params.{field}")  # fmt: skip


def _prompt(ask: Ask, dialect: Dialect) -> dict[str, Any]:
    if ask.text and ask.sampling.grammar is not None:
        raise Unavailable(
            "the answer broke off, and no server goes on in the middle of one that must match a schema or expression: "
            "run the step again", f"params.{ask.sampling.grammar.kind}",
        )  # fmt: skip
    if ask.is_raw:
        return {"prompt": ask.messages[0]["content"] + ask.text}
    if not ask.text:
        return {"messages": ask.messages}
    if dialect not in CONTINUES:
        raise Unavailable(f"the answer broke off, and {dialect} servers are not known to go on from one: run the step again")  # fmt: skip
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*ask.messages, {"role": "assistant", "content": ask.text}]
    return {"messages": messages} if dialect is Dialect.LLAMA else {"messages": messages, **going_on}


def _cuts(sampling: Sampling, served: Served) -> dict[str, Any]:
    """Said in full where a server has defaults of its own, or takes them from the model."""
    dialect = served.dialect
    if dialect in (Dialect.VLLM, Dialect.SGLANG):
        return {
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        }
    if dialect is Dialect.LLAMA:
        cuts: dict[str, Any] = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        if sampling.temperature:  # in our order: it cuts before it heats otherwise
            cuts["samplers"] = ["penalties", "temperature", "top_k", "top_p", "min_p"]
        cuts["repeat_penalty"] = sampling.repetition_penalty
        cuts["repeat_last_n"] = 0 if sampling.repetition_penalty == 1.0 else served.context_tokens or PENALTY_WINDOW
        return cuts
    if sampling.top_k:
        raise _refuse(dialect, "top_k", "top_k")
    if sampling.min_p:
        raise _refuse(dialect, "min_p", "min_p")
    if sampling.repetition_penalty != 1.0:
        raise _refuse(dialect, "a repetition penalty", "repetition_penalty")
    return {"top_p": sampling.top_p} if sampling.top_p < 1 else {}


def _ends(sampling: Sampling, dialect: Dialect) -> dict[str, Any]:
    ends: dict[str, Any] = {"stop": list(sampling.stop)} if sampling.stop else {}
    if sampling.stop_tokens:
        if dialect not in (Dialect.VLLM, Dialect.SGLANG):
            raise _refuse(dialect, "stop tokens", "stop_tokens")
        ends["stop_token_ids"] = list(sampling.stop_tokens)
    if sampling.ignore_eos:
        if dialect not in (Dialect.VLLM, Dialect.SGLANG, Dialect.LLAMA):
            raise _refuse(dialect, "ignore_eos", "ignore_eos")
        ends["ignore_eos"] = True
    return ends


def _grammar(ask: Ask, dialect: Dialect) -> dict[str, Any]:
    grammar, raw = ask.sampling.grammar, ask.is_raw
    if grammar is None:
        return {}
    if grammar.kind == "regex":
        if dialect is Dialect.VLLM:
            return {"structured_outputs": {"regex": grammar.source}}
        if dialect is Dialect.SGLANG:
            return {"regex": grammar.source}
        if dialect is Dialect.TGI and not raw:
            return {"response_format": {"type": "regex", "value": grammar.source}}
        raise _refuse(dialect, "a regular expression", "regex")
    schema = json.loads(grammar.source)
    if raw and dialect in (Dialect.LLAMA, Dialect.SGLANG):
        return {"json_schema": schema if dialect is Dialect.LLAMA else grammar.source}
    if dialect is Dialect.TGI and not raw:
        return {"response_format": {"type": "json", "value": schema}}
    if raw and dialect is not Dialect.VLLM:
        raise _refuse(dialect, "a schema for a raw prompt", "json_schema")
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _logprobs(ask: Ask, dialect: Dialect) -> dict[str, Any]:
    """Asks for one at least where none means that none are given."""
    top = ask.sampling.logprobs
    if top < 0:
        return {}
    if top and dialect not in (Dialect.VLLM, Dialect.LLAMA):
        raise Unavailable(f"{dialect} servers do not say the ids of the likeliest tokens: ask for logprobs 0", "params.logprobs")  # fmt: skip
    least = max(top, 1) if dialect is Dialect.LLAMA else top
    ids = {"return_tokens_as_token_ids": True} if dialect is Dialect.VLLM else {}
    return {"logprobs": least, **ids} if ask.is_raw else {"logprobs": True, "top_logprobs": least, **ids}


# --- what it says -----------------------------------------------------------------------------------------------


class _Top(msgspec.Struct, frozen=True):
    logprob: float | None = None
    id: int | None = None
    token: str = ""


class _Drawn(msgspec.Struct, frozen=True):
    logprob: float | None = None
    top_logprobs: tuple[_Top, ...] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    """`content`: of chat, and of llama-server's raw answers too. The others: of raw answers."""

    content: tuple[_Drawn, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float | None] | None, ...] | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


class Piece(msgspec.Struct, frozen=True):
    """What one event of the stream says. `is_token`: something was drawn, if only a thought that is no part of the answer.

    `finish` is "" until the answer is whole. `is_broken`: the server gave up; another request may fare better.
    """

    text: str = ""
    is_token: bool = False
    finish: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    is_broken: bool = False


_chunk = msgspec.json.Decoder(_Chunk)
_anything = msgspec.json.Decoder()


def piece_of(data: str, top: int) -> Piece:
    """One event. `top`: how many of the likeliest tokens were asked for. Raises TaskFailed by the server's words, or for what is no such event."""
    try:
        chunk = _chunk.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise TaskFailed(f"the server sent what is no piece of an answer: {printable(data[:80])}") from None
    if chunk.error is not None:
        code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
        if code in (429, 502, 503, 504):
            return Piece(is_broken=True)
        raise TaskFailed(f"the server gave up the answer: {_words_in({'error': chunk.error})}")
    if not chunk.choices:
        return Piece(usage=chunk.usage)
    choice = chunk.choices[0]
    delta = choice.delta or _Delta()
    text = choice.text or delta.content or ""
    finish = choice.finish_reason or ""
    if finish in NOT_OURS:
        raise TaskFailed(f"the server {NOT_OURS[finish]}")
    if finish in ("abort", "error"):
        return Piece(is_broken=True)
    if finish and finish not in STOPS:
        raise TaskFailed(f"the server ended the answer for a reason that is not known here: {printable(finish[:80])}")
    logprobs = _logprobs_of(choice.logprobs, top) if choice.logprobs is not None and top >= 0 else ()
    thought = delta.reasoning_content or delta.reasoning
    return Piece(text, bool(text or thought), STOPS.get(finish, ""), logprobs, chunk.usage)


def _logprobs_of(found: _Logprobs, top: int) -> tuple[TokenLogprob, ...]:
    if found.content is not None:
        return tuple(
            TokenLogprob(_number(drawn.logprob), tuple((_id(t.id, t.token), _number(t.logprob)) for t in (drawn.top_logprobs or ())[:top]))
            for drawn in found.content
        )  # fmt: skip
    tops = found.top_logprobs or ()
    return tuple(
        TokenLogprob(
            _number(drawn),
            tuple((_id(None, token), _number(value)) for token, value in list((tops[i] or {}).items() if i < len(tops) else ())[:top]),
        )
        for i, drawn in enumerate(found.token_logprobs or ())
    )  # fmt: skip


def _number(value: float | None) -> float:
    return -9999.0 if value is None else value  # what vLLM says for a probability of 0, which JSON has no logarithm of


def _id(given: int | None, token: str) -> int:
    if given is not None:
        return given
    if token.startswith(TOKEN_ID) and token[len(TOKEN_ID) :].isdecimal():
        return int(token[len(TOKEN_ID) :])
    raise Unavailable("the server does not say the ids of the likeliest tokens: ask for logprobs 0", "params.logprobs")


# --- what it refuses --------------------------------------------------------------------------------------------


def refusal(status: int, body: bytes) -> HexrtError:
    """The error of a step whose request was answered by this status, for good."""
    words = words_of(body)
    said = f": {words}" if words else ""
    if 300 <= status < 400:
        return TaskFailed(f"the server answered {status}, which sends elsewhere; that is not followed: correct the endpoint's URL")  # fmt: skip
    if status in (401, 403):
        return Unavailable(f"the server does not let the daemon in ({status}): see the model's api_key_file{said}")
    if status in (400, 413, 422):
        return BadRequest(f"the server refused it ({status}){said}")
    if status == 404:
        return Unavailable(f"the server knows no such model or path (404): see the model's endpoint and endpoint_model{said}")  # fmt: skip
    return TaskFailed(f"the server answered {status}{said}")


def words_of(body: bytes) -> str:
    """What an answer that is no success says, in short, for people."""
    try:
        return _words_in(_anything.decode(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return printable(body[: 4 * MAX_WORDS].decode("utf-8", "replace"))[:MAX_WORDS]


def _words_in(found: Any) -> str:
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    text = found if isinstance(found, str) else json.dumps(found)
    return printable(text[:MAX_WORDS])


def printable(text: str) -> str:
    """On one line, and with nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text).strip()
