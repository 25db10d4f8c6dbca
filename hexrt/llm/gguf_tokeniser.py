"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Two kinds of vocabulary: byte-level BPE ("gpt2") cut first by a known expression, and SentencePiece's BPE with byte fallback ("llama"), whose
merges are recovered from the scores. An expression or token type that is not known is refused by name. Imports `tokenizers` when called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.errors import BadRequest, Unavailable
from hexrt.llm.gguf_config import need

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of the GGUF specification
SPACE = "\u2581"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    "llama-bpe": WORDS + r"|\p{N}{1,3}" + REST,
    "qwen2": WORDS + r"|\p{N}" + REST,
}
"""How text is cut before merging, as the models' own tokenizer.json says. The others in PRE_TOKENISERS have no expression of their own."""
PRE_TOKENISERS = frozenset({"gpt-2", "smollm", *SPLITS})
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def write_tokeniser(meta: Mapping[str, Any], folder: Path, context_tokens: int) -> None:
    """Writes both files. Raises Unavailable for what is not known, BadRequest where the file contradicts itself."""
    kind = need(meta, "tokenizer.ggml.model")
    tokens, types = _texts(meta, "tokenizer.ggml.tokens"), need(meta, "tokenizer.ggml.token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BadRequest(f"{len(tokens)} tokens, {len(set(tokens))} of them unlike, with {len(types)} types", "source")
    makers = {"gpt2": byte_level, "llama": sentence_piece}
    if kind not in makers:
        known = ", ".join(repr(name) for name in makers)
        raise Unavailable(f"tokeniser {kind!r} is not known; known: {known}", "tokenizer.ggml.model")
    tokeniser = makers[kind](meta, tokens, types)
    _add_special(tokeniser, tokens, types)
    named = {name: _named(meta, tokens, name) for name in ("bos", "eos", "unk", "pad")}
    if meta.get("tokenizer.ggml.add_bos_token", kind == "llama") and (bos := named["bos"]) is not None:
        from tokenizers.processors import TemplateProcessing

        tokeniser.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
    tokeniser.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {f"{name}_token": token for name, token in named.items() if token is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_tokens, "clean_up_tokenization_spaces": False}  # fmt: skip
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def byte_level(meta: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = meta.get("tokenizer.ggml.pre")
    pre = ALIASES.get(str(pre), pre)
    if pre not in PRE_TOKENISERS:
        known = ", ".join(sorted(PRE_TOKENISERS | ALIASES.keys()))
        raise Unavailable(f"pre-tokeniser {pre!r} is not known; known: {known}", "tokenizer.ggml.pre")
    _check_types(types, {NORMAL, CONTROL, USER_DEFINED, UNUSED})
    merges = []
    for merge in _texts(meta, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=_numbered(tokens), merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises plain Exception for merges of tokens that are not there
        raise BadRequest(f"the merges do not fit the tokens: {error}", "source") from error
    tokeniser = Tokenizer(model)
    if pre == "qwen2":
        tokeniser.normalizer = normalizers.NFC()
    tokeniser.pre_tokenizer = _cut(pre)
    tokeniser.decoder = decoders.ByteLevel()
    return tokeniser


def _cut(pre: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentence_piece(meta: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    _check_types(types, {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE})
    scores = need(meta, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise BadRequest(f"{len(tokens)} tokens with {len(scores)} scores", "source")
    has_bytes = sum(kind == BYTE for kind in types) == 256
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    merges = recovered_merges(tokens, types, scores)
    tokeniser = Tokenizer(models.BPE(vocab=_numbered(tokens), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))  # fmt: skip
    leads = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokeniser.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if leads else spaces)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokeniser.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leads else steps)
    return tokeniser


def recovered_merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token of the highest score first: the order in which SentencePiece joins neighbours."""
    rank = {t: s for t, k, s in zip(tokens, types, scores, strict=True) if k in (NORMAL, USER_DEFINED)}
    found = [(-score, token, cut) for token, score in rank.items() for cut in range(1, len(token)) if token[:cut] in rank and token[cut:] in rank]  # fmt: skip
    found.sort(key=lambda entry: entry[0])
    return [(token[:cut], token[cut:]) for _, token, cut in found]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_special(tokeniser: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    kinds = list(zip(tokens, types, strict=True))
    tokeniser.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == CONTROL])
    tokeniser.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == USER_DEFINED])


def _check_types(types: Sequence[int], known: set[int]) -> None:
    if odd := set(types) - known:
        raise Unavailable(f"tokens of type {min(odd)} are not known", "tokenizer.ggml.token_type")


def _texts(meta: Mapping[str, Any], key: str) -> Sequence[str]:
    value = need(meta, key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise BadRequest(f"the field {key!r} is no list of texts", "source")
    return value


def _named(meta: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    """The special token of that name. Raises BadRequest for an id that no token has."""
    key = f"tokenizer.ggml.{ {'unk': 'unknown', 'pad': 'padding'}.get(name, name) }_token_id"
    number = meta.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise BadRequest(f"{key} is {number!r}, and there are {len(tokens)} tokens", "source")
    return tokens[number]
