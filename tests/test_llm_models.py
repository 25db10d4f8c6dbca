"""Several real models on one device: weights come and go with what is asked, memory is given back, and no token is another for it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexrt.client import Client
from hexrt.errors import BadRequest
from hexrt.protocol.host import HostFailed, HostFinished, LoadModel, UnloadModel
from hexrt.workflow.build import WorkflowBuilder
from hexrt.workflow.model import Workflow
from tests.llm_families import make
from tests.llm_support import LLM_ONLY, HostProcess
from tests.running import Running

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)  # hosts wait for torch

MIB = 1 << 20
LARGE = {"hidden_size": 512, "intermediate_size": 4096}  # 25 million parameters
SMALL = {"hidden_size": 128, "intermediate_size": 256}  # half a million
KINDS = {"a": "llama", "b": "qwen2", "c": "gemma"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, family in KINDS.items():
        make(folder / name, family, **SMALL)
    make(folder / "large", "llama", **LARGE)
    return folder


# --- a host ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[HostProcess]:
    host = HostProcess(models, 32 * MIB)
    yield host
    host.close()


def resident(host: HostProcess) -> int:
    pages = int(Path(f"/proc/{host.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def unload(host: HostProcess, name: str) -> None:
    assert isinstance(host.ask(UnloadModel(host.command(), name)), HostFinished)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unloaded_model_gives_most_of_its_memory_back_and_others_stay(host: HostProcess, dtype: str) -> None:
    host.load("a", "a")
    host.load("large", "large", dtype)
    unload(host, "large")  # what is loaded once and for all is there now
    before = resident(host)
    host.load("large", "large", dtype)
    grown = resident(host) - before
    assert grown > 40 * MIB
    unload(host, "large")
    assert resident(host) - before < grown // 2  # the allocator keeps some megabytes, now more, now fewer
    unload(host, "a")


def test_a_load_that_finds_too_little_memory_fails_by_name_and_leaves_the_host_as_it_was(host: HostProcess) -> None:
    host.load("large", "large")
    unload(host, "large")
    pid = host.process.pid
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.prlimit(pid, resource.RLIMIT_AS, (size + 8 * MIB, resource.RLIM_INFINITY))
    try:
        report = host.ask(LoadModel(host.command(), "large", "large", "float32", 16))
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert isinstance(report, HostFailed) and report.error.kind == "out_of_memory", report
    assert "'large'" in report.error.message and "/" not in report.error.message
    host.load("large", "large")
    unload(host, "large")


# --- a daemon -------------------------------------------------------------------------------------------------------------


def config(models: Path, weights_mib: int) -> str:
    listed = "".join(f'[models.{name}]\npath = "{name}"\n' for name in (*KINDS, "large"))
    return f"{LLM_ONLY.format(models_dir=models)}[cpu]\narena_mib = 32\nweights_mib = {weights_mib}\n{listed}"


def say(w: WorkflowBuilder, step: str, model: str, prompt: str, **more: Any) -> Any:
    params = {"model": model, "max_tokens": 12, "ignore_eos": True, "numerics": "exact"}
    made = w.step("llm.generate", id=step, inputs={"prompt": prompt} | more.pop("inputs", {}), params=params, **more)
    w.output(step, made["ids"])
    return made


def conversation(name: str, first: str, between: str) -> Workflow:
    """One model answers, then another, then the first one goes on."""
    w = WorkflowBuilder(name)
    start = say(w, "start", first, f"Hi, {name}.")
    say(w, "between", between, "And you?", after=[start])
    say(w, "then", first, "So?", inputs={"continue_from": start}, after=["between"])
    return w.build()


def answers(client: Client, pairs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of conversations that go on at the same time, by the models that they are with."""
    runs = {pair: client.submit(conversation(pair, *pair[:2])) for pair in pairs}
    return {name: dict(client.result(run).check().outputs) for name, run in runs.items()}


FEW, MANY = ("ab", "ca"), ("ab", "bc", "ca", "ac", "cb", "ba", "ab2", "bc2", "ca2")


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.campaign)], ids=len)
def expected(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """With room for all of them."""
    with Running(tmp_path_factory.mktemp("ample"), config(models, 0)) as daemon, daemon.client() as client:
        found = answers(client, request.param)
        states = {m.name: m.places[0].state for m in client.models().models}
        assert states == {"a": "loaded", "b": "loaded", "c": "loaded", "large": "unloaded"}
        return found


def test_with_room_for_one_model_all_runs_end_with_the_same_tokens(
    models: Path, expected: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with Running(tmp_path, config(models, 3)) as daemon, daemon.client() as client:
        assert answers(client, tuple(expected)) == expected
        found = client.models()
        states = sorted(m.places[0].state for m in found.models)
        assert states == ["loaded", "refused", "unloaded", "unloaded"]
        assert 0 < found.budgets[0].used_bytes <= found.budgets[0].budget_bytes == 3 * MIB
        assert all(m.places[0].answer_tokens for m in found.models if m.name != "large")
        counted = client.statistics()
        shared = sum(counted[f"cpu:0_{name}_shared_tokens"] for name in KINDS)
        assert shared > 0, "conversations went on from pages whose model had been unloaded"
        assert all(counted[f"cpu:0_{name}_live"] == counted[f"cpu:0_{name}_retained"] == 0 for name in KINDS)
        with pytest.raises(BadRequest, match=r"'large' take \d+ MiB, .* 3 MiB together: raise cpu.weights_mib"):
            w = WorkflowBuilder()
            say(w, "s", "large", "Hi.")
            client.submit(w.build())
