"""The demo's questions on a real model: the same answers, token for token, whether all pages fit the device or hardly any do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hexrt.cli.demo_questions import QUESTIONS
from hexrt.cli.demo_workflow import read_corpus
from hexrt.client import Client
from hexrt.workflow.build import WorkflowBuilder
from hexrt.workflow.model import Workflow
from tests.llm_support import model_config
from tests.running import Running
from tests.seeds import seeds

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)

MODELS = Path(__file__).parents[1] / ".models"
AMPLE = (512, 1024, 0)
TIGHT = (20, 22, 256)
"""Twenty-eight pages on the device: the largest conversation and two chunks. Little more in HOST."""
NOTE = "Use these notes to answer the question in one sentence.\n\n{}\n\nQuestion: {}"


def conversation(title: str, text: str, note: str) -> Workflow:
    """An agent's: it answers from notes, drafts a program, and goes on from both."""
    w = WorkflowBuilder(title)

    def say(step: str, tokens: int, prompt: str, **more: Any) -> Any:
        return w.step(
            "llm.generate",
            id=step,
            inputs={"prompt": prompt, **more},
            params={"max_tokens": tokens, "numerics": "exact"},
        )

    answer = say("answer", 16, NOTE.format(note[:600], text))
    draft = say("draft", 10, f"Write a short Python program about {title}. Reply with code only.")
    more = say("more", 10, "Say it in other words.", continue_from=answer)
    last = say("last", 8, "Why?", continue_from=more)
    for name, step in (("answer", answer), ("draft", draft), ("more", more), ("last", last)):
        w.output(name, step["ids"])
    return w.build()


def workflows(count: int) -> list[Workflow]:
    titles = [question.title for question in QUESTIONS]
    notes = {document.title: document.text for document in read_corpus(MODELS, len(titles), titles)}
    return [conversation(q.title, q.text, notes[q.title]) for q in QUESTIONS[:count]]


def config(arena: int, host: int, nvme: int) -> str:
    return model_config(f"[cpu]\narena_mib = {arena}\n[memory]\nhost_mib = {host}\nnvme_mib = {nvme}\n")


def answers(client: Client, count: int) -> dict[str, Any]:
    runs = [(workflow.name, client.submit(workflow)) for workflow in workflows(count)]
    return {name: dict(client.result(run).check().outputs) for name, run in runs}


@pytest.fixture(scope="module", params=[3, pytest.param(6, marks=pytest.mark.campaign)], ids="{}-questions".format)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Running(tmp_path_factory.mktemp("ample"), config(*AMPLE)) as daemon, daemon.client() as client:
        return answers(client, request.param)


def test_with_hardly_any_room_on_the_device_the_answers_are_the_same(expected: dict[str, Any], tmp_path: Path) -> None:
    with Running(tmp_path, config(*TIGHT)) as daemon, daemon.client() as client:
        assert answers(client, len(expected)) == expected
        found = client.statistics()
        assert found["memory_stored_pages"] > 0 and found["memory_loaded_pages"] > 0, found
        assert found["memory_faults"] == 0


def test_pages_used_in_place_give_the_same_answers(expected: dict[str, Any], tmp_path: Path) -> None:
    with Running(tmp_path, config(0, 24, 256)) as daemon, daemon.client() as client:
        assert answers(client, len(expected)) == expected
        assert client.statistics()["cpu:0_small_frames"] == 24 * 1024 // 720


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_device_host_killed_while_pages_move_changes_no_token(
    expected: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    with Running(tmp_path, config(*TIGHT)) as daemon, daemon.client() as client:
        runs = [(workflow.name, client.submit(workflow)) for workflow in workflows(len(expected))]
        moved = 1 + seed * 11 % 60
        while (found := client.statistics())["memory_stored_pages"] + found["memory_loaded_pages"] < moved and found[
            "open_runs"
        ]:
            pass
        host = next(d for d in client.devices() if d.name == "cpu:0")
        os.kill(host.facts["pid"], signal.SIGKILL)
        assert {name: dict(client.result(run).check().outputs) for name, run in runs} == expected
