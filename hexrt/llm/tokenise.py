"""From a prompt or a conversation to token ids: the first part of `llm.generate` and `llm.prefill`, on the process pool.

Reads tokenizer.json, the chat template and config.json of the model's folder once per process. The template is the model's own and runs
in jinja2's immutable sandbox.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.bounds import EXTRA_BYTES, memory_limit
from hexrt.errors import BadRequest, HexrtError, TaskFailed, Unavailable
from hexrt.llm.engine_grammar import check_grammar
from hexrt.llm.gguf_folder import folder_of
from hexrt.llm.model_files import read_file, read_table
from hexrt.llm.steps import check_numerics, check_room, grammar_of, model_shape, resolve_model
from hexrt.ops.llm import ChatMessage, Continued, DecodeParams
from hexrt.ops.spec import StepContext

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

SENTINEL = "\ufdd1"
"""Stands for an answer whose ids are known already, while the text around it is rendered. No text holds this code point."""
BREAK = "\ufdd0"
"""Cuts a special token's name in two where a text quotes it: only the template may open and close turns."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What tokenising needs of one model."""

    tokeniser: Tokenizer
    template: Template | None
    tokens: Mapping[str, str]  # bos_token, eos_token, ... by name, for the template
    context_tokens: int
    size: int
    special: tuple[str, ...]  # what the tokeniser takes for control tokens


def run(context: StepContext, params: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The body: {ids, prompt_tokens}."""
    try:
        name = resolve_model(params.model, context.models)
        model = context.models[name]
        check_numerics(params.numerics, name, model["is_exact"])
        if model.get("is_served"):
            return {"messages": messages_of(name, params.raw, inputs)}
        if isinstance(params, DecodeParams) and (grammar := grammar_of(params)) is not None:
            check_grammar(grammar.kind, grammar.source)
        path = Path(context.models_dir) / model["path"]
        vocabulary = load_vocabulary(folder_of(path, name, Path(context.state_dir)), name)
        ids = tokenise(vocabulary, name, params.raw, inputs)
        if not ids:
            raise BadRequest(f"the tokeniser and chat template of {name!r} make no token of it", "inputs.prompt")
        check_room(name, len(ids), vocabulary.context_tokens)
    except HexrtError as error:
        raise type(error)(error.message, f"{context.step}.{error.where}" if error.where else context.step) from error
    return {"ids": ids, "prompt_tokens": len(ids)}


def messages_of(name: str, raw: bool, inputs: Mapping[str, Any]) -> list[dict[str, str]]:
    """The whole conversation for a server, which makes tokens of it itself. Raises BadRequest naming the input."""
    prior: Continued | None = inputs.get("continue_from")
    if prior is not None and not prior.messages:
        raise BadRequest(
            f"its model runs here, so it holds ids, and a server answers for {name!r}, which takes text: give `messages`",
            "inputs.continue_from",
        )
    messages = conversation(inputs, prior is not None)
    if raw:
        check_raw(inputs)
    before = said_before(prior, raw)
    if raw:
        return [{"role": "raw", "content": "".join(m["content"] for m in [*before, *messages])}]
    return before + messages


def said_before(prior: Continued | None, raw: bool) -> list[dict[str, str]]:
    """The messages of the conversation that is gone on with. Raises BadRequest where one has a chat template and the other has none."""
    before = [{"role": m.role, "content": m.content} for m in prior.messages] if prior is not None else []
    if before and raw != (before[0]["role"] == "raw"):
        kind = "is a raw one: set `raw`" if before[0]["role"] == "raw" else "has messages: leave out `raw`"
        raise BadRequest(f"what it goes on from {kind}", "inputs.continue_from")
    return before


def check_raw(inputs: Mapping[str, Any]) -> None:
    if inputs.get("prompt") is None or inputs.get("system") is not None:
        raise BadRequest("a raw prompt is given as `prompt` alone: leave out `messages` and `system`", "params.raw")


def tokenise(vocabulary: Vocabulary, name: str, raw: bool, inputs: Mapping[str, Any]) -> list[int]:
    """The ids of the whole prompt. Raises BadRequest naming the input, or Unavailable where the model has no chat template."""
    prior: Continued | None = inputs.get("continue_from")
    messages = conversation(inputs, prior is not None)
    if prior is not None and not prior.ids:  # a server answered: its text is encoded as any other
        messages, prior = said_before(prior, raw) + messages, None
        messages = [{"role": "raw", "content": "".join(m["content"] for m in messages)}] if raw else messages
    if raw:
        check_raw(inputs)
        new = vocabulary.tokeniser.encode(messages[0]["content"], add_special_tokens=prior is None).ids
    else:
        messages = [{**message, "content": as_plain_text(vocabulary, message["content"])} for message in messages]
        text = render(vocabulary, name, messages) if prior is None else continuation(vocabulary, name, messages)
        pieces = vocabulary.tokeniser.encode_batch(text.split(BREAK), add_special_tokens=False)
        new = [token for piece in pieces for token in piece.ids]
    if prior is None:
        return list(new)
    if max(prior.ids) >= vocabulary.size:
        raise BadRequest(f"its ids are not of the model {name!r}", "inputs.continue_from")
    closed = bool(new) and prior.ids[-1] == new[0]  # the answer ended with the token that the template ends it with
    return [*prior.ids, *new[closed:]]


def conversation(inputs: Mapping[str, Any], continued: bool) -> list[dict[str, str]]:
    """The messages that `prompt`, `system` and `messages` make. Raises BadRequest naming the input."""
    prompt, system = inputs.get("prompt"), inputs.get("system")
    given: Sequence[ChatMessage] | None = inputs.get("messages")
    if (prompt is None) == (given is None):
        raise BadRequest("give either `prompt` or `messages`", "inputs.prompt")
    if system is not None and (given is not None or continued):
        raise BadRequest("goes with a first `prompt` only: put it into `messages`, or leave it out", "inputs.system")
    if prompt is not None:
        if not prompt.strip():
            raise BadRequest("the prompt is empty: say something", "inputs.prompt")
        start = [{"role": "system", "content": system}] if system is not None else []
        return [*start, {"role": "user", "content": prompt}]
    assert given is not None
    for position, message in enumerate(given):
        if message.role == "user" and not message.content.strip():
            raise BadRequest("the message is empty: say something", f"inputs.messages[{position}].content")
    return [{"role": message.role, "content": message.content} for message in given]


def as_plain_text(vocabulary: Vocabulary, text: str) -> str:
    """`text` with a BREAK inside each control token that it quotes, so that a document or tool cannot speak as another role."""
    text = text.replace(BREAK, "").replace(SENTINEL, "")
    for token in vocabulary.special:
        text = text.replace(token, token[:1] + BREAK + token[1:])
    return text


def render(vocabulary: Vocabulary, name: str, messages: list[dict[str, str]]) -> str:
    """The conversation as the model's chat template writes it, up to where the answer begins."""
    from jinja2 import TemplateError

    if vocabulary.template is None:
        raise Unavailable(
            f"the model {name!r} has no chat template: set `raw` and write the whole prompt", "params.raw"
        )
    try:
        with memory_limit():
            return vocabulary.template.render(messages=messages, add_generation_prompt=True, **vocabulary.tokens)
    except MemoryError:
        raise TaskFailed(f"the chat template of {name!r} takes more than {EXTRA_BYTES >> 20} MiB for these messages", "inputs") from None  # fmt: skip
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # fmt: skip
        raise TaskFailed(f"the chat template of {name!r} refuses these messages: {error}", "inputs") from error


def continuation(vocabulary: Vocabulary, name: str, messages: list[dict[str, str]]) -> str:
    """What the chat template puts between an answer and the next one."""
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]
    parts = render(vocabulary, name, before + messages).split(SENTINEL)
    if len(parts) != 2:
        raise Unavailable(
            f"the chat template of {name!r} does not keep earlier answers, so nothing can be appended: give `messages`",
            "inputs.continue_from",
        )
    return parts[1]


