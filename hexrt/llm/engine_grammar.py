"""What an answer's text may go on with: JSON schemas and regular expressions, through llguidance.

Owns a model's compiled grammars and each sequence's place in its own. `check_grammar` needs no model and no torch, so that the pool can
refuse a schema before anything is read. Work and memory are bounded by the library's fuel: a hostile grammar is refused or ends its own
sequence, after some ten milliseconds at the worst. All of a `GrammarState` can be made again from the answer's ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hexrt.errors import BadRequest, Unavailable
from hexrt.protocol.host import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_SOURCE = 1 << 18
"""Characters of a schema or expression; the library's time to refuse one grows with them."""
KEPT = 32
"""Compiled grammars kept for the next answer under the same one."""
WHITESPACE = r"\n {0,24}| "
"""Between the tokens of JSON. Bounded: a small model that may indent for ever does."""


def check_grammar(kind: str, source: str) -> None:
    """Raises BadRequest naming the parameter where no text could be held to it, Unavailable where llguidance is not installed."""
    from_library = _library()
    compiled = _source(kind, source)
    failed, messages = from_library.LLMatcher.validate_grammar_with_warnings(compiled, None, limits=_limits())
    if failed:
        raise _refused(kind, messages[0] if messages else "it cannot be compiled")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise Unavailable("constrained answers need llguidance, which is not installed here", "params") from None
    return llguidance


def _limits() -> LLParserLimits:
    """Half of the library's own or less."""
    limits: LLParserLimits = _library().LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=100_000, step_max_items=25_000, max_lexer_states=50_000,
        max_grammar_size=250_000, verbose_errors=False,
    )  # fmt: skip
    return limits


def _source(kind: str, source: str) -> str:
    """In the library's own form. Nothing is refused here but what is too long or no JSON."""
    if len(source) > MOST_SOURCE:
        raise _refused(kind, f"it has {len(source)} characters, and at most {MOST_SOURCE} are taken")
    matcher = _library().LLMatcher
    if kind == "regex":
        return str(matcher.grammar_from_regex(source))
    if kind != "json_schema":
        raise BadRequest(f"there is no grammar of kind {kind!r}", "params")
    try:
        return str(matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise _refused(kind, str(error)) from None


def _refused(kind: str, message: str) -> BadRequest:
    message = message.replace("NoExtensionBias", "there is no text that it allows")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # An expression's error is drawn over several lines, with the reason last.
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    return BadRequest((reasons[0] if reasons else "it cannot be used")[:300], f"params.{kind}")


class GrammarState:
    """Where one answer stands in its grammar. `error` is set, and stays, where it can go no further; then nothing else means anything."""

    __slots__ = ("_eos", "_kind", "_matcher", "error")

    def __init__(self, kind: str, matcher: LLMatcher, eos: frozenset[int]) -> None:
        self._kind, self._matcher, self._eos = kind, matcher, eos
        self.error = ""
        self._look()

    def _look(self) -> None:
        if self._matcher.is_error():
            refused = _refused(self._kind, self._matcher.get_error())
            self.error = f"{refused.where}: {refused.message}"

    @property
    def is_complete(self) -> bool:
        """Nothing but an end can follow."""
        return bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """An answer's next token; one that ends it is as good at the end as any."""
        if not (self._matcher.is_stopped() and token in self._eos):
            self._matcher.consume_token(token)
            self._look()

    def allow(self, address: int, size: int) -> None:
        """Writes which tokens may follow, one bit each, into `size` bytes at `address`."""
        self._matcher.unsafe_compute_mask_ptr(address, size)
        self._look()


class Grammars:
    """The grammars of one model. `tokeniser` gives its tokenizer.json and is asked when the first answer needs one."""

    def __init__(self, tokeniser: Callable[[], str], vocabulary: int, eos: Iterable[int]) -> None:
        self._tokeniser = tokeniser
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, answered: Iterable[int] = ()) -> GrammarState:
        """At the beginning of an answer, or after `answered`. Raises BadRequest or Unavailable, naming the parameter."""
        key = grammar.kind, grammar.source
        if key not in self._compiled:
            matcher = _library().LLMatcher(self._tokenizer(), _source(*key), log_level=0, limits=_limits())
            if matcher.is_error():
                raise _refused(grammar.kind, matcher.get_error())
            self._compiled[key] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        state = GrammarState(grammar.kind, self._compiled[key].deep_copy(), self._eos)
        for token in answered:
            state.take(token)
        return state

    def _tokenizer(self) -> LLTokenizer:
        if self._tokens is None:
            library = _library()
            try:
                self._tokens = library.LLTokenizer(
                    self._tokeniser(), n_vocab=self._vocabulary, eos_token=sorted(self._eos) or None
                )
            except (
                Exception
            ) as error:  # the library raises ValueError and its own panics for a tokeniser that it does not read
                raise Unavailable(f"answers of this model cannot be constrained: {error}", "params") from error
        assert self._tokens is not None
        return self._tokens
