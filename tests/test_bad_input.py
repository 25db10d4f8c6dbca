"""Bad input through a whole daemon with real models: a named error for that run alone, while the daemon and other runs go on."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from hexrt import values
from hexrt.cli.settings import load_config
from hexrt.client import Client, Outcome
from hexrt.config import Config
from hexrt.core import RunState
from hexrt.errors import BadRequest, HexrtError
from hexrt.ops.registry import load_ops
from hexrt.protocol.messages import Accepted, Update
from hexrt.workflow.check import GraphLimits, check_workflow
from hexrt.workflow.model import MapSpec, Needs, StepSpec, Workflow
from tests.numbers import NUMBERS, numeric_fields, put, takes
from tests.running import ROOT, Running, settled, wait_gone

CONTEXT_TOKENS = 160
MODELS = ROOT / ".models"
OPS = load_ops()[0]
NEEDED = ("smollm2-135m", "minilm", "efficientnet-lite0", "rapidocr")
pytestmark = pytest.mark.skipif(
    any(not (MODELS / name).is_dir() for name in NEEDED), reason="models not prepared: run `make setup`"
)  # fmt: skip

CONFIG = """
[daemon]
models_dir = "{models}"
[pool]
workers = 2
[cpu]
arena_mib = 256
[limits]
max_tasks = 5000
[models.smollm2]
path = "smollm2-135m"
[models.short]
path = "{short}"
[models.gone]
path = "no-such-folder"
[ops."map.python"]
modules = ["tests.hostile"]
[ops."tool.http"]
allow_private = ["127.0.0.1:{port}"]
"""


class SlowServer:
    """Takes connections and answers none, until it is closed. `waiting` counts those that are open."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self.waiting = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self.waiting += 1
            threading.Thread(target=self._hold, args=(sock,), daemon=True).start()

    def _hold(self, sock: socket.socket) -> None:
        with sock:
            while sock.recv(1 << 16):
                continue
        with self._changed:
            self.waiting -= 1
            self._changed.notify_all()

    def wait_left_alone(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.waiting == 0, 10), f"{self.waiting} requests are still open"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@dataclass(frozen=True, slots=True)
class Here:
    running: Running
    server: SlowServer
    client: Client