def load_vocabulary(folder: Path, name: str) -> Vocabulary:
    """The vocabulary of a model folder; read again where its files have changed. Raises Unavailable."""
    try:
        return _load(str(folder), (folder / "tokenizer.json").stat().st_mtime_ns)
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise Unavailable(
                f"the folder of the model {name!r} does not exist: its path is taken from daemon.models_dir",
                "params.model",
            ) from None
        missing = Path(error.filename).name if error.filename else "a file"
        raise Unavailable(f"the folder of the model {name!r} has no {missing}", "params.model") from None
    except Unavailable as error:
        raise Unavailable(f"the model {name!r} cannot be used: {error.message}", "params.model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Unavailable(
            f"the tokeniser of the model {name!r} cannot be read: {type(error).__name__}", "params.model"
        ) from error


@functools.lru_cache(maxsize=8)
def _load(folder: str, stamp: int) -> Vocabulary:
    from tokenizers import Tokenizer

    path = Path(folder)
    shape = model_shape(read_table(path / "config.json"))
    settings_file = path / "tokenizer_config.json"
    settings = read_table(settings_file) if settings_file.exists() else {}
    source = str(read_file(path / "tokenizer.json"), "utf-8")
    try:
        tokeniser = Tokenizer.from_str(source)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        raise ValueError("tokenizer.json") from error
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    special = tuple(
        t.content for t in tokeniser.get_added_tokens_decoder().values() if t.special and len(t.content) > 1
    )
    return Vocabulary(tokeniser, _template(path, settings), tokens, shape.context_tokens, shape.vocabulary, special)


def _template(path: Path, settings: Mapping[str, Any]) -> Template | None:
    """The chat template: a file of its own, or a field of tokenizer_config.json, there perhaps one of several by name."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file = path / "chat_template.jinja"
    source = str(read_file(file), "utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, list):
        source = {e["name"]: e.get("template") for e in source if isinstance(e, dict) and "name" in e}.get("default")
    if not source:
        return None
    if not isinstance(source, str):
        raise ValueError("chat template")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        with memory_limit():  # it computes constants already
            return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise Unavailable(f"its chat template has a syntax error in line {error.lineno}: {error.message}") from error
    except TemplateError as error:
        raise ValueError("chat template") from error


def _refuse(message: str) -> None:
    """Called by templates that do not take a conversation."""
    raise ValueError(message)
