"""The command line against a server with a backend in memory: output, exit codes and one-line errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hexrt.cli.main import COMMANDS, main
from hexrt.core import RunState
from tests.serving import Serving, limits, serving, step, workflow

Cli = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs one command line in a thread: (exit code, standard output, standard error)."""
    monkeypatch.setenv("HEXRT_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HEXRT_CONFIG", raising=False)

    async def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def written(tmp_path: Path, *steps: dict, name: str = "w") -> str:
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(workflow(*steps, name=name)))
    return str(file)


async def test_run_prints_the_output_on_stdout_and_progress_on_stderr(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, out, err = await cli("run", written(tmp_path, step(inputs={"value": "hello"})))
        assert (code, out) == (0, "hello\n")
        assert "a started on pool:0" in err and "a done" in err


async def test_run_of_a_failing_workflow_exits_1_and_names_the_step(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, out, err = await cli("run", written(tmp_path, step(), step("b", "fail")))
        assert code == 1 and out == "null\n"
        assert "b: task_failed: it was asked to fail" in err.splitlines()[-1]


async def test_json_of_run_is_one_object_and_stderr_stays_empty(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, out, err = await cli("run", "--json", written(tmp_path, step(inputs={"value": [1.5, None]})))
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert answer["state"] == "succeeded" and answer["outputs"] == {"a": [1.5, None]} and len(answer["run"]) == 32


async def test_submit_then_ask_by_a_prefix_of_the_id(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, out, _ = await cli("submit", written(tmp_path, step(inputs={"value": 3})))
        run = out.strip()
        assert code == 0 and len(run) == 32
        for command in ("status", "result", "watch", "cancel"):
            assert (await cli(command, run[:6]))[0] == 0, command
        assert (await cli("cancel", run))[1] == f"{run} had ended before: succeeded\n"
        code, out, _ = await cli("status", "--json", run)
        assert json.loads(out)["summary"]["run"] == run
        code, out, _ = await cli("list", "--json", "--state", "succeeded")
        assert [each["run"] for each in json.loads(out)] == [run]
        code, out, _ = await cli("list")
        assert run[:12] in out and "succeeded" in out


async def test_watch_in_json_gives_an_object_a_line(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step()))
        _, out, _ = await cli("watch", "--json", run.strip())
        events = [json.loads(line) for line in out.splitlines()]
        assert [event.get("event") for event in events] == ["started", "done", None]
        assert events[-1]["state"] == "succeeded"


async def test_result_can_print_one_output_and_names_the_others_where_it_is_missing(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        steps = [step(inputs={"value": 1}), step("b", inputs={"value": {"x": "y"}})]
        _, run, _ = await cli("submit", written(tmp_path, *steps))
        assert (await cli("result", run.strip()))[1] == 'a: 1\nb: {"x":"y"}\n'
        assert (await cli("result", run.strip(), "--output", "a"))[1] == "1\n"
        code, _, err = await cli("result", run.strip(), "--output", "c")
        assert code == 2 and "there are: a, b" in err


async def test_a_run_that_goes_on_is_refused_without_waiting(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step(op="hold")))
        code, _, err = await cli("result", "--no-wait", run.strip())
        assert code == 2 and err == "hexrt: run: the run goes on\n"


async def test_control_characters_of_an_output_do_not_reach_the_terminal(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, out, _ = await cli("run", written(tmp_path, step(inputs={"value": "\x1b]0;evil\x07\u009b2J ok\n"})))
        assert "\x1b" not in out and "\x07" not in out and "\u009b" not in out and "ok\n" in out


async def test_devices_say_why_one_is_missing(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, out, _ = await cli("devices")
        assert "pool:0" in out and "no provider is installed" in out
        _, out, _ = await cli("devices", "--json")
        assert json.loads(out)[1]["why"] == "no provider is installed"
        assert json.loads((await cli("statistics", "--json"))[1]) == {"runs": 0.0}


async def test_shutdown_asks_the_daemon_to_drain_unless_told_not_to(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        assert (await cli("shutdown"))[0] == 0
        assert (await cli("shutdown", "--now"))[0] == 0
        assert here.backend.shut_down == [True, False]


async def test_trace_writes_a_file(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step()))
        file = tmp_path / "out.pftrace"
        code, out, err = await cli("trace", run.strip(), "-o", str(file))
        assert (code, out) == (0, f"{file}\n"), err
        assert file.stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("status", "0" * 32), 4, "no such run"),
        (("status", "abcd"), 4, "`hexrt list` shows yours"),
        (("status", "xyz"), 2, "32 hex digits"),
        (("run", "{missing}.yaml"), 2, "does not exist"),
        (("frobnicate",), 2, "No such command"),
        (("list", "--limit", "0"), 2, "--limit"),
        (("list", "--state", "odd"), 2, "--state"),
        (("status",), 2, "Missing argument"),
    ],
)
async def test_a_users_error_is_one_line_on_stderr_with_its_exit_code(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    async with serving(tmp_path / "s"):
        got, out, err = await cli(*(part.replace("{missing}", str(tmp_path / "none")) for part in arguments))
        assert (got, out) == (code, "") and says in err
        assert err.startswith("hexrt: ") and err.count("\n") == 1


async def test_a_workflow_that_the_daemon_refuses_exits_2_and_names_the_field(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, _, err = await cli("run", written(tmp_path, step(op="nope")))
        assert code == 2 and err == "hexrt: steps[0].op: there is no op 'nope'\n"


async def test_without_a_daemon_the_exit_code_is_3_and_the_line_says_what_to_do(cli: Cli, tmp_path: Path) -> None:
    code, _, err = await cli("list")
    assert code == 3 and str(tmp_path / "s") in err and "HEXRT_SOCKET" in err
    code, _, err = await cli("--socket", str(tmp_path / "other"), "list")
    assert code == 3 and str(tmp_path / "other") in err
    code, _, err = await cli("list", "--socket", str(tmp_path / "third"))
    assert code == 3 and str(tmp_path / "third") in err


async def test_a_full_daemon_exits_5(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s", limits(clients=0)):
        code, _, err = await cli("list")
        assert code == 5 and "try again later" in err


async def test_an_ambiguous_prefix_is_refused_with_the_candidates(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        await cli("submit", written(tmp_path, step()))
        (run,) = here.backend.runs.values()
        twin = bytes(run.id[:15]) + bytes([run.id[15] ^ 1])
        here.backend.runs[twin] = type(run)(twin, run.peer, run.workflow, run.durability)
        code, _, err = await cli("status", run.id.hex()[:8])
        assert code == 2 and "2 runs start so" in err


async def test_validate_says_good_or_names_the_fault(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = await cli("validate", written(tmp_path, step()))
    assert code == 0 and "good; 1 step, 0 edges" in out
    code, out, _ = await cli("validate", "--json", written(tmp_path, step()))
    assert json.loads(out)["steps"] == 1
    code, out, err = await cli("validate", written(tmp_path, step(op="noopp")))
    assert code == 2 and "noopp" in err and "op" in err and err.count("\n") == 1


async def test_schema_is_json_that_names_the_ops(cli: Cli) -> None:
    code, out, _ = await cli("schema")
    assert code == 0 and "noop" in json.dumps(json.loads(out))


async def test_config_show_prints_each_value_with_its_origin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[pool]\nworkers = 3\n")
    _, out, _ = await cli("config", "show", "--json", "--config", str(file))
    shown = json.loads(out)
    assert shown["pool.workers"] == {"value": 3, "origin": f"file {file}"}
    assert shown["daemon.socket"] == {"value": str(tmp_path / "s"), "origin": "environment HEXRT_SOCKET"}
    assert shown["limits.max_steps"]["origin"] == "default"
    _, out, _ = await cli("config", "show", "--config", str(file))
    assert any(line.split() == ["pool.workers", "=", "3", "#", "file", str(file)] for line in out.splitlines())
    monkeypatch.setenv("STATE_DIRECTORY", "/srv/state")
    _, out, _ = await cli("config", "show")
    assert any(line.split()[0] == "daemon.models_dir" and line.endswith("# default: /srv/state/models") for line in out.splitlines())  # fmt: skip


async def test_config_check_names_the_bad_key(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[pool]\nworkers = 3\n")
    assert (await cli("config", "check", str(file)))[0] == 0
    file.write_text("[pool]\nworker = 3\n")
    code, _, err = await cli("config", "check", str(file))
    assert code == 2 and "pool.worker" in err and "did you mean 'workers'?" in err


def test_help_names_every_command_and_the_exit_codes_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hexrt.cli.main import main; main(['--help']);"
        "bad = {'rich', 'numpy', 'asyncio', 'google', 'yaml', 'hexrt.client'} & set(sys.modules); assert not bad, bad"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert all(f"  {name} " in result.stdout for name in COMMANDS) and "130  Ctrl-C" in result.stdout


def test_the_client_library_imports_nothing_heavy() -> None:
    code = (
        "import sys, hexrt.client; bad = {'rich', 'numpy', 'click', 'asyncio'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def spawn(here: Serving, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hexrt.cli.main", "--socket", str(here.path), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_ctrl_c_cancels_the_run_and_exits_130(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        child = await spawn(here, "run", written(tmp_path, step(op="hold")))
        assert child.stderr is not None
        while b"started" not in await child.stderr.readline():
            pass
        child.send_signal(signal.SIGINT)
        _, err = await child.communicate()
        assert child.returncode == 130 and b"cancelled" in err and b"Traceback" not in err
        (run,) = here.backend.runs.values()
        assert run.state is RunState.CANCELLED


async def test_cancel_says_that_the_run_is_cancelled(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        _, run, _ = await cli("submit", written(tmp_path, step(op="hold")))
        assert await cli("cancel", run.strip()) == (0, f"cancelled {run}", "")
        code, out, _ = await cli("cancel", "--json", run.strip())
        assert code == 0 and json.loads(out) == {"run": run.strip(), "state": "cancelled"}


async def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        steps = [step(inputs={"value": "x" * 500_000})]
        child = await spawn(here, "run", written(tmp_path, *steps))
        assert child.stdout is not None and child.stderr is not None
        await child.stdout.read(1)
        child.stdout._transport.close()  # type: ignore[attr-defined]
        err = await child.stderr.read()
        await child.wait()
        assert child.returncode == 141 and b"Traceback" not in err and b"Exception" not in err


async def test_a_workflow_can_come_on_standard_input(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hexrt.cli.main", "run", "-", env={**os.environ, "HEXRT_SOCKET": str(here.path)},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await child.communicate(b"steps:\n- {id: a, op: noop, inputs: {value: hi}}\n")
        assert (child.returncode, out) == (0, b"hi\n")
