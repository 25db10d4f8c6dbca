"""LLM steps through a real hexrtd: conversations, shared prefills, refusals and cancelling, on one loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hexrt.client import Client
from hexrt.core import RunState
from hexrt.protocol.messages import Accepted, Update
from hexrt.workflow.build import WorkflowBuilder
from tests.llm_support import model_config
from tests.running import Running, settled

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)  # the first step waits for torch and the model


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Running(tmp_path_factory.mktemp("llm"), model_config()) as daemon, daemon.client() as client:
        yield client


def pages(client: Client) -> tuple[float, float]:
    """Those that nobody has but prompts to come with the same beginning, and all."""
    found = settled(client)
    return found["cpu:0_small_frames_free"] + found["cpu:0_small_known_pages"], found["cpu:0_small_frames"]


def test_steps_go_on_from_one_another_and_give_every_page_back(client: Client) -> None:
    w = WorkflowBuilder()
    first = w.step(
        "llm.generate", id="first", inputs={"prompt": "What is the capital of France?"}, params={"max_tokens": 30}
    )
    then = w.step(
        "llm.generate", id="then", inputs={"prompt": "And of Spain?", "continue_from": first}, params={"max_tokens": 20}
    )
    prefix = w.step("llm.prefill", id="prefix", inputs={"prompt": "Write a line about the sea."})
    decoded = [
        w.step("llm.decode", inputs={"prefix": prefix}, params={"max_tokens": 10, "temperature": 0.8, "seed": seed})
        for seed in (1, 1, 2)
    ]
    for name, step in (("first", first), ("then", then), ("a", decoded[0]), ("b", decoded[1]), ("c", decoded[2])):
        w.output(name, step)
    outcome = client.run(w.build())
    outcome.check()
    outputs: dict[str, Any] = dict(outcome.outputs)
    assert outputs["first"]["text"] == "The capital of France is Paris."
    assert outputs["then"]["ids"][: len(outputs["first"]["ids"])] == outputs["first"]["ids"]
    assert "Madrid" in outputs["then"]["text"]
    assert outputs["a"] == outputs["b"] != outputs["c"]
    assert client.statistics()["cpu:0_small_shared_tokens"] > 0
    free, all_ = pages(client)
    assert free == all_


def test_a_refused_prompt_or_model_fails_its_own_step_alone(client: Client) -> None:
    w = WorkflowBuilder()
    w.step("llm.generate", id="long", inputs={"prompt": "x " * 9000})
    w.step("llm.generate", id="nobody", inputs={"prompt": "x"}, params={"model": "nope"})
    w.step("llm.generate", id="empty", inputs={"prompt": ""})
    w.step("llm.generate", id="fine", inputs={"prompt": "Say yes."}, params={"max_tokens": 4})
    outcome = client.run(w.build())
    assert outcome.state is RunState.FAILED
    assert {name: (error.kind, error.where) for name, error in outcome.errors.items()} == {
        "long": ("bad_request", "long.inputs.prompt"),
        "nobody": ("not_found", "nobody.params.model"),
        "empty": ("bad_request", "empty.inputs.prompt"),
    }
    assert "holds 8192" in outcome.errors["long"].message
    assert "configured are: small" in outcome.errors["nobody"].message
    answer: dict[str, Any] = outcome.outputs["fine"]
    assert answer["answer_tokens"] == len(answer["ids"]) - answer["prompt_tokens"] <= 4


def test_cancelling_while_tokens_come_gives_the_pages_back(client: Client) -> None:
    w = WorkflowBuilder()
    w.step("llm.generate", inputs={"prompt": "Tell a long story."}, params={"max_tokens": 2000, "ignore_eos": True})
    run = b""
    for update in client.follow(w.build()):
        if isinstance(update, Accepted):
            run = update.run
        if isinstance(update, Update) and update.event == "tokens":
            break
    client.cancel(run)  # is answered once no chunk names the sequence any more
    free, all_ = pages(client)
    assert free == all_
    assert client.result(run).state is RunState.CANCELLED


def test_an_answer_that_takes_too_long_is_given_up_by_name_and_gives_its_pages_back(client: Client) -> None:
    w = WorkflowBuilder()
    params = {"max_tokens": 4000, "ignore_eos": True}
    w.step("llm.generate", id="long", inputs={"prompt": "Tell a long story."}, params=params, timeout_s=0.5)
    outcome = client.run(w.build())
    assert outcome.errors["long"].kind == "timed_out" and "0.5 s" in outcome.errors["long"].message
    free, all_ = pages(client)
    assert free == all_
