"""Answers under a JSON schema or an expression match it, whatever the model would rather say; what cannot be held to is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from hexrt.errors import BadRequest  # noqa: E402
from hexrt.llm.engine_grammar import MOST_SCHEMAS, MOST_SOURCE, MOST_TEXT, check_grammar  # noqa: E402
from hexrt.protocol.host import ChunkSequence, Grammar, Sampling, Token  # noqa: E402
from tests.llm_hand import PROMPT, Hand, sampling  # noqa: E402

pytestmark = pytest.mark.timeout(120)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sort": {"enum": ["in", "the", "world"]}, "fits": {"type": "boolean"}, "many": {"type": "integer", "minimum": 0, "maximum": 99},
        "few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["sort", "fits", "many", "few"],
    "additionalProperties": False,
}  # fmt: skip


def held(kind: str, source: Any, max_tokens: int = 100, **more: Any) -> Sampling:
    text = source if isinstance(source, str) else json.dumps(source)
    return sampling(max_tokens, grammar=Grammar(kind, text), ignore_eos=False, **more)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory) -> Hand:
    return Hand(tmp_path_factory.mktemp("grammar") / "tiny")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_under_a_schema_is_json_that_matches_it_and_ends_by_itself(hand: Hand, temperature: float) -> None:
    said = hand.answers([held("json_schema", SCHEMA, temperature=temperature, seed=seed) for seed in range(4)])
    for token in said:
        assert token.finish == "stop", token
        jsonschema.validate(json.loads(token.text), SCHEMA)
    assert len({token.text for token in said}) == (4 if temperature else 1)


@pytest.mark.parametrize("expression", ["[ab]{3}-(the|in) world", "x", "(aé|日){2}", "[0-9]{1,3}(, [0-9]{1,3}){2}"])
def test_an_answer_under_an_expression_matches_it_from_end_to_end(hand: Hand, expression: str) -> None:
    for token in hand.answers([held("regex", expression, temperature=1.0, seed=seed) for seed in range(3)]):
        assert token.finish == "stop"
        assert re.fullmatch(expression, token.text), token.text


def test_an_empty_answer_can_be_all_that_is_allowed(hand: Hand) -> None:
    (token,) = hand.answers([held("regex", "")])
    assert (token.text, token.finish) == ("", "stop")


def test_chunks_and_neighbours_change_nothing(hand: Hand) -> None:
    mixed = [
        held("json_schema", SCHEMA, temperature=0.9, seed=1), sampling(30, temperature=0.9, seed=2), held("regex", "[a-z ]{9,}", 20),
        held("regex", "(a|b)*c", 15, temperature=2.0, repetition_penalty=1.2),
    ]  # fmt: skip
    together = hand.answers(mixed, passes=5)
    assert [hand.answers([one], passes=3)[0].ids for one in mixed] == [token.ids for token in together]
    assert [token.finish for token in together][1:3] == ["length", "length"]


@pytest.mark.parametrize("answered", [1, 4, 9])
def test_after_a_restart_an_answer_goes_on_where_its_grammar_stood(hand: Hand, answered: int) -> None:
    how = held("json_schema", SCHEMA, temperature=1.2, seed=6)
    (whole,) = hand.answers([how])
    (rest,) = hand.answers([how], answered=whole.ids[:answered])
    assert (whole.ids[:answered] + rest.ids, rest.finish) == (whole.ids, "stop")
    assert whole.text.endswith(rest.text)


def test_an_answer_that_was_complete_before_a_restart_ends_at_once(hand: Hand) -> None:
    how = held("regex", "the world")
    (whole,) = hand.answers([how])
    (rest,) = hand.answers([how], answered=whole.ids)
    assert (rest.ids, rest.finish) == ((), "stop")


def test_ids_from_before_that_its_grammar_never_allowed_end_the_sequence_by_name(hand: Hand) -> None:
    (token,) = hand.answers([held("regex", "[0-9]+")], answered=hand.ids("the"))
    assert token.finish.startswith("error: params.regex: ")


def test_a_grammar_that_is_none_ends_its_own_sequence_alone(hand: Hand) -> None:
    bad = [
        held("regex", "("),
        held("json_schema", {"type": "nonsense"}),
        held("json_schema", "{"),
        held("poem", "x"),
        held("json_schema", {"$ref": "#"}),
    ]
    said = hand.answers([*bad, sampling(5), held("regex", "ab")])
    assert [token.finish for token in said] == [
        "error: params.regex: unclosed group",
        "error: params.json_schema: Invalid type: nonsense",
        "error: params.json_schema: EOF while parsing an object at line 1 column 1",
        "error: params: there is no grammar of kind 'poem'",
        "error: params.json_schema: there is no text that it allows",
        "length", "stop",
    ]  # fmt: skip
    assert said[6].text == "ab"


def test_a_grammar_without_a_tokeniser_is_refused_by_name(tmp_path: Path, hand: Hand) -> None:
    from hexrt.llm.engine import ModelEngine

    engine = ModelEngine(hand.model, str)
    engine.bind(_binding(40))
    report = engine.run(_chunk(ChunkSequence(40, 0, PROMPT, True, held("regex", "a"))))
    assert (
        report.tokens[0].finish
        == "error: params: answers of this model cannot be constrained: params: it came without its tokeniser"
    )


def _binding(number: int) -> Any:
    from hexrt.protocol.host import BindPages

    return BindPages("tiny", number, 0, (0,), 1)


def _chunk(entry: ChunkSequence) -> Any:
    from hexrt.protocol.host import Chunk

    return Chunk(1, "tiny", 1, (entry,))


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=x)y", "look-ahead"),
        ("regex", "[a-", "unclosed character class"),
        ("regex", "(" * 4000 + ")" * 4000, "nested parentheses"),
        ("json_schema", {"type": "nonsense"}, "Invalid type"),
        ("json_schema", {"type": "string", "pattern": "("}, "unclosed group"),
        ("json_schema", {"$ref": "http://example.com/schema"}, "not present"),
        ("json_schema", "[1]", "object schema"),
        ("json_schema", "{", "EOF"),
        ("json_schema", '{"type":"array","items":' * 3000 + "{}" + "}" * 3000, "recursion"),
        ("json_schema", {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(10)]}, "large"),
        ("json_schema", {"description": "x" * MOST_SOURCE}, "at most"),
        ("regex", r"[^\s\S]", "no text that it allows"),
        ("regex", "((a{1,1000}){1,1000}){1,1000}", "too many expressions"),
        ("regex", "x" * (MOST_TEXT + 1), "at most 16384"),
        ("json_schema", {"const": "x" * MOST_TEXT}, "have 16386 characters, and at most 16384"),
        ("json_schema", {"properties": {"x" * MOST_TEXT: {"pattern": "a"}}}, "have 16387 characters"),
        ("json_schema", {"properties": {"a": {"const": {"properties": ["x" * MOST_TEXT]}}}}, "characters, and at most 16384"),
        ("json_schema", {"properties": {str(n): {"type": "integer"} for n in range(MOST_SCHEMAS)}}, "501 schemas"),
        ("json_schema", {"anyOf": [{"type": "array", "items": {"const": n}} for n in range(300)]}, "601 schemas"),
        ("json_schema", {"allOf": [{"pattern": f".*a.{{{n}}}b"} for n in range(20)]}, "joins 20 patterns"),
    ],
)  # fmt: skip
def test_what_no_answer_can_be_held_to_is_refused_before_anything_is_read(kind: str, source: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as raised:
        check_grammar(kind, source if isinstance(source, str) else json.dumps(source))
    assert raised.value.where == f"params.{kind}"
    assert len(raised.value.message) <= 300


def test_what_can_be_held_to_passes() -> None:
    check_grammar("json_schema", json.dumps(SCHEMA))
    check_grammar("json_schema", json.dumps({"description": "x" * (MOST_TEXT + 1), "const": 7, "examples": [{}] * 600}))
    check_grammar("json_schema", json.dumps({"enum": [f"word {n}" for n in range(1000)]}))
    wide = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 30 + 1}}}{n}$"} for n in range(490)}
    check_grammar("json_schema", json.dumps({"allOf": [{"properties": wide}, {"pattern": "a"}]}))
    check_grammar("regex", "[ab]+")
    check_grammar("regex", "x{0,9}")
    check_grammar("regex", "")


def test_an_expression_may_hold_what_the_library_writes_grammars_with(hand: Hand) -> None:
    for text in ('a/b "c"', "x\\n| start: y", "%ignore /a/"):
        (token,) = hand.answers([held("regex", re.escape(text), 60)])
        assert (token.text, token.finish) == (text, "stop")


def test_text_that_must_follow_is_not_looked_for_ahead(hand: Hand) -> None:
    """Looking ahead leaves one token; without it every beginning of the text is allowed, and the time for a token does not grow with the text."""
    grammars = hand.engine.grammars
    size = hand.model.shape.vocabulary
    state = grammars.start(Grammar("regex", "the world" * 1000))
    mask = torch.zeros(-(-size // 32), dtype=torch.int32)
    state.allow(mask.data_ptr(), 4 * mask.numel())
    allowed = [token for token in range(size) if int(mask[token // 32]) >> token % 32 & 1]
    assert len(allowed) > 1
    assert all("the world".startswith(hand.tokeniser.decode([token])) for token in allowed)


HOSTILE = (
    ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    ("regex", "(x+x+)+y"),
    ("regex", "(a|b)*a(a|b){20}"),
    ("regex", "(a?){3000}a{3000}"),
    ("regex", "(.{0,1000}foo){1,1000}"),
    ("regex", "([ab]{0,300}c[ab]{0,300}){0,300}d"),
    ("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}})),
    (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(400)}}),
    ),
)


@pytest.mark.timeout(30)
def test_hostile_grammars_end_or_are_ended_and_harm_nobody(hand: Hand) -> None:
    """Without the library's limits some of these would compute for hours; the timeout is the assertion."""
    wild = [held(kind, source, 40, temperature=3.0, seed=n) for n, (kind, source) in enumerate(HOSTILE)]
    said = hand.answers([*wild, sampling(8)])
    for token in said[:-1]:
        assert token.finish in ("stop", "length") or token.finish.startswith("error: params."), token.finish
    assert said[-1].ids == hand.answers([sampling(8)])[0].ids
    assert any(token.finish.startswith("error: params.") for token in said)


def test_a_token_outside_the_grammar_is_never_among_the_answers_but_may_be_the_likeliest_in_its_logprobs(
    hand: Hand,
) -> None:
    (free,) = hand.answers([sampling(1, logprobs=3)])
    (token,) = hand.answers([held("regex", "7+", 1, logprobs=3)])
    assert token.text == "7"
    assert token.logprobs[0].top == free.logprobs[0].top
    assert token.logprobs[0].logprob < free.logprobs[0].logprob
    assert isinstance(token, Token)
