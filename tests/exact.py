"""What plain transformers says to an answer of the demo's model in float32: prompts of all lengths, ways to draw, and a judge of every token.

The judge reads prompt and answer in one forward pass of the same weights. If each token is the best (or what the same number draws) after all
that stands before it, the answer is `generate`'s; so a token is judged by its own beginning, and a near tie that went the other way hides nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from hexrt.core import TokenLogprob
from hexrt.llm.engine_pass import GREEDY, DrawRow, PassBuffers, Row
from hexrt.llm.engine_sampling import sample
from hexrt.protocol.host import Sampling

NEAR = 1e-3
"""Of logits: below it float32 may go either way."""
TOLERANCE = 1e-4
TOP = 6
"""Log-probabilities that are compared at every position, beside the drawn token's."""
VOCABULARY, PAGE = 49152, 16
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.1},
)


@dataclass(frozen=True, slots=True)
class Case:
    key: str
    prompt: tuple[int, ...]
    sampling: Sampling

    @property
    def pages(self) -> int:
        return -(-(len(self.prompt) + self.sampling.max_tokens) // PAGE)


def lengths(count: int, longest: int) -> list[int]:
    """From 1 to `longest`, each about the same factor above the one before."""
    return [round(longest ** (i / (count - 1))) for i in range(count)]


def prompts(folder: Path, count: int, longest: int) -> list[tuple[int, ...]]:
    """Pieces of the corpus; every third begins as the one before it, every fourth is of random ids."""
    from tokenizers import Tokenizer

    tokeniser = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (folder.parent / "corpus" / "leads.jsonl").read_text("utf-8").splitlines()
    chance = random.Random(4)
    made: list[tuple[int, ...]] = []
    for number, size in enumerate(lengths(count, longest)):
        ids: list[int] = list(made[-1][: len(made[-1]) * 3 // 4]) if number % 3 == 1 else []
        while len(ids) < size:
            if number % 4 == 3:
                ids.append(chance.randrange(3, VOCABULARY))
            else:
                ids += tokeniser.encode(json.loads(chance.choice(lines))["text"]).ids
        made.append(tuple(ids[:size]))
    return made


def cases(folder: Path, count: int, longest: int, answer: int) -> list[Case]:
    """Every prompt answered greedily, and every second one drawn in one of the other ways."""
    made = []
    for number, prompt in enumerate(prompts(folder, count, longest)):
        plain = Sampling(0.0, 0, 1.0, 1000 + number, (), answer, True, logprobs=TOP)
        made.append(Case(f"{number}-greedy", prompt, plain))
        if number % 2:
            way = WAYS[number // 2 % len(WAYS)]
            made.append(Case(f"{number}-{'-'.join(map(str, way))}", prompt, replace(plain, **way)))
    return made


class Judge:
    """Plain transformers on the model in `folder`, with what it has said so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = self._load(torch.float32)
        self._double: Any = None
        self.positions = self.near = self.unsure = 0
        self.worst = self.worst_logits = 0.0
        self._said: dict[tuple[int, ...], Tensor] = {}
        self._buffers = PassBuffers(torch.device("cpu"), VOCABULARY, PAGE)

    def _load(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(str(self._folder), dtype=dtype).eval()

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """[answer, vocabulary]: the row that each answer token is drawn from."""
        ids = (*prompt, *answer)
        if ids not in self._said:
            self._said[ids] = self._read(self.model, prompt, answer)
        return self._said[ids]

    @torch.inference_mode()
    def _read(self, model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waiting threads spin, which beside a host costs more than the second one gains
        ids = torch.tensor([(*prompt, *answer[:-1])])
        out = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer))
        torch.set_num_threads(threads)
        logits: Tensor = out.logits[0]
        return logits

    def check(self, case: Case, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Fails where a token is not the reference's, or a log-probability is off."""
        assert len(ids) == len(logprobs) == case.sampling.max_tokens, (case.key, ids)
        rows = self.logits(case.prompt, ids)
        self._compare(case, rows, ids, logprobs)
        scores = self._penalised(case, rows, ids)
        expected = scores.argmax(-1).tolist() if case.sampling.temperature == 0 else self._drawn(case, scores)
        leads = scores.topk(2).values
        self.positions += len(ids)
        for position, (token, best) in enumerate(zip(ids, expected, strict=True)):
            if case.sampling.temperature == 0 and float(leads[position, 0] - leads[position, 1]) <= NEAR:
                self.near += 1
                assert leads[position, 0] - scores[position, token] <= NEAR, (case.key, position, token, best)
            elif token != best:
                self.near += 1
                found = f"token {position} of {case.key} after {len(case.prompt)}: {token} and not {best}"
                assert case.sampling.temperature > 0 and self._is_on_edge(case, scores, position, token, best), found

    def _compare(self, case: Case, rows: Tensor, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        own = torch.log_softmax(rows, -1)
        told = [[(token, found.logprob), *found.top] for token, found in zip(ids, logprobs, strict=True)]
        at = torch.tensor([[token for token, _ in row] for row in told])
        values = torch.tensor([[value for _, value in row] for row in told])
        off = float((own.gather(1, at) - values).abs().max())
        best = float((own.topk(TOP).values - values[:, 1:]).abs().max())
        self.worst = max(self.worst, off, best)
        assert self._is_near(max(off, best), case.prompt, ids), f"{case.key}: log-probabilities: {off:.2g}, {best:.2g}"

    def check_logits(self, reader: Reader) -> None:
        """Of the whole vocabulary at every position of an answer; the rows are let go."""
        answer = reader.ids[len(reader.prompt) :]
        off = float((torch.stack(reader.rows) - self.logits(reader.prompt, answer)).abs().max())
        reader.rows[:] = [torch.empty(0)] * reader.most
        self.positions += len(answer)
        self.worst_logits = max(self.worst_logits, off)
        assert self._is_near(off, reader.prompt, answer), (
            f"after {len(reader.prompt)} tokens logits are off by {off:.2g}"
        )

    def _is_near(self, off: float, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Within the tolerance, or twice what transformers' own float32 is off by: some beginnings amplify every rounding."""
        if off <= TOLERANCE:
            return True
        self.unsure += 1
        if self._double is None:
            self._double = self._load(torch.float64)
        return off <= 2 * float((self.logits(prompt, answer) - self._read(self._double, prompt, answer)).abs().max())

    def _penalised(self, case: Case, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """By transformers' own repetition penalty over prompt and answer."""
        from transformers import RepetitionPenaltyLogitsProcessor

        if case.sampling.repetition_penalty == 1:
            return rows
        processor = RepetitionPenaltyLogitsProcessor(case.sampling.repetition_penalty)
        before = [torch.tensor([(*case.prompt, *ids[:position])]) for position in range(len(ids))]
        return torch.cat([processor(seen, row[None].clone()) for seen, row in zip(before, rows, strict=True)])

    def _drawn(self, case: Case, scores: Tensor, positions: Iterable[int] | None = None) -> list[int]:
        """The tokens that the case's numbers draw from `scores`, for the answer positions 0, 1, ... or those given."""
        how = replace(case.sampling, repetition_penalty=1.0, logprobs=-1)
        rows = [DrawRow(how, position) for position in (range(len(scores)) if positions is None else positions)]
        tokens: list[int] = sample(scores.contiguous(), self._buffers.draws(rows)).tokens[0].tolist()
        return tokens

    def _is_on_edge(self, case: Case, scores: Tensor, position: int, token: int, best: int) -> bool:
        """Whether logits that are off by as little as may be would draw `token` too: the number falls between two, or a cut does."""
        row, noise = scores[position], torch.Generator().manual_seed(position)
        ids = torch.arange(VOCABULARY)
        pushes = [
            torch.where(ids < at, sign, -sign) for at in (token, best, token + 1, best + 1) for sign in (1.0, -1.0)
        ]
        pushes += [torch.randint(0, 2, (VOCABULARY,), generator=noise) * 2.0 - 1 for _ in range(16)]
        pushed = row + torch.stack(pushes) * (TOLERANCE / 2)
        return token in self._drawn(case, pushed, [position] * len(pushes))


class Reader:
    """One sequence that a model reads in slices and answers greedily: `rows` are the logits that its answer comes from."""

    def __init__(self, case: Case, frames: Sequence[int]) -> None:
        self.prompt, self.most = case.prompt, case.sampling.max_tokens
        self.ids = list(case.prompt)
        self.frames = np.array(frames, np.int32)
        self.rows: list[Tensor] = []
        self._read = 0

    @property
    def is_done(self) -> bool:
        return len(self.rows) == self.most

    def slice(self, most: int) -> Row:
        ids = self.ids[self._read : self._read + most]
        row = Row(ids, self.frames, self._read, GREEDY if self._read + len(ids) == len(self.ids) else None)
        self._read += len(ids)
        return row

    def take(self, logits: Tensor) -> None:
        self.rows.append(logits.clone())
        self.ids.append(int(logits.argmax()))
