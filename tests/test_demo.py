"""The demo: its tool, its programs, its views and report alone, and the whole of it for one question."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from hexrt.cli.demo_questions import QUESTIONS, Question
from hexrt.cli.demo_report import busy_ns, span_ns, step_times
from hexrt.cli.demo_tool import LocalTool, readability
from hexrt.cli.demo_view import LiveView, PlainView, View
from hexrt.cli.demo_workflow import Picture, agent_workflow, one_at_a_time
from hexrt.cli.own_daemon import OwnDaemon, toml
from hexrt.core import RunState
from hexrt.errors import Disconnected, ErrorRecord
from hexrt.ops.registry import load_ops
from hexrt.protocol.messages import AttemptRecord, RunTimeline, Update
from hexrt.workflow.check import GraphLimits, check_workflow
from tests.trace_reader import ERRORS, opened

MODELS = Path(__file__).parents[1] / ".models"


def judged(question: Question, stdout: str, exit_code: int = 0, stderr: str = "") -> dict[str, object]:
    trial = json.dumps({"stdout": stdout, "stderr": stderr, "exit_code": exit_code})
    done = subprocess.run(
        [sys.executable, "-c", question.fixed], input=trial, capture_output=True, text=True, check=True
    )
    result, verdict = done.stdout.splitlines()
    return {"result": float(result.replace(",", "")), **json.loads(verdict)}


def test_the_fixed_program_says_whose_result_it_is() -> None:
    everest = QUESTIONS[0]
    assert judged(everest, "29,031.7 feet\n") == {
        "result": 29031.69384,
        "by": "model",
        "why": "the model's ran and is right",
    }
    assert judged(everest, "8848\n") == {
        "result": 29031.69384,
        "by": "fixed",
        "why": "the model's ran but printed '8848'",
    }
    assert judged(everest, "") == {"result": 29031.69384, "by": "fixed", "why": "the model's ran but printed nothing"}
    failed = judged(everest, "29031.7", exit_code=1, stderr="Traceback\nNameError: name 'x' is not defined\n")
    assert (failed["by"], failed["why"]) == ("fixed", "the model's did not run: NameError: name 'x' is not defined")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.title)
def test_every_fixed_program_runs(question: Question) -> None:
    verdict = judged(question, "nothing of use")
    assert verdict["by"] == "fixed" and isinstance(verdict["result"], int | float) and verdict["result"] > 0


def test_readability_counts_words_sentences_and_ease() -> None:
    assert readability("The cat sat on the mat.") == {"words": 6, "sentences": 1, "seconds": 1.6, "ease": 116.1}
    assert readability("") == {"words": 0, "sentences": 1, "seconds": 0.0, "ease": 206.8}


def test_the_local_tool_answers_and_refuses_what_it_cannot_read() -> None:
    with LocalTool() as tool, httpx.Client() as http:
        assert http.post(tool.url, json={"text": "One two. Three!"}).json()["sentences"] == 2
        assert http.post(tool.url, content=b"{").status_code == 400
        assert http.post(tool.url, content=b"[" * 5000).status_code == 400
        assert http.post(tool.url, json={"text": "x" * 70_000}).status_code == 413
        assert http.post(tool.url + "x", json={}).status_code == 404


def test_the_configuration_that_the_demo_writes_is_read_back_the_same() -> None:
    tables = {
        "pool": {"workers": 2},
        'ops."tool.http"': {"allow": ["127.0.0.1:80", 'a"\\\n']},
        "x": {"on": True, "s": 0.5},
    }
    assert tomllib.loads(toml(tables)) == {
        "pool": {"workers": 2},
        "ops": {"tool.http": {"allow": ["127.0.0.1:80", 'a"\\\n']}},
        "x": {"on": True, "s": 0.5},
    }


def test_step_times_add_up_the_tasks_of_a_step() -> None:
    def tried(step: int, part: int, device: str, ready: int, start: int, end: int) -> AttemptRecord:
        return AttemptRecord(step, part, "run", 1, device, 0, ready, ready, start, end, "done", 0, part)

    timeline = RunTimeline(
        0, b"r" * 16, "q", RunState.SUCCEEDED, 0, 0, 50, (("a", "noop"), ("b", "noop"), ("c", "noop")), ((0, 1),),
        (tried(0, 0, "pool:1", 0, 1, 5), tried(0, 1, "pool:0", 2, 5, 9), tried(1, 0, "io:0", 9, 10, 40)),
    )  # fmt: skip
    first, second = step_times("q1", timeline)
    assert (first.devices, first.queue_ns, first.run_ns, first.tokens) == (("pool:0", "pool:1"), 4, 8, 1)
    assert (second.step, second.queue_ns, second.run_ns) == ("b", 1, 30)
    assert (span_ns([timeline]), busy_ns([timeline])) == (50, 38)


def told(view: View) -> None:
    with view:
        view.begin("Chess", ["embed", "answer"])
        view.update("Chess", Update(0, 1, "started", "embed", 0, "npu:0"))
        view.update("Chess", Update(0, 2, "done", "embed", 0, "npu:0"))
        view.update("Chess", Update(0, 3, "started", "answer", 0, "cpu:0"))
        for number in range(12):
            view.update(
                "Chess", Update(0, 4 + number, "tokens", "answer", 0, "cpu:0", text=f"token{number} [red]\x1b[2J\n")
            )
        view.update("Chess", Update(0, 20, "failed", "answer", 0, "cpu:0", error=ErrorRecord("task_failed", "no luck")))
        view.end("Chess", "failed")


def test_plain_lines_tell_each_step_and_the_text_without_control_characters() -> None:
    out = io.StringIO()
    told(PlainView(out))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["Chess: begins, 2 steps", "Chess: embed done on npu:0"]
    assert lines[-2:] == ["Chess: answer failed on cpu:0: no luck", "Chess: failed"]
    spoken = [line for line in lines if line.startswith("Chess | answer | ")]
    assert len(spoken) > 1 and all(f"token{i} [red]" in " ".join(spoken) for i in range(12))
    assert "\x1b" not in out.getvalue()


def test_the_live_view_has_one_line_a_run_with_its_newest_text() -> None:
    out = io.StringIO()
    told(LiveView(Console(file=out, force_terminal=True, width=160, color_system=None)))
    last = [line for line in out.getvalue().splitlines() if "Chess" in line][-1]
    assert "2/2" in last and "failed" in last and "answer: …" in last and "token11 [red]" in last
    assert "\x1b[2J" not in out.getvalue()


def test_steps_one_at_a_time_form_a_chain_and_lose_no_data() -> None:
    picture = Picture("cat", b"...", False)
    workflow = agent_workflow(QUESTIONS[0], picture, picture, "http://127.0.0.1:1/readability")
    chain = one_at_a_time(workflow)
    ids = [step.id for step in workflow.steps]
    assert [step.after[-1] for step in chain.steps[1:]] == ids[:-1]
    assert [step.inputs for step in chain.steps] == [step.inputs for step in workflow.steps]
    graph = check_workflow(chain, load_ops()[0], GraphLimits(100, 100, 1 << 24, 32, 100), 60.0)
    assert [graph.nodes[i].id for i in graph.order] == ids


def test_a_daemon_that_cannot_start_is_reported_with_its_reason_and_leaves_nothing() -> None:
    daemon = OwnDaemon({"nonsense": {"key": 1}})
    with pytest.raises(Disconnected, match="nonsense"), daemon:
        pytest.fail("it started")
    assert not daemon.socket.parent.exists()


def hexrt_demo(*arguments: str, temporary: str = "/tmp") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hexrt.cli.main", "demo", *arguments]
    environ = os.environ | {"TMPDIR": temporary}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("--questions", "0"), "0 is not in the range 1<=x<=12", 2),
        (("--models-dir", "/nowhere"), "there is no corpus in /nowhere: run `make setup`", 6),
        (("--pictures", "/nowhere"), "there are no pictures in /nowhere", 6),
        (("--trace-out", "/proc/no/trace"), "/proc/no cannot be made", 2),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(arguments: tuple[str, ...], said: str, status: int) -> None:
    done = hexrt_demo(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.timeout(400)
def test_one_agent_runs_every_kind_of_step_and_leaves_only_the_trace(tmp_path: Path) -> None:
    if not (MODELS / "smollm2-135m").is_dir():
        pytest.skip("the models are not prepared: run `make setup`")
    trace = tmp_path / "demo.pftrace"
    with tempfile.TemporaryDirectory() as temporary:  # short enough for a socket's path
        arguments = ("--questions", "1", "--documents", "20", "--json", "--trace-out", str(trace))
        done = hexrt_demo(*arguments, temporary=temporary)
        assert list(Path(temporary).iterdir()) == []
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["problems"] == []
    (answer,) = told["answers"]
    assert answer["found"] == "Mount Everest" and "Everest" in answer["answer"]
    assert answer["tool"]["words"] == readability(answer["answer"])["words"]
    assert {step["op"] for step in told["steps"]} == {
        "embed.text", "search.vector", "text.template", "llm.generate", "tool.http", "code.python", "image.encode", "image.text",
    }  # fmt: skip
    assert {step["state"] for step in told["steps"]} == {"done"} and told["whole"]["ratio"] > 0
    with opened(trace) as query:
        assert query(ERRORS) == []
        assert query("select count(*) as n from slice where category = 'step'") == [{"n": 2 * len(told["steps"])}]
