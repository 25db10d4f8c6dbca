"""What a chunk's report means for one sequence in it.

Owns nothing: `progress` moves a sequence's state on and says what happened. Pure; called by `llm.batch` only.
"""

from __future__ import annotations

from hexrt.errors import ErrorRecord
from hexrt.llm.outcome import Emitted, Ended, Outcome, Prefilled, Refused
from hexrt.llm.sequence import Share, State
from hexrt.protocol.host import Chunked, Token

ERROR = "error: "
NO_TOKEN = Token(0, (), "", "")


def progress(share: Share, token: Token | None, report: Chunked) -> list[Outcome]:
    """What happened to a live sequence, in order. Where the last is Ended or Refused, or `is_prefilled` holds, it has ended."""
    state, key = share.state, share.state.request.key
    token = token or NO_TOKEN
    ids, text, finish = token.ids, token.text, token.finish
    state.progressed = True
    state.prefill_start_ns = state.prefill_start_ns or report.start_ns
    state.computed += share.prompt
    if not finish and len(ids) != share.gain:
        finish = f"{ERROR}the host gave {len(ids)} tokens where {share.gain} were due"
    if finish.startswith(ERROR):
        return [Refused(key, _refusal(finish[len(ERROR) :]))]
    outcomes: list[Outcome] = []
    if not state.prefill_end_ns and (finish or state.computed == len(state.material)):
        state.prefill_end_ns = report.end_ns
        outcomes.append(Prefilled(key, state.prefill_start_ns, report.end_ns, state.pages_loaded))
    if ids or text:
        outcomes.append(Emitted(key, len(state.answer), ids, text, token.logprobs))
        state.answer += ids
        state.texts.append(text)
        state.logprobs += token.logprobs
    if finish:
        answer, whole = tuple(state.answer), "".join(state.texts)
        outcomes.append(
            Ended(key, finish, answer, whole, state.prefill_end_ns, report.end_ns, tuple(state.logprobs))
        )  # fmt: skip
    return outcomes


def _refusal(said: str) -> ErrorRecord:
    """A host names the parameter first where it is at fault: `params.regex: unclosed group`."""
    where, colon, message = said.partition(": ")
    if colon and where.startswith("params.") and where.removeprefix("params.").isidentifier():
        return ErrorRecord("bad_request", message, where)
    return ErrorRecord("task_failed", said)


def is_prefilled(state: State) -> bool:
    """Whether all that was asked of the sequence was to read its prompt, and that is done."""
    return bool(state.prefill_end_ns) and state.request.sampling is None
