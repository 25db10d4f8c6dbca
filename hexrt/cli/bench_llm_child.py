"""What `hexrt bench llm` measures with torch, each in a process of its own: the machine, attention over pages, transformers, other forms' answers.

Run as `python -m hexrt.cli.bench_llm_child ROLE FOLDER SETTINGS`; writes rows.json, findings by name, into FOLDER. Owns its process only.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexrt.cli.bench_llm_load import PAGE_TOKENS, Findings, Sizes, prompt_ids
from hexrt.cli.demo_questions import QUESTIONS

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hexrt.llm.engine_model import PagedModel

READ_BYTES = 512 << 20
REPEATS = 7
ROWS, CONTEXT = 16, 512
"""Of the comparison of attention: sequences that decode, and the tokens of each; a slice is of one sequence."""
CODE = "Write a short Python program that prints {}. Reply with code only."


def _best(act: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of `repeats` calls, after one that is not counted."""
    took = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        act()
        took.append(time.perf_counter() - start)
    return min(took[1:])


# --- the machine --------------------------------------------------------------------------------------------------


def measure_memory(settings: dict[str, Any]) -> Findings:
    """Bytes read a second, by all threads: the better of a sum and of a product with a vector, which is what decoding does."""
    import torch

    values = torch.ones(READ_BYTES // 4)
    matrix, vector = values.view(-1, 4096), torch.ones(4096)
    took = min(_best(values.sum), _best(lambda: torch.mv(matrix, vector)))
    found = Findings()
    found.add("memory read", READ_BYTES / took / 1e9, "GB/s")
    return found


def measure_attention(settings: dict[str, Any]) -> Findings:
    """Attention over scattered pages and torch's over K and V in one piece, in float32, over the layers of the model, whose K and V fill no cache."""
    import torch

    from hexrt.kernels.native_attention import choose

    layers, heads, kv_heads, dimension = (settings[name] for name in ("layers", "heads", "kv_heads", "head_dim"))
    attend, why = choose(torch.float32, torch.float32, dimension)
    found = Findings()
    for name, rows, count in (("decode 16", ROWS, 1), ("prefill 512", 1, CONTEXT)):
        paged = _paged(attend, rows, count, layers, heads, kv_heads, dimension)
        whole = _contiguous(rows, count, layers, heads, kv_heads, dimension)
        note = f"{attend.name}, {rows} x {CONTEXT} tokens, {layers} layers" + (f"; {why}" if why else "")
        found.add(f"paged {name}", rows * count / _best(paged), "tokens/s", note)
        found.add(f"contiguous {name}", rows * count / min(map(_best, whole)), "tokens/s")
    return found


def _paged(attend: Any, rows: int, count: int, layers: int, heads: int, kv_heads: int, dimension: int) -> Callable[[], None]:  # fmt: skip
    import torch

    from hexrt.kernels.attention import PassTensors

    width = CONTEXT // PAGE_TOKENS
    tables = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).int().view(rows, width)
    arena = torch.randn(rows * width, layers, 2, PAGE_TOKENS, kv_heads, dimension)
    at = torch.arange(CONTEXT - count, CONTEXT)
    slots = (tables[:, at // PAGE_TOKENS].long() * PAGE_TOKENS + at % PAGE_TOKENS).flatten()
    starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32)
    tensors = PassTensors(slots, tables, starts, torch.full((rows,), CONTEXT, dtype=torch.int32), count)
    query = torch.randn(rows * count, heads, dimension)
    key, value = torch.randn(2, rows * count, kv_heads, dimension)
    out = torch.empty_like(query)

    def run() -> None:
        for layer in range(layers):
            attend(query, key, value, arena, layer, tensors, scale=dimension**-0.5, out=out)

    return run


def _contiguous(rows: int, count: int, layers: int, heads: int, kv_heads: int, dimension: int) -> list[Callable[[], None]]:  # fmt: skip
    """Ways to call torch's attention; the fastest counts. None of them writes new K and V, which the paged form does."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = torch.randn(2, layers, rows, kv_heads, CONTEXT, dimension)
    query = torch.randn(rows, heads, count, dimension)
    causal = count > 1

    def shared() -> None:
        for layer in range(layers):
            scaled_dot_product_attention(query, keys[layer], values[layer], is_causal=causal, enable_gqa=True)

    def grouped() -> None:
        """The heads of a group stand as queries of it."""
        queries = query.view(rows, kv_heads, heads // kv_heads, dimension)
        for layer in range(layers):
            scaled_dot_product_attention(queries, keys[layer], values[layer])

    def batched() -> None:
        """The heads of a group stand as a batch over one K and V."""
        queries = query.view(kv_heads, heads // kv_heads, count, dimension).transpose(0, 1)
        size = (len(queries), -1, -1, -1)
        for layer in range(layers):
            scaled_dot_product_attention(queries, keys[layer].expand(size), values[layer].expand(size), is_causal=True)

    return [shared, batched] if causal else [shared, grouped]


# --- transformers -------------------------------------------------------------------------------------------------


def measure_transformers(settings: dict[str, Any]) -> Findings:
    """`generate` of the weights as they are: prompts of one length in one batch, and the time from its first token to its last."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    sizes = Sizes(**settings["sizes"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    model.eval()
    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds to the first token; `times` holds when each came."""
        ids = torch.tensor(prompts)
        times.clear()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, stopping_criteria=[Clock()])  # fmt: skip
        return times[0] - start

    found = Findings()
    prefills = [prompt_ids(f"prefill {number}", sizes.prefill, settings["vocabulary"]) for number in range(sizes.repeats + 1)]  # fmt: skip
    speed = sizes.prefill / min(answer([ids], 1) for ids in prefills)
    found.add(f"prefill {sizes.prefill}", speed, "tokens/s")
    for count in sizes.sequences:
        if (expected_s := count * sizes.context / speed) > sizes.most_s / 2:
            found.add(f"decode {count}", None, "tokens/s", f"left out: reading its prompts would take about {expected_s:.0f} s")  # fmt: skip
            continue
        rates = []
        for _ in range(1 if count > 4 else 2):
            answer([prompt_ids(f"decode {number}", sizes.context, settings["vocabulary"]) for number in range(count)], sizes.answer)  # fmt: skip
            rates.append(count * (len(times) - 1) / (times[-1] - times[0]))
        found.add(f"decode {count}", max(rates), "tokens/s")
    return found


# --- answers of other forms ---------------------------------------------------------------------------------------


class _Answers:
    """The demo's prompts in the pages of one form of the model; each step reads one more token of each."""

    def __init__(self, settings: dict[str, Any], form: dict[str, str], prompts: Sequence[Sequence[int]]) -> None:
        import numpy as np

        from hexrt.llm.engine_load import read_shape
        from hexrt.llm.engine_model import PagedModel

        path, answer = Path(settings["model"]), Sizes(**settings["sizes"]).answer
        widths = [-(-(len(ids) + answer) // PAGE_TOKENS) for ids in prompts]
        page_bytes = read_shape("bench", path).page_bytes(form["kv_dtype"], PAGE_TOKENS) + mmap.PAGESIZE
        self._memory = mmap.mmap(-1, sum(widths) * page_bytes)
        self.model: PagedModel = PagedModel(
            "bench", path, form["dtype"], memoryview(self._memory), PAGE_TOKENS, form["weights"], form["kv_dtype"],
            settings["threads"],
        )  # fmt: skip
        firsts = [sum(widths[:number]) for number in range(len(widths))]
        self._frames: list[np.ndarray[Any, Any]] = [np.arange(first, first + width, dtype=np.int32) for first, width in zip(firsts, widths, strict=True)]  # fmt: skip
        self._read = [0] * len(prompts)

    def read(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probabilities of what follows each prompt and these further tokens of it, [prompts, vocabulary]."""
        import torch

        from hexrt.llm.engine_pass import GREEDY, Row

        rows = [Row(list(new), frames, start, GREEDY) for new, frames, start in zip(ids, self._frames, self._read, strict=True)]  # fmt: skip
        self._read = [start + len(new) for start, new in zip(self._read, ids, strict=True)]
        return torch.log_softmax(self.model.run_over(rows, self.model.arena)[0], -1)


def measure_divergence(settings: dict[str, Any]) -> Findings:
    """How often a form would go on otherwise than float32 did, which it is made to follow, and how far its distributions are."""
    import torch

    sizes = Sizes(**settings["sizes"])
    prompts = _demo_prompts(settings, sizes.prompts)
    exact = _Answers(settings, settings["exact"], prompts)
    likely = [exact.read(prompts)]
    while len(likely) < sizes.answer:
        likely.append(exact.read([[token] for token in likely[-1].argmax(-1).tolist()]))
    ends = torch.tensor(sorted(exact.model.eos) or [-1])
    del exact
    said = torch.stack([each.argmax(-1) for each in likely], 1)  # [prompts, answer]
    ended = torch.isin(said, ends).int()
    counts = (ended.cumsum(1) - ended) == 0  # up to the end of the answer, and with it
    found = Findings()
    for form in settings["forms"]:
        other = _Answers(settings, form, prompts)
        differs, kl = torch.zeros(said.shape, dtype=torch.bool), torch.zeros(said.shape)
        for step, want in enumerate(likely):
            got = other.read(prompts if not step else [[token] for token in said[:, step - 1].tolist()])
            differs[:, step] = got.argmax(-1) != said[:, step]
            kl[:, step] = (want.exp() * (want - got)).sum(-1)
        note = f"{int(counts.sum())} tokens of {len(prompts)} of the demo's prompts"
        found.add(f"{form['name']} divergence", float(differs[counts].float().mean()) * 100, "%", note)
        found.add(f"{form['name']} KL", float(kl[counts].mean()), "nats", note)
        del other
    return found


def _demo_prompts(settings: dict[str, Any], count: int) -> list[list[int]]:
    from hexrt.llm.tokenise import load_vocabulary, tokenise

    vocabulary = load_vocabulary(Path(settings["model"]), "bench")
    texts = [text for question in QUESTIONS for text in (question.text, CODE.format(question.task))]
    return [tokenise(vocabulary, "bench", vocabulary.template is None, {"prompt": text}) for text in texts[:count]]


ROLES = {
    "memory": measure_memory,
    "attention": measure_attention,
    "transformers": measure_transformers,
    "divergence": measure_divergence,
}


def main(arguments: Sequence[str]) -> None:
    role, folder, settings = arguments[0], Path(arguments[1]), json.loads(arguments[2])
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if role != "transformers":  # a peer waits as it does by default, hexrt as its hosts do
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch

    torch.set_num_threads(settings["threads"])
    with torch.inference_mode():
        found = ROLES[role](settings).found
    rows = [{"name": each.what, **dataclasses.asdict(each)} for each in found]
    (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
