"""Answers of a server that speaks OpenAI's protocol: which requests are with it, what is told of them, and what their steps put out.

Owns the requests of one served model. The daemon's brain adds and cancels them, carries `decide`'s messages to the device that speaks HTTP
(`hexrt.devices.endpoint`) and hands its reports back in. Nothing is queued here: the brain begins no more than the server takes at a time.
A prompt is a conversation; a raw one is a single message of the role "raw". Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hexrt.core import TokenLogprob
from hexrt.errors import BadRequest, ErrorRecord, InvariantViolation
from hexrt.llm.outcome import Emitted, Prefilled, Refused
from hexrt.llm.steps import Answer, sampling_of
from hexrt.protocol.host import Sampling

Message = dict[str, str]
RAW = "raw"
"""The role of a message that is the whole text of a conversation without a chat template."""


class EndpointPrompt(msgspec.Struct, frozen=True):
    """The output of tokenise for a served model."""

    messages: tuple[Message, ...] = ()


class EndpointRequest(msgspec.Struct, frozen=True):
    """`text`, in so many `pieces`, and `logprobs` are what was answered before a restart or an attempt that failed."""

    key: Hashable
    messages: tuple[Message, ...]
    sampling: Sampling
    text: str = ""
    pieces: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


# --- to the device ----------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True):
    """Answer this, going on from `text` if there is any, which took `tokens` tokens."""

    command: int
    messages: tuple[Message, ...]
    sampling: Sampling
    text: str = ""
    tokens: int = 0

    @property
    def is_raw(self) -> bool:
        return self.messages[0]["role"] == RAW


class Abort(msgspec.Struct, frozen=True):
    """Let go of the connection at once; no report follows."""

    command: int


# --- from the device --------------------------------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True):
    """More of the answer."""

    command: int
    text: str
    at_ns: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Answered(msgspec.Struct, frozen=True):
    """The answer is whole. `finish`: "stop" or "length"."""

    command: int
    finish: str
    prompt_tokens: int
    answer_tokens: int
    at_ns: int


class Broke(msgspec.Struct, frozen=True):
    """There will be no (more) answer."""

    command: int
    error: ErrorRecord
    at_ns: int


class Seen(msgspec.Struct, frozen=True):
    """What is known of the server now, for people."""

    facts: dict[str, Any]


EndpointReport = Said | Answered | Broke | Seen

# --- to the brain -----------------------------------------------------------------------------------------------


class Closed(msgspec.Struct, frozen=True):
    """A sequence has ended well; `output` is its step's, encoded."""

    key: Hashable
    output: bytes
    start_ns: int
    end_ns: int


EndpointOutcome = Prefilled | Emitted | Closed | Refused


class EndpointStatistics(msgspec.Struct, frozen=True):
    live: int
    prompt_tokens: int  # as the server counts them
    answer_tokens: int
    answers: int
    failures: int


@dataclass(eq=False, slots=True)
class _State:
    request: EndpointRequest
    command: int = 0  # 0: not sent yet
    sent_ns: int = 0
    first_ns: int = 0  # when the first token came
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


_prompt = msgspec.msgpack.Decoder(EndpointPrompt)
_encoder = msgspec.msgpack.Encoder()


def request_of(params: Any, tokenised: bytes | msgspec.Raw | None, key: Hashable, texts: list[str], logprobs: list[TokenLogprob]) -> EndpointRequest:  # fmt: skip
    """The request of an `llm.generate` step, from the output of its first part and what it had answered before. Raises BadRequest."""
    try:
        messages = _prompt.decode(tokenised).messages if tokenised is not None else ()
    except msgspec.MsgspecError:
        messages = ()
    if not messages:  # a restart with another configuration lies between
        raise BadRequest("its prompt was made for a model that runs here: submit it again", "inputs.prompt")
    said = [text for text in texts if text]
    return EndpointRequest(key, messages, sampling_of(params, key), "".join(said), len(said), tuple(logprobs))


def conversation_of(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """The messages with the answer behind them."""
    if messages[0]["role"] == RAW:
        return ({"role": RAW, "content": messages[0]["content"] + text},)
    return (*messages, {"role": "assistant", "content": text})


class EndpointEngine:
    """The requests of one served model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._states: dict[Hashable, _State] = {}
        self._by_command: dict[int, _State] = {}
        self._aborted: list[int] = []
        self._prompt_tokens = self._answer_tokens = self._answers = self._failures = 0

    # --- from the brain -----------------------------------------------------------------------------------------

    def add(self, request: EndpointRequest) -> None:
        """To be sent by the next `decide`."""
        if request.key in self._states:
            raise InvariantViolation(f"the sequence {request.key!r} was added twice")
        self._states[request.key] = _State(request)

    def cancel(self, key: Hashable) -> None:
        """Gives up a request in whatever state; no outcome follows, and unknown keys are ignored."""
        state = self._states.pop(key, None)
        if state is not None and state.command:
            del self._by_command[state.command]
            self._aborted.append(state.command)

    def decide(self, now_ns: int, next_command: Callable[[], int]) -> list[Ask | Abort]:
        """Messages for the device, to be sent in this order."""
        messages: list[Ask | Abort] = [Abort(command) for command in self._aborted]
        self._aborted.clear()
        for state in self._states.values():
            if not state.command:
                state.command, state.sent_ns = next_command(), now_ns
                self._by_command[state.command] = state
                request = state.request
                messages.append(
                    Ask(state.command, request.messages, request.sampling, request.text, request.pieces)
                )  # fmt: skip
        return messages

    # --- from the device ----------------------------------------------------------------------------------------

    def reported(self, report: Said | Answered | Broke) -> list[EndpointOutcome]:
        """What happened to a request, in order. A report on one that was cancelled is ignored."""
        state = self._by_command.get(report.command)
        if state is None:
            return []
        key, outcomes = state.request.key, list[EndpointOutcome]()
        if isinstance(report, Broke):
            self._failures += 1
            self._forget(state)
            return [Refused(key, report.error)]
        if not state.first_ns:
            state.first_ns = report.at_ns
            outcomes.append(Prefilled(key, state.sent_ns, report.at_ns))
        if isinstance(report, Said):
            state.texts.append(report.text)
            state.logprobs += report.logprobs
            outcomes.append(Emitted(key, 0, (), report.text, report.logprobs))
        else:
            self._answers += 1
            self._prompt_tokens += report.prompt_tokens
            self._answer_tokens += report.answer_tokens
            self._forget(state)
            outcomes.append(Closed(key, _encoder.encode(self._answer(state, report)), state.first_ns, report.at_ns))
        return outcomes

    def _answer(self, state: _State, report: Answered) -> Answer:
        request = state.request
        text = request.text + "".join(state.texts)
        logprobs = (*request.logprobs, *state.logprobs) if request.sampling.logprobs >= 0 else msgspec.UNSET
        return Answer(
            text, (), report.prompt_tokens, report.answer_tokens, report.finish, logprobs,
            conversation_of(request.messages, text),
        )  # fmt: skip

    def _forget(self, state: _State) -> None:
        del self._states[state.request.key]
        del self._by_command[state.command]

    # --- looking in -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._states and not self._aborted

    def statistics(self) -> EndpointStatistics:
        return EndpointStatistics(
            len(self._states), self._prompt_tokens, self._answer_tokens, self._answers, self._failures
        )

    def check_integrity(self) -> None:
        """Raises InvariantViolation unless requests and commands agree."""
        sent = {state.command: state for state in self._states.values() if state.command}
        if sent != self._by_command:
            raise InvariantViolation(f"requests {sorted(sent)} of {self.model!r}, commands {sorted(self._by_command)}")