def with_short_context(folder: Path) -> Path:
    """The same model with a context that a prompt fills in no time."""
    folder.mkdir()
    for file in (MODELS / "smollm2-135m").iterdir():
        (folder / file.name).symlink_to(file)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(msgspec.json.encode(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    server = SlowServer()
    folder = tmp_path_factory.mktemp("bad input")
    config = CONFIG.format(models=MODELS, port=server.port, short=with_short_context(folder / "short"))
    with Running(folder, config) as running, running.client() as client:
        yield Here(running, server, client)
        assert running.process is not None and running.process.poll() is None
    server.close()
    log = running.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log, log


@pytest.fixture
def client(here: Here) -> Iterator[Client]:
    """Whatever the test does to the daemon, the daemon serves on afterwards, and nothing of the test is left in it."""
    yield here.client
    assert here.client.run(Workflow((StepSpec("ok", "noop", {}, {"value": 7}),))).check().outputs["ok"] == 7
    left = here.client.statistics()
    assert left["open_runs"] == left["open_tasks"] == left["queued_tasks"] == 0


def one(op: str, params: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None, **more: Any) -> Workflow:
    return Workflow((StepSpec("s", op, params or {}, inputs or {}, **more), StepSpec("good", "noop", {}, {"value": 1})))


def generate(prompt: Any, **params: Any) -> Workflow:
    return one("llm.generate", {"model": "smollm2", "max_tokens": 2, **params}, {"prompt": prompt})


def only_s_failed(outcome: Outcome) -> Any:
    """The error of step `s`; the other step of the run ended well."""
    assert outcome.state is RunState.FAILED and set(outcome.errors) == {"s"} and outcome.outputs["good"] == 1
    return outcome.errors["s"]


# --- numbers --------------------------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "code.python": ({}, {"code": "1"}),
    "embed.text": ({}, {"texts": ["a"]}),
    "image.encode": ({}, {"image": b"x"}),
    "image.text": ({}, {"image": b"x"}),
    "index.build": ({"name": "i"}, {"vectors": [[1.0]]}),
    "llm.generate": ({}, {"prompt": "Hi"}),
    "llm.prefill": ({}, {"prompt": "Hi"}),
    "llm.decode": ({}, {"prefix": {"ids": [1], "prompt_tokens": 1}}),
    "search.vector": ({"index": "i"}, {"vectors": [[1.0]]}),
    "text.template": ({"template": "x"}, {}),
    "tool.http": ({"url": "http://127.0.0.1/"}, {}),
}


def places() -> Iterator[tuple[str, str, tuple[str | int, ...], inspect.Type]]:
    """(op, part of the workflow, path in it, type) of every number that a user can write."""
    for path, kind in numeric_fields(inspect.type_info(Workflow)):
        if path[0] != "steps":
            yield "noop", "workflow", path, kind
    for path, kind in numeric_fields(inspect.type_info(StepSpec)):
        yield "noop", "step", path, kind
    for name, op in OPS.items():
        for path, kind in numeric_fields(inspect.type_info(op.params)):
            yield name, "params", path, kind
        for port, spec in op.inputs.items():
            for path, kind in numeric_fields(inspect.type_info(spec.type), (port,)):
                yield name, "inputs", path, kind


PLACES = list(places())


def written(op: str, part: str, path: tuple[str | int, ...], value: Any) -> Workflow:
    params, inputs = GIVEN.get(op, ({}, {}))
    step: dict[str, Any] = {"id": "s", "op": op, "params": deepcopy(params), "inputs": deepcopy(inputs)}
    workflow: dict[str, Any] = {"steps": [step]}
    if path[0] == "map":
        step["map"] = {"over": [1]}
    if path[:1] == ("continue_from",):
        put(step["inputs"], ("continue_from", "ids"), [1])
        put(step["inputs"], ("continue_from", "prompt_tokens"), 1)
    put({"workflow": workflow, "step": step}.get(part) or step[part], path, value)
    made = Workflow(tuple(StepSpec(**_typed(s)) for s in workflow.pop("steps")), **workflow)
    return made


def _typed(step: dict[str, Any]) -> dict[str, Any]:
    """Records as a careless caller builds them in Python: msgspec checks nothing there."""
    kinds: dict[str, Any] = {"map": MapSpec, "needs": Needs}
    return {key: kinds[key](**value) if key in kinds else value for key, value in step.items()}


def test_the_sweep_covers_every_op_that_takes_a_number() -> None:
    assert len(PLACES) > 35 and {op for op, *_ in PLACES} - {"noop"} == set(GIVEN)


@pytest.mark.parametrize(
    ("op", "part", "path", "kind"), PLACES, ids=[f"{op}-{part}-{'.'.join(map(str, path))}" for op, part, path, _ in PLACES]
)  # fmt: skip
def test_a_number_is_taken_by_its_documented_range_or_refused_by_name(
    here: Here, op: str, part: str, path: tuple[str | int, ...], kind: inspect.Type
) -> None:
    for value in NUMBERS:
        workflow = written(op, part, path, value)
        if takes(kind, value):
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(workflow), type=Workflow)
            check_workflow(sent, OPS, GraphLimits(), 600.0)
            continue
        with pytest.raises(BadRequest) as refused:
            here.client.submit(workflow)
        names = refused.value.where.replace("[0]", "").split(".")
        last = next(str(key) for key in reversed(path) if not isinstance(key, int))
        inside = path[0] if part == "inputs" else last
        assert last in names or inside in names, (value, refused.value)


SECTIONS = [
    (path, kind) for path, kind in numeric_fields(inspect.type_info(Config)) if path[0] not in ("models", "ops")
]


@pytest.mark.parametrize(("path", "kind"), SECTIONS, ids=[".".join(map(str, path)) for path, _ in SECTIONS])
def test_a_number_of_the_configuration_is_taken_by_its_range_or_refused_by_key(
    tmp_path: Path, path: tuple[str | int, ...], kind: inspect.Type
) -> None:
    file = tmp_path / "c.toml"
    for value in NUMBERS:
        text = {True: "true"}.get(value) if value is True else f'"{value}"' if isinstance(value, str) else repr(value)
        file.write_text(f"[{path[0]}]\n{path[1]} = {f'[{text}]' if len(path) > 2 else text}\n")
        if takes(kind, value):
            load_config({}, {}, file)
            continue
        with pytest.raises(BadRequest) as refused:
            load_config({}, {}, file)
        assert refused.value.where.startswith(".".join(map(str, path[:2]))) and str(file) in str(refused.value)


