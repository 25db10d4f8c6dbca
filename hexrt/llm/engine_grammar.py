"""What an answer's text may go on with: JSON schemas and regular expressions, through llguidance.

Owns a model's compiled grammars and each sequence's place in its own. `check_grammar` needs no model and no torch, so that the pool can
refuse a schema before anything is read. All of a `GrammarState` can be made again from the answer's ids.

Everybody's tokens wait while a grammar is compiled and while its next tokens are looked for, so both are bounded: by the library's fuel,
by the limits below, and by `no_forcing`. With it, the library does not look ahead for all the text that must follow, which takes time with
its length, for each token again; what may be said is the same.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from hexrt.errors import BadRequest, Unavailable
from hexrt.protocol.host import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_SOURCE = 1 << 18
"""Characters of a schema, of what only people read in it too; the library's time to refuse one grows with them."""
MOST_TEXT = 16 << 10
"""Characters of an expression, and of all patterns, names and values that a schema holds answers to."""
MOST_SCHEMAS = 500
"""Schemas within a schema: of properties, of branches, of items. 500 with patterns of their own compile in a tenth of a second."""
KEPT = 32
"""Compiled grammars kept for the next answer under the same one."""
WHITESPACE = r"\n {0,24}| "
"""Between the tokens of JSON. Bounded: a small model that may indent for ever does."""
TRIED_BYTES = 64
"""Of some text that an expression allows, before it is taken: some fail at once, some only on the way."""
MOST_MET = 8
"""Patterns that one text must match together. Whether any text does takes the library minutes for 16, which no fuel bounds."""
OPTIONS = '%llguidance {"no_forcing": true}\nstart: '
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))


def check_grammar(kind: str, source: str) -> None:
    """Raises BadRequest naming the parameter where no text could be held to it, Unavailable where llguidance is not installed."""
    library = _library()
    tokens = library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=len(_Bytes.tokens))
    matcher = _compile(tokens, kind, source)
    for _ in range(
        TRIED_BYTES if kind == "regex" else 1
    ):  # of a schema's many texts one that fails says nothing of the others
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        if matcher.is_stopped():
            return
        bits = int.from_bytes(allowed, "little") & ((1 << 256) - 1)
        if not bits:
            return
        matcher.consume_token(bits.bit_length() - 1)


class _Bytes:
    """A tokeniser whose tokens are the bytes and an end, in the form that the library asks for."""

    tokens = (*(bytes((byte,)) for byte in range(256)), b"\xff<end>")
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


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


def _compile(tokens: LLTokenizer, kind: str, source: str) -> LLMatcher:
    matcher: LLMatcher = _library().LLMatcher(tokens, _source(kind, source), log_level=0, limits=_limits())
    if matcher.is_error():
        raise _refused(kind, matcher.get_error())
    return matcher


def _source(kind: str, source: str) -> str:
    """In the library's own form. Nothing is refused here but what is too large or no JSON."""
    most = MOST_TEXT if kind == "regex" else MOST_SOURCE
    if len(source) > most:
        raise _refused(kind, f"it has {len(source)} characters, and at most {most} are taken")
    if kind not in ("regex", "json_schema"):
        raise BadRequest(f"there is no grammar of kind {kind!r}", "params")
    matcher = _library().LLMatcher
    if kind == "regex":
        rule = msgspec.json.decode(matcher.grammar_from_regex(source), type=_Source).grammars[0].lark_grammar or ""
        return OPTIONS + rule.removeprefix("start: ")
    try:
        made = matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
        schema = msgspec.json.decode(made, type=_Source).grammars[0].json_schema
        size = _Size().add(msgspec.json.decode(source))
    except ValueError as error:
        raise _refused(kind, str(error)) from None
    if size.text > MOST_TEXT:
        raise _refused(kind, f"its patterns, names and values have {size.text} characters, and at most {MOST_TEXT} are taken")  # fmt: skip
    if size.schemas > MOST_SCHEMAS:
        raise _refused(kind, f"it is made of {size.schemas} schemas (properties, branches, items), and at most {MOST_SCHEMAS} are taken")  # fmt: skip
    if size.met > MOST_MET:
        raise _refused(kind, f"its `allOf` joins {size.met} patterns, formats and references, and at most {MOST_MET} are taken")  # fmt: skip
    return f"{OPTIONS}%json {bytes(schema).decode()}"


class _Grammar(msgspec.Struct):
    lark_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.Raw(b"null")


class _Source(msgspec.Struct):
    """What the library makes of an expression or schema."""

    grammars: list[_Grammar]


class _Size:
    """Of a schema: the schemas in it, the characters that an answer may be held to, and the patterns that meet in one `allOf` or other."""

    def __init__(self) -> None:
        self.schemas = self.text = self.met = 0

    def add(self, schema: Any, meets: bool = False) -> _Size:
        if isinstance(schema, list):
            for one in schema:
                self.add(one, meets)
        elif isinstance(schema, dict):
            self.schemas += 1
            for key, value in schema.items():
                self.met += meets and key in ("pattern", "format", "$ref")
                if key in ("const", "enum", "pattern", "required"):
                    self.text += len(msgspec.json.encode(value))
                elif key in MAPS and isinstance(value, dict):
                    self.text += sum(map(len, value))
                    self.add(list(value.values()))
                elif key not in ("default", "examples"):
                    self.add(value, meets or key == "allOf")
        return self


def _refused(kind: str, message: str) -> BadRequest:
    message = message.replace("NoExtensionBias", "there is no text that it allows")
    message = _PLACE.sub("", message)
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
            self._compiled[key] = _compile(self._tokenizer(), *key)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        state = GrammarState(grammar.kind, self._compiled[key].deep_copy(), self._eos)
        for token in answered:
            state.take(token)
        return state

    def prepare(self) -> None:
        """Makes the model's vocabulary what grammars need, which takes 0.3 s for 50 000 tokens and would hold up everybody at the first answer.

        What keeps it from that is told to each answer that asks for a grammar.
        """
        with suppress(Unavailable):
            self._tokenizer()

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
