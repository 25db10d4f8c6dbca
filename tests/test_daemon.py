"""The daemon as a whole: real processes, a real socket, a real store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexrt.client import Client
from hexrt.core import RunState
from hexrt.errors import NotFound
from hexrt.protocol.messages import Update
from hexrt.workflow.model import MapSpec, StepSpec, Workflow
from tests.notation import workflow
from tests.running import CONFIG, ROOT, Running, wait_gone


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture
def client(daemon: Running) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


def call(name: str, step: str = "x", value: Any = None, **more: Any) -> StepSpec:
    inputs = {} if value is None else {"value": value}
    if "arguments" in more:
        inputs["arguments"] = more.pop("arguments")
    return StepSpec(step, "map.python", {"function": f"tests.hostile:{name}"}, inputs, **more)


def test_values_flow_along_the_edges_through_real_workers(client: Client) -> None:
    steps = (
        StepSpec("list", "noop", inputs={"value": {"numbers": [1, 2, 3]}}),
        call("double", "each", {"$item": ""}, map=MapSpec({"$ref": "list.numbers"})),
        call("double", "last", {"$ref": "each.2"}),
    )
    outcome = client.run(Workflow(steps)).check()
    assert dict(outcome.outputs) == {"last": 12}
    status = client.status(outcome.run)
    assert [(s.id, s.state, s.tasks) for s in status.steps] == [("list", "done", 1), ("each", "done", 3), ("last", "done", 1)]  # fmt: skip


@pytest.mark.parametrize("durability", ["sync", "async", "none"])
def test_large_layered_runs_end_whatever_their_durability(client: Client, durability: Any) -> None:
    steps = [StepSpec(f"s{i}", "noop", after=tuple(f"s{j}" for j in (i - 7, i - 11, i - 13) if j >= 0)) for i in range(500)]  # fmt: skip
    outcome = client.run(Workflow(tuple(steps)), durability)
    assert outcome.state is RunState.SUCCEEDED and client.status(outcome.run).summary.steps_done == 500


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        ("raise_error", "task_failed", "ValueError: what a pity"),
        ("raise_unprintable", "task_failed", "Odd"),
        ("unsendable", "task_failed", "cannot be sent"),
        ("recursive", "task_failed", "cannot be sent"),
        ("huge", "task_failed", "more than"),
        ("leave_by_exit", "task_failed", "SystemExit"),
        ("leave_hard", "worker_died", "exit status 5"),
        ("kill_own_worker", "worker_died", "SIGKILL"),
        ("segfault", "worker_died", "SIGSEGV"),
        ("say_bye_on_the_socket", "worker_died", "died"),
        ("no_such_function", "unavailable", "no_such_function"),
    ],
)
def test_a_misbehaving_step_fails_by_name_and_leaves_the_other_branch_alone(
    client: Client, function: str, kind: str, says: str
) -> None:
    outcome = client.run(
        Workflow((call(function), call("double", "good", 4), StepSpec("behind", "noop", after=("x",))))
    )
    assert outcome.state is RunState.FAILED and outcome.outputs["good"] == 8
    assert outcome.errors["x"].kind == kind and says in outcome.errors["x"].message
    assert outcome.errors["behind"].kind == "skipped" and "'x'" in outcome.errors["behind"].message
    assert client.run(Workflow((call("double", "again", 1),))).check().outputs["again"] == 2


@pytest.mark.parametrize("function", ["sleep_for_ever", "spin"])
def test_a_step_that_never_ends_is_stopped_at_its_timeout(client: Client, function: str) -> None:
    outcome = client.run(Workflow((call(function, timeout_s=0.3),)))
    assert outcome.errors["x"].kind == "timed_out" and "0.3 s" in outcome.errors["x"].message


def test_a_step_may_print_a_gibibyte(client: Client) -> None:
    assert client.run(Workflow((call("print_a_gibibyte"),))).check().outputs["x"] == "printed"


def test_steps_that_kill_their_worker_each_time_fail_alone(client: Client) -> None:
    steps = [call("kill_own_worker", f"bad{i}", idempotent=True) for i in range(10)]
    steps += [call("double", f"good{i}", i) for i in range(20)]
    outcome = client.run(Workflow(tuple(steps)))
    assert [outcome.outputs[f"good{i}"] for i in range(20)] == [2 * i for i in range(20)]
    assert {outcome.errors[f"bad{i}"].kind for i in range(10)} == {"worker_died"}
    assert all("3 times" in outcome.errors[f"bad{i}"].message for i in range(10))


def test_a_step_whose_worker_is_killed_from_outside_is_run_again(client: Client, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    step = call("mark", "m", "m", arguments={"path": str(marks), "wait_s": 0.5}, idempotent=True)
    run = client.submit(Workflow((step,)))
    killed = False
    for update in client.watch(run):
        if isinstance(update, Update) and update.event == "started" and not killed:
            killed = True
            os.kill(next(d.facts["pid"] for d in client.devices() if d.name == update.device), signal.SIGKILL)
    assert client.result(run).check().outputs["m"] == "m"
    assert client.status(run).steps[0].attempts == 2 and killed


def test_cancelling_stops_the_work_and_what_it_started(client: Client) -> None:
    run = client.submit(
        Workflow((call("fork_and_leave", "forked"), call("sleep_for_ever", "asleep", after=("forked",))))
    )
    child = 0
    for update in client.watch(run):
        if isinstance(update, Update) and update.step == "asleep" and update.event == "started":
            before = [d.facts["pid"] for d in client.devices() if d.kind == "pool"]
            client.cancel(run, "enough")
        if not isinstance(update, Update):
            assert update.state is RunState.CANCELLED
    child = client.result(run).outputs.get("forked", 0)
    summary = client.status(run).summary
    assert summary.error is not None and "enough" in summary.error.message
    after = [d.facts["pid"] for d in client.devices() if d.kind == "pool"]
    assert len(set(before) - set(after)) <= 1 and child >= 0


def test_a_watcher_that_comes_late_is_told_what_happened(client: Client) -> None:
    run = client.run(workflow("a -> b")).run
    *updates, last = client.watch(run)
    assert [(u.step, u.event) for u in updates if isinstance(u, Update)] == [("a", "done"), ("b", "done")]
    assert last.state is RunState.SUCCEEDED  # type: ignore[union-attr]


def test_an_unknown_run_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound):
        client.status(b"0" * 16)


def test_a_failed_step_is_tried_again_as_often_as_it_says(client: Client, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    steps = (
        call("mark", "m", "m", arguments={"path": str(marks)}),
        call("raise_error", "x", retries=2, after=("m",)),
    )
    outcome = client.run(Workflow(steps))
    status = {s.id: s for s in client.status(outcome.run).steps}
    assert status["x"].attempts == 3 and marks.read_text() == "m\n"
    assert [r.attempt for r in client.timeline(outcome.run).attempts if r.step == 1] == [1, 2, 3]


def test_a_deadline_ends_a_run(client: Client) -> None:
    outcome = client.run(Workflow((call("sleep_for_ever"),), deadline_s=0.2))
    assert outcome.state is RunState.FAILED and "deadline" in outcome.errors["x"].message


def test_two_daemons_live_side_by_side_and_a_second_on_the_same_socket_or_state_is_refused(tmp_path: Path) -> None:
    with Running(tmp_path, name="one") as one, Running(tmp_path, name="two") as two:
        for running in (one, two):
            with running.client() as client:
                client.run(workflow("a")).check()
        for arguments in (
            ["--socket", str(one.socket), "--state-dir", str(tmp_path / "other")],
            ["--socket", str(tmp_path / "other.sock"), "--state-dir", str(one.state)],
        ):
            refused = subprocess.run([sys.executable, "-m", "hexrt.daemon", *arguments], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
            assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "another hexrtd" in refused.stderr
        with one.client() as client:
            client.run(workflow("a")).check()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_a_terminated_daemon_leaves_nothing_behind(tmp_path: Path) -> None:
    before = shared_memory()
    with Running(tmp_path) as running:
        with running.client() as client:
            client.run(workflow("a -> b")).check()
            hosts = running.hosts()
            assert len(hosts) == 2
            status = running.stop()
    assert status == 0
    wait_gone(hosts)
    assert not running.socket.exists() and not running.socket.with_name(running.socket.name + ".lock").exists()
    assert shared_memory() == before
    assert sorted(p.name for p in running.state.iterdir()) == ["hexrt.db"] or "hexrt.db" in {
        p.name for p in running.state.iterdir()
    }


def test_the_hosts_of_a_killed_daemon_die_with_it(tmp_path: Path) -> None:
    running = Running(tmp_path).start()
    with running.client() as client:
        client.run(workflow("a")).check()
        hosts = running.hosts()
        client.submit(Workflow((call("sleep_for_ever"),)))
    running.kill()
    wait_gone(hosts)


def test_a_drained_stop_lets_a_running_step_end_and_the_next_start_goes_on_from_there(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    written = Workflow(
        (
            call("mark", "first", "first", arguments={"path": str(marks), "wait_s": 0.5}, idempotent=False),
            call("mark", "second", {"$ref": "first"}, arguments={"path": str(marks)}, idempotent=False),
        )
    )
    running = Running(tmp_path).start()
    with running.client() as client:
        run = client.submit(written)
        for update in client.watch(run):
            if isinstance(update, Update) and update.event in ("started", "placed"):
                break
    assert running.stop() == 0
    with running.start() as again, again.client() as client:
        assert client.result(run).check().outputs["second"] == "first"
    assert marks.read_text() == "first\nfirst\n"


def test_a_hangup_reloads_what_can_change_and_keeps_running_on_a_broken_file(tmp_path: Path) -> None:
    with Running(tmp_path) as running, running.client() as client:
        running.config.write_text(CONFIG + "[limits]\nmax_steps = 2\n")
        assert running.process is not None
        running.process.send_signal(signal.SIGHUP)
        outcome = None
        for _ in range(200):
            try:
                outcome = client.run(workflow("a, b, c"))
            except Exception as error:
                assert "2 allowed" in str(error)
                break
        else:
            pytest.fail(f"the new limit never held: {outcome}")
        running.config.write_text("[limits]\nmax_stepz = 3\n")
        running.process.send_signal(signal.SIGHUP)
        client.run(workflow("a, b")).check()
    assert "max_stepz" in running.log.read_text()
