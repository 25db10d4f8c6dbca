"""The demo's workflows: the corpus becomes an index, and each question a graph of an agent's steps.

    embed > search > prompt > answer > tool ------------------------.
                                 `---------------.                  |
    draft > program > trial > evidence > verdict > notes > summary > report
    picture, letters -----------------------------------------------'

Pure but for `read_corpus` and `read_pictures`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hexrt.cli.demo_questions import Question
from hexrt.errors import Unavailable
from hexrt.workflow.build import Reference, WorkflowBuilder
from hexrt.workflow.model import Workflow

INDEX = "demo"
BATCH = 100
PICTURES = (".png", ".jpg", ".jpeg", ".webp")

PROMPT = """Use these notes to answer the question in one sentence.

{% for document in documents %}{{ document.text[:450] }}

{% endfor %}Question: {{ question }}"""

PROGRAM = """# the model's program
{% set part = text.split("```")[1] if "```" in text else text %}\
{{ part[6:] if part[:6] == "python" else part }}
"""

EVIDENCE = """{{ {"stdout": trial.stdout, "stderr": trial.stderr, "exit_code": trial.exit_code} | tojson }}"""

NOTES = r"""Summarise in one sentence:

{{ answer }} {{ task[:1] | upper }}{{ task[1:] }} is {{ result.split("\n")[0] }} {{ unit }}."""

REPORT = r"""{{ summary | trim }}
{{ task[:1] | upper }}{{ task[1:] }}: {{ result.split("\n")[0] }} {{ unit }}.
The picture shows: {{ label }}. The page begins: {{ (letters.split() | join(" "))[:60] }}...
To read: {{ words }} words, {{ seconds }} seconds."""


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    content: bytes
    has_text: bool


def read_corpus(models: Path, count: int, titles: Sequence[str]) -> list[Document]:
    """`count` documents: those called `titles`, and others spread evenly over the corpus. Raises Unavailable."""
    try:
        with (models / "corpus" / "leads.jsonl").open(encoding="utf-8") as file:
            documents = [Document(entry["title"], entry["text"]) for entry in map(json.loads, file)]
    except OSError as error:
        raise Unavailable(f"there is no corpus in {models}: run `make setup`", "--models-dir") from error
    wanted = [d for d in documents if d.title in titles]
    others = [d for d in documents if d.title not in titles]
    room = min(max(0, count - len(wanted)), len(others))
    return wanted + [others[i * len(others) // room] for i in range(room)]


def read_pictures(folder: Path) -> list[Picture]:
    """Raises Unavailable where there is none."""
    found = sorted(p for p in folder.glob("*") if p.suffix.lower() in PICTURES)
    if not found:
        raise Unavailable(f"there are no pictures in {folder}: name a folder that has some", "--pictures")
    return [Picture(p.stem, p.read_bytes(), p.stem in ("page", "text")) for p in found]


def corpus_workflow(documents: Sequence[Document]) -> Workflow:
    """Embeds the documents in batches and builds one index of them."""
    w = WorkflowBuilder("corpus")
    index = None
    for number, first in enumerate(range(0, len(documents), BATCH)):
        batch = documents[first : first + BATCH]
        vectors = w.step("embed.text", id=f"embed_{number}", inputs={"texts": [f"{d.title}. {d.text}" for d in batch]})
        inputs = {"vectors": vectors, "documents": [{"title": d.title, "text": d.text} for d in batch]}
        if index is None:
            index = w.step("index.build", id="build", params={"name": INDEX}, inputs=inputs)
        else:
            index = w.step("index.add", id=f"add_{number}", params={"name": INDEX}, inputs=inputs, after=index)
    return w.build()


def warm_up_workflow(pool: Sequence[str], picture: Picture, letters: Picture) -> Workflow:
    """Runs once what the agents will run, on each worker, so that neither way of running them pays for loading."""
    w = WorkflowBuilder("warm up")
    w.step("llm.generate", id="model", params={"max_tokens": 2}, inputs={"prompt": "Hello."})
    w.step("image.encode", id="picture", inputs={"image": picture.content})
    for number, device in enumerate(pool):
        w.step("image.text", id=f"letters_{number}", inputs={"image": letters.content}, device=device)
        w.step("embed.text", id=f"embed_{number}", inputs={"texts": ["warm"]}, device=device)
        w.step("text.template", id=f"template_{number}", params={"template": "warm"}, device=device)
        w.step("code.python", id=f"code_{number}", inputs={"code": "print(1)"}, device=device)
    return w.build()


def agent_workflow(question: Question, picture: Picture, letters: Picture, tool_url: str) -> Workflow:
    """One agent: retrieves and answers, writes and runs a program, looks at pictures, calls the tool, reports."""
    w = WorkflowBuilder(question.title)
    embed = w.step("embed.text", id="embed", inputs={"texts": [question.text]})
    search = w.step("search.vector", id="search", params={"index": INDEX, "k": 2}, inputs={"vectors": embed})
    prompt = _fill(w, "prompt", PROMPT, documents=search["documents"][0], question=question.text)
    answer = w.step("llm.generate", id="answer", params={"max_tokens": 40}, inputs={"prompt": prompt})
    post = {"url": tool_url, "method": "POST"}
    tool = w.step("tool.http", id="tool", params=post, inputs={"json": {"text": answer["text"]}})["json"]
    program, result = _program(w, question)
    seen = w.step("image.encode", id="picture", inputs={"image": picture.content})["label"]
    read = w.step("image.text", id="letters", inputs={"image": letters.content})["text"]
    said: dict[str, Reference | str] = {"result": result, "task": question.task, "unit": question.unit}
    notes = _fill(w, "notes", NOTES, answer=answer["text"], **said)
    summary = w.step("llm.generate", id="summary", params={"max_tokens": 40}, inputs={"prompt": notes})["text"]
    told = {"label": seen, "letters": read, "words": tool["words"], "seconds": tool["seconds"]}
    report = _fill(w, "report", REPORT, summary=summary, **told, **said)
    outputs = {
        "found": search["documents"][0][0]["title"],
        "answer": answer["text"],
        "program": program,
        "verdict": result,
    }
    outputs |= {"label": seen, "letters": read, "tool": tool, "summary": summary, "report": report}
    for name, reference in outputs.items():
        w.output(name, reference)
    return w.build()


def _fill(w: WorkflowBuilder, step: str, template: str, **values: Reference | str) -> Reference:
    return w.step("text.template", id=step, params={"template": template}, inputs={"values": values})


def _program(w: WorkflowBuilder, question: Question) -> tuple[Reference, Reference]:
    """The model's program, run as it is, and what the fixed one printed, which judges it and gives the result in any case."""
    ask = f"Write a short Python program that prints {question.task}. Reply with code only."
    params = {"max_tokens": 72, "stop": ["\n```"]}
    draft = w.step("llm.generate", id="draft", params=params, inputs={"prompt": ask})
    program = _fill(w, "program", PROGRAM, text=draft["text"])
    trial = w.step("code.python", id="trial", params={"check": False, "timeout_s": 5.0}, inputs={"code": program})
    evidence = _fill(w, "evidence", EVIDENCE, trial=trial)
    verdict = w.step("code.python", id="verdict", inputs={"code": question.fixed, "stdin": evidence})
    return program, verdict["stdout"]


def one_at_a_time(workflow: Workflow) -> Workflow:
    """The same steps, each after the one before it. The steps are in an order that their data allows."""
    steps = list(workflow.steps)
    for i in range(1, len(steps)):
        after = (*steps[i].after, steps[i - 1].id)
        steps[i] = msgspec.structs.replace(steps[i], after=tuple(dict.fromkeys(after)))
    return msgspec.structs.replace(workflow, name=f"{workflow.name}, one step at a time", steps=tuple(steps))
