"""`kill -9` of the daemon at random moments under load: what was acknowledged is there, what ended is not run again."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexrt.core import RunState
from hexrt.errors import Disconnected
from hexrt.protocol.messages import Update
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.running import CONFIG, ROOT, Running, wait_gone
from tests.seeds import seeds

MODELS = ROOT / ".models"


def agent(run: int, marks: Path) -> Workflow:
    """Some computing, two steps with an effect outside hexrt, a fan-out, and a result that depends on all of it."""

    def mark(name: str, *after: str) -> StepSpec:
        arguments = {"path": str(marks), "wait_s": 0.002}
        return StepSpec(name, "map.python", {"function": "tests.hostile:mark"}, {"value": f"{run}:{name}", "arguments": arguments}, after, idempotent=False)  # fmt: skip

    def double(name: str, value: object, over: object = None) -> StepSpec:
        return StepSpec(name, "map.python", {"function": "tests.hostile:double"}, {"value": value}, map=MapSpec(over) if over else None)  # fmt: skip

    return Workflow(
        (
            double("a", run),
            mark("one", "a"),
            StepSpec("list", "noop", inputs={"value": [1, 2, {"$ref": "a"}]}, after=("one",)),
            double("each", {"$item": ""}, {"$ref": "list"}),
            mark("two", "each"),
            StepSpec("sum", "noop", inputs={"value": {"each": {"$ref": "each"}, "marks": [{"$ref": "one"}, {"$ref": "two"}]}}),
        ),
        name=f"agent {run}",
        outputs={"sum": {"$ref": "sum"}},
    )  # fmt: skip


def load(daemon: Running, numbers: Iterator[int], marks: Path, acknowledged: dict[int, bytes]) -> None:
    """Submits until the daemon is gone, noting what was acknowledged. A number is used once, acknowledged or not."""
    try:
        with daemon.client() as client:
            for number in numbers:
                acknowledged[number] = client.submit(agent(number, marks))
    except (Disconnected, OSError):
        return


def kill_at_random(tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    marks = tmp_path / "marks"
    acknowledged: dict[int, bytes] = {}
    numbers = [itertools.count(1, 2), itertools.count(2, 2)]
    daemon = Running(tmp_path, CONFIG)
    for _ in range(kills):
        daemon.start()
        clients = [threading.Thread(target=load, args=(daemon, own, marks, acknowledged)) for own in numbers]
        for client in clients:
            client.start()
        clients[0].join(rng.uniform(0.01, 0.5))  # the moment of death
        hosts = daemon.hosts()
        daemon.kill()
        for client in clients:
            client.join()
        wait_gone(hosts)
    check(daemon, marks, acknowledged)


def check(daemon: Running, marks: Path, acknowledged: dict[int, bytes]) -> None:
    """No acknowledged run is lost, no mark is made twice, and every result is what an undisturbed run gives or honestly unknown."""
    with daemon.start() as running, running.client() as client:
        outcomes = {number: client.result(run) for number, run in acknowledged.items()}
    made = Counter(marks.read_text().split()) if marks.exists() else Counter()
    assert acknowledged and max(made.values(), default=0) <= 1, [m for m, n in made.items() if n > 1]
    unknown = 0
    for number, outcome in outcomes.items():
        names = [f"{number}:one", f"{number}:two"]
        if outcome.state is RunState.SUCCEEDED:
            assert outcome.outputs["sum"] == {"each": [2, 4, 4 * number], "marks": names}
            assert all(made[name] == 1 for name in names)
        else:
            unknown += 1
            assert {e.kind for e in outcome.errors.values()} <= {"device_lost", "skipped"}, outcome.errors
            assert any("not known" in e.message for e in outcome.errors.values())
    assert unknown < len(outcomes), "not one run came through"


@pytest.mark.parametrize("seed", seeds(1, 100))
def test_twenty_kills_lose_no_acknowledged_run_and_repeat_no_finished_step(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, 20, seed)


LLM = f"""
[daemon]
models_dir = "{MODELS}"
[pool]
workers = 1
[npu]
enabled = false
[models.smollm2]
path = "smollm2-135m"
"""


@pytest.mark.skipif(not (MODELS / "smollm2-135m").is_dir(), reason="no model prepared: run make setup")
def test_an_answer_that_was_being_written_when_the_daemon_was_killed_goes_on_and_is_not_begun_again(tmp_path: Path) -> None:  # fmt: skip
    step = StepSpec("say", "llm.generate", {"max_tokens": 48, "ignore_eos": True}, {"prompt": "Count slowly from one."})
    daemon = Running(tmp_path, LLM).start()
    seen = ""
    with daemon.client() as client:
        run = client.submit(Workflow((step,)))
        for update in client.watch(run):
            if isinstance(update, Update) and update.event == "tokens":
                seen += update.text
                if len(seen) > 20:
                    break
    hosts = daemon.hosts()
    daemon.kill()
    wait_gone(hosts)
    with daemon.start() as again, again.client() as client:
        told = "".join(u.text for u in client.watch(run) if isinstance(u, Update) and u.event == "tokens")
        answer = client.result(run).check().outputs["say"]
        undisturbed = client.run(Workflow((step,))).check().outputs["say"]
    assert answer["text"].startswith(seen) and told == answer["text"]
    assert answer == undisturbed and answer["answer_tokens"] == 48


def test_a_second_start_is_quick_when_nothing_is_open(tmp_path: Path) -> None:
    daemon = Running(tmp_path)
    with daemon, daemon.client() as client:
        runs = [client.run(Workflow((StepSpec("a", "noop", inputs={"value": i}),))).run for i in range(20)]
    with daemon.start(), daemon.client() as client:
        assert [client.result(run).outputs["a"] for run in runs] == list(range(20))
        assert {r.run for r in client.list()} == set(runs)
        assert client.timeline(runs[3]).attempts[0].device.startswith("pool:")
        assert client.status(runs[4]).steps[0].state == "done"


def test_nothing_of_a_run_without_durability_is_on_disk(tmp_path: Path) -> None:
    secret = f"secret-{os.getpid()}"
    with Running(tmp_path) as daemon, daemon.client() as client:
        client.run(Workflow((StepSpec("a", "noop", inputs={"value": secret}),)), "none").check()  # type: ignore[arg-type]
    assert not any(secret.encode() in p.read_bytes() for p in daemon.state.rglob("*") if p.is_file())


def test_a_run_whose_stored_workflow_is_lost_ends_by_name_and_the_others_go_on(tmp_path: Path) -> None:
    big = StepSpec("big", "noop", inputs={"value": b"x" * 200_000})
    asleep = StepSpec("asleep", "map.python", {"function": "tests.hostile:sleep_for_ever"}, idempotent=True)
    daemon = Running(tmp_path).start()
    with daemon.client() as client:
        lost = client.submit(Workflow((big, asleep)))
        kept = client.submit(Workflow((asleep,)))
    daemon.kill()
    blobs = [p for p in (daemon.state / "blobs").rglob("*") if p.is_file()]
    assert blobs
    for blob in blobs:
        blob.write_bytes(b"damaged")
    for _ in range(2):  # the second start finds it settled
        with daemon.start(), daemon.client() as client:
            outcome = client.result(lost)
            assert outcome.state is RunState.FAILED and "submit it again" in outcome.errors["run"].message
            assert client.status(kept).summary.state is RunState.RUNNING
            daemon.kill()