# --- models, prompts and pictures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_an_empty_prompt_is_refused_by_name(client: Client, prompt: str) -> None:
    error = only_s_failed(client.run(generate(prompt)))
    assert error.kind == "bad_request" and error.where == "s.inputs.prompt" and "empty" in error.message


def test_a_prompt_up_to_the_context_less_one_is_answered_and_a_longer_one_refused(client: Client) -> None:
    def ask(tokens: int) -> Outcome:
        return client.run(generate(" a" * tokens, model="short", raw=True, max_tokens=10**6))

    answer = ask(CONTEXT_TOKENS - 1).check().outputs["s"]
    assert answer["prompt_tokens"] == CONTEXT_TOKENS - 1
    assert answer["answer_tokens"] == 1 and len(answer["ids"]) == CONTEXT_TOKENS
    for tokens in (CONTEXT_TOKENS, CONTEXT_TOKENS + 1, 3 * CONTEXT_TOKENS):
        error = only_s_failed(ask(tokens))
        assert error.kind == "bad_request" and error.where == "s.inputs.prompt"
        assert str(tokens) in error.message and f"at most {CONTEXT_TOKENS - 1}" in error.message


@pytest.mark.parametrize(
    ("workflow", "kind", "says"),
    [
        (generate("Hi", model="gone"), "unavailable", "gone"),
        (generate("Hi", model="gpt-5"), "unavailable|bad_request|not_found", "gpt-5"),
        (generate("Hi", model="../smollm2-135m"), "unavailable|bad_request|not_found", "smollm2-135m"),
        (one("llm.decode", {"model": "smollm2"}, {"prefix": {"ids": [2**31 - 1], "prompt_tokens": 1}}), "", "token id"),
        (one("llm.generate", {"model": "smollm2"}, {}), "bad_request", "prompt"),
        (one("embed.text", {}, {"texts": []}), "bad_request", "texts"),
        (one("embed.text", {"model": "no-model"}, {"texts": ["a"]}), "unavailable|not_found", "no-model"),
        (one("search.vector", {"index": "nowhere"}, {"vectors": [[1.0]]}), "not_found|bad_request", "nowhere"),
        (one("search.vector", {}, {"vectors": [[1.0]]}), "bad_request", "index"),
        (one("index.build", {"name": "odd"}, {"vectors": [[1.0], [1.0, 2.0]]}), "bad_request", "vectors"),
        (one("index.build", {"name": "none"}, {"vectors": []}), "bad_request", "vectors"),
        (one("index.build", {"name": "nan"}, {"vectors": [["x"]]}), "bad_request", "vectors"),
        (one("code.python", {}, {"code": "raise SystemExit(3)"}), "task_failed", "3"),
        (one("code.python", {"timeout_s": 1e-9}, {"code": "while True: pass"}), "timed_out|task_failed", ""),
        (one("tool.http", {"url": "http://127.0.0.1:1/"}), "unavailable", "allow"),
        (one("tool.http", {"url": "file:///etc/passwd"}), "bad_request", "url"),
        (one("text.template", {"template": "{{ x }}"}), "task_failed|bad_request", "x"),
        (one("text.template", {"template": "{% for %}"}), "bad_request|task_failed", ""),
        (one("text.template", {"template": "{{ 'a' * 10**9 }}"}), "bad_request|task_failed|out_of_memory", ""),
    ],
)
def test_what_cannot_be_had_or_done_fails_that_step_by_name(
    client: Client, workflow: Workflow, kind: str, says: str
) -> None:
    error = only_s_failed(client.run(workflow))
    assert re.fullmatch(kind or ".*", error.kind), error
    assert says in f"{error.where} {error.message}" and "Traceback" not in error.message


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that would take gibibytes open."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")  # fmt: skip


CAT = (ROOT / "tests" / "data" / "images" / "cat.jpg").read_bytes()
PICTURES = {
    "nothing": b"",
    "zeros": bytes(5000),
    "text": b"this is no picture",
    "cut short": CAT[:2000],
    "head only": CAT[:30],
    "bomb": bomb(60_000, 60_000),
    "wide bomb": bomb(2**31 - 1, 1),
    "no pixels": bomb(0, 0),
}


@pytest.mark.parametrize("op", ["image.encode", "image.text"])
def test_pictures_that_cannot_be_read_fail_one_by_one_and_a_good_one_among_them_is_read(
    client: Client, op: str
) -> None:
    steps = [StepSpec(name.replace(" ", "_"), op, {}, {"image": data}) for name, data in PICTURES.items()]
    outcome = client.run(Workflow((*steps, StepSpec("good", op, {}, {"image": CAT}))))
    assert set(outcome.errors) == {step.id for step in steps} and "good" in outcome.outputs
    for step in steps:
        error = outcome.errors[step.id]
        assert error.kind == "bad_request" and error.where.endswith("image"), error


# --- graphs ---------------------------------------------------------------------------------------------------------

A = StepSpec("a", "noop")


@pytest.mark.parametrize(
    ("workflow", "where", "says"),
    [
        (Workflow(()), "steps", "at least one step"),
        (Workflow((A, A)), "steps[1].id", "its own id"),
        (Workflow((StepSpec("a", "noop", after=("b",)), StepSpec("b", "noop", after=("a",)))), "", "cycle"),
        (Workflow((StepSpec("a", "noop", after=("a",)),)), "steps.a.after[0]", "itself"),
        (Workflow((StepSpec("a", "nope"),)), "steps.a.op", "no op 'nope'"),
        (Workflow((StepSpec("a", "noop", after=("z",)),)), "steps.a.after[0]", "no step 'z'"),
        (Workflow((StepSpec("a", "noop", {}, {"value": {"$ref": "z.x"}}),)), "steps.a.inputs.value", "'z'"),
        (Workflow((StepSpec("a", "noop", {"x": 1}),)), "steps.a.params.x", "no such field"),
        (Workflow((StepSpec("a", "noop", {}, {"x": 1}),)), "steps.a.inputs.x", "no input 'x'"),
        (Workflow((StepSpec("a", "noop", needs=Needs("tpu")),)), "steps.a.needs.device", "no device kind 'tpu'"),
        (Workflow((StepSpec("a", "noop", needs=Needs("pool:99")),)), "steps.a.needs.device", "pool:99"),
        (Workflow((StepSpec("a", "noop", needs=Needs("cuda")),)), "steps.a.needs.device", "cuda"),
        (Workflow((StepSpec("a b", "noop"),)), "steps[0].id", ""),
        (Workflow((A,), outputs={"x": {"$ref": "b"}}), "outputs.x", "no step 'b'"),
        (Workflow((StepSpec("a", "noop", map=MapSpec(list(range(5001)))),)), "steps.a.map.over", "5000"),
        (Workflow((StepSpec("a", "noop", map=MapSpec("abc")),)), "steps.a.map.over", "a list"),
        (Workflow(tuple(StepSpec(f"s{i}", "noop") for i in range(5001))), "steps.s5000", "5000"),
    ],
)  # fmt: skip
def test_a_graph_that_makes_no_sense_is_refused_where_it_is_wrong(
    client: Client, workflow: Workflow, where: str, says: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        client.submit(workflow)
    assert refused.value.where.startswith(where) and says in str(refused.value)


def test_a_map_over_an_output_with_too_many_elements_fails_by_name(client: Client) -> None:
    steps = (
        StepSpec("list", "map.python", {"function": "tests.hostile:count"}, {"value": 5001}),
        StepSpec("s", "noop", {}, {"value": {"$item": ""}}, map=MapSpec({"$ref": "list"})),
        StepSpec("good", "noop", {}, {"value": 1}),
    )
    outcome = client.run(Workflow(steps, outputs={"good": {"$ref": "good"}}))
    error = only_s_failed(outcome)
    assert "5001" in error.message and "5000" in error.message


def test_inputs_that_no_message_can_carry_fail_by_name(client: Client) -> None:
    steps = (
        StepSpec("block", "map.python", {"function": "tests.hostile:block"}, {"value": 30 << 20}, idempotent=True),
        StepSpec("all", "noop", {}, {"value": {"$ref": "block"}}, map=MapSpec([0] * 18)),
        StepSpec("s", "noop", {}, {"value": {"$ref": "all"}}),
        StepSpec("good", "noop", {}, {"value": 1}),
    )
    outcome = client.run(Workflow(steps, outputs={"good": {"$ref": "good"}}), "none")  # type: ignore[arg-type]
    error = only_s_failed(outcome)
    assert error.kind == "task_failed" and "its inputs have" in error.message


# --- leaving --------------------------------------------------------------------------------------------------------


def sandboxes() -> list[int]:
    """Pids of running sandboxes of this machine's user."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                name = Path(f"/proc/{entry}/comm").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name.strip() == "bwrap":
                found.append(int(entry))
    return found


def mixed(port: int) -> Workflow:
    url = f"http://127.0.0.1:{port}/"
    return Workflow(
        (
            StepSpec("llm", "llm.generate", {"model": "smollm2", "max_tokens": 500, "ignore_eos": True}, {"prompt": "Hi"}),
            StepSpec("box", "code.python", {"timeout_s": 100}, {"code": "import time; time.sleep(90)"}),
            StepSpec("get", "tool.http", {"url": url, "timeout_s": 100}),
            StepSpec("post", "tool.http", {"url": url, "method": "POST", "timeout_s": 100}),
            StepSpec("sleep", "map.python", {"function": "tests.hostile:sleep_for_ever"}),
            StepSpec("behind", "noop", after=("llm", "box", "get", "post", "sleep")),
        )
    )  # fmt: skip


def test_a_run_cancelled_at_any_moment_leaves_nothing_behind(here: Here, client: Client) -> None:
    before = set(sandboxes())
    client.run(generate("Hi")).check()
    for delay_ms in (*range(10), *range(10, 60, 5)):
        run = client.submit(mixed(here.server.port))
        threading.Event().wait(delay_ms / 1000)
        client.cancel(run, f"after {delay_ms} ms")
        assert client.status(run).summary.state is RunState.CANCELLED
        assert {step.state for step in client.status(run).steps} == {"cancelled"}
    here.server.wait_left_alone()
    wait_gone([pid for pid in sandboxes() if pid not in before])
    client.run(generate("Hi again")).check()
    left = settled(client)
    engine = {
        name: left[f"cpu:0_smollm2_{name}"]
        for name in ("frames", "frames_free", "waiting", "live", "retained", "parked")
    }
    known = sum(
        value for name, value in left.items() if name.endswith("_known_pages")
    )  # `short` has pages of this size too
    held = engine["frames"] - engine["frames_free"] - known
    assert not held + engine["waiting"] + engine["live"] + engine["retained"] + engine["parked"], left
    assert [device.name for device in client.devices() if device.state == "lost"] == []


def test_a_client_that_goes_away_while_tokens_come_leaves_its_run_to_end(here: Here, client: Client) -> None:
    workflow = generate("Tell me a story.", max_tokens=40, ignore_eos=True)
    run = b""
    with here.running.client() as leaving:
        for event in leaving.follow(workflow):
            if isinstance(event, Accepted):
                run = event.run
            elif isinstance(event, Update) and event.event == "tokens":
                break
    outcome = client.result(run).check()
    assert outcome.outputs["s"]["answer_tokens"] == 40


def test_other_runs_get_their_answers_while_one_after_the_other_fails(here: Here, client: Client) -> None:
    story = client.submit(generate("Tell me a story.", max_tokens=60, ignore_eos=True))
    for workflow in (generate(""), generate("Hi", model="gone"), one("image.encode", {}, {"image": b"x"})):
        only_s_failed(client.run(workflow))
    for workflow in (Workflow(()), Workflow((A, A))):
        with pytest.raises(HexrtError):
            client.submit(workflow)
    assert client.result(story).check().outputs["s"]["answer_tokens"] == 60


def test_a_value_of_no_known_form_is_refused_by_the_client_itself(client: Client) -> None:
    with pytest.raises(BadRequest):
        client.submit(Workflow((StepSpec("a", "noop", {}, {"value": object()}),)))
    tensor = msgspec.msgpack.Ext(values.TENSOR, b"\x93\xa7float32\x91\x05\xc4\x00")
    with pytest.raises(BadRequest) as refused:
        client.submit(Workflow((StepSpec("a", "noop", {}, {"value": tensor}),)))
    assert refused.value.where.startswith("steps.a.inputs")
