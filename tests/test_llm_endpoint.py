"""Served models without a server: what each kind of server is asked, which step's request goes out when, and what its reports mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hexrt.brain.decide import Brain
from hexrt.brain.engines import Engines
from hexrt.brain.models import ModelSource
from hexrt.brain.view import Device
from hexrt.core import DeviceKind, TaskState
from hexrt.errors import BadRequest, ErrorRecord, HexrtError, TaskFailed, Unavailable
from hexrt.events import Emitted, Failed, Finished, Started
from hexrt.llm.endpoint import Abort, Answered, Ask, Broke, Said, Seen
from hexrt.llm.endpoint_wire import Dialect, Served, body_of, piece_of, refusal, served_by, words_of
from hexrt.llm.steps import Answer
from hexrt.llm.tokenise import load_vocabulary, messages_of, tokenise
from hexrt.ops.llm import ChatMessage, Continued, SaidMessage
from hexrt.protocol.host import Grammar
from hexrt.runtime.entities import Run
from hexrt.scheduling.cost import CostModel
from hexrt.workflow.model import Needs, StepSpec, Workflow
from tests.endpoint_server import ask
from tests.llm_desk import keeper_of
from tests.llm_support import model_folder
from tests.notation import submit, table

FAR = ModelSource("", "float32", endpoint="http://far/v1", concurrency=2)
NEAR = ModelSource("near", "float32")


# --- what is asked ----------------------------------------------------------------------------------------------


def body(dialect: Dialect, role: str = "user", context: int = 0, **more: Any) -> dict[str, Any]:
    whole = body_of(ask(role=role, **more), Served("m", dialect, context))
    plain = {"model", "stream", "stream_options", "max_tokens", "temperature", "messages", "prompt"}
    return {name: value for name, value in whole.items() if name not in plain}


def test_servers_with_defaults_of_their_own_are_told_everything() -> None:
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body(Dialect.VLLM) == body(Dialect.SGLANG) == off
    assert body(Dialect.LLAMA) == {
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 0,
    }  # fmt: skip
    assert body(Dialect.TGI) == body(Dialect.OTHER) == {}


def test_each_server_is_asked_in_its_own_words() -> None:
    hot = {"temperature": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 2**32 - 1, "stop": ("x",)}
    told = body(Dialect.LLAMA, context=2048, **hot)
    assert (told["repeat_penalty"], told["repeat_last_n"], told["seed"], told["stop"]) == (1.5, 2048, 0, ["x"])
    assert body(Dialect.VLLM, **hot)["seed"] == 2**32 - 1
    assert body(Dialect.VLLM, stop_tokens=(3,), ignore_eos=True)["stop_token_ids"] == [3]
    assert body(Dialect.LLAMA, ignore_eos=True)["ignore_eos"] is True
    regex = Grammar("regex", "a+")
    assert body(Dialect.VLLM, grammar=regex)["structured_outputs"] == {"regex": "a+"}
    assert body(Dialect.SGLANG, grammar=regex)["regex"] == "a+"
    schema = Grammar("json_schema", '{"type": "object"}')
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
    for dialect in (Dialect.VLLM, Dialect.SGLANG, Dialect.LLAMA, Dialect.OTHER):
        assert body(dialect, grammar=schema)["response_format"] == named
    assert body(Dialect.LLAMA, role="raw", grammar=schema)["json_schema"] == {"type": "object"}
    assert body(Dialect.LLAMA, logprobs=0)["top_logprobs"] == 1
    assert body(Dialect.VLLM, role="raw", logprobs=3)["logprobs"] == 3


@pytest.mark.parametrize(
    ("dialect", "more", "field"),
    [
        (Dialect.OTHER, {"top_k": 1}, "top_k"),
        (Dialect.TGI, {"min_p": 0.1}, "min_p"),
        (Dialect.OTHER, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (Dialect.LLAMA, {"stop_tokens": (1,)}, "stop_tokens"),
        (Dialect.TGI, {"ignore_eos": True}, "ignore_eos"),
        (Dialect.LLAMA, {"grammar": Grammar("regex", "a")}, "regex"),
        (Dialect.OTHER, {"grammar": Grammar("json_schema", "{}"), "role": "raw"}, "json_schema"),
        (Dialect.SGLANG, {"logprobs": 2}, "logprobs"),
        (Dialect.TGI, {"text": "a"}, ""),
    ],
)
def test_what_a_server_is_not_known_to_take_is_refused_by_name(dialect: Dialect, more: dict[str, Any], field: str) -> None:  # fmt: skip
    with pytest.raises(Unavailable, match=str(dialect)) as caught:
        body(dialect, **more)
    assert caught.value.where == (f"params.{field}" if field else "")


def test_who_answers_is_told_by_the_list_of_models() -> None:
    llama = (
        b'{"data": [{"id": "a", "owned_by": "llamacpp", "meta": {"n_ctx": 512}}, {"id": "b", "owned_by": "llamacpp"}]}'
    )
    assert served_by(llama, "") == (Served("a", Dialect.LLAMA, 512), ("a", "b"))
    assert served_by(llama, "b")[0] == Served("b", Dialect.LLAMA, 0)
    assert served_by(llama, "alias")[0] == Served("alias", Dialect.LLAMA, 0)
    assert served_by(b'{"data": [{"id": "gpt", "owned_by": "x"}]}', "")[0].dialect is Dialect.OTHER


def test_pieces_of_all_servers_are_read() -> None:
    assert piece_of('{"choices": [{"delta": {"role": "assistant", "content": null}}]}', -1).is_token is False
    thought = piece_of('{"choices": [{"delta": {"reasoning_content": "hm"}}]}', -1)
    assert (thought.text, thought.is_token) == ("", True)
    assert piece_of('{"choices": [{"text": "", "finish_reason": "eos_token"}]}', -1).finish == "stop"
    assert piece_of('{"choices": [{"delta": {}, "finish_reason": "abort"}]}', -1).is_broken
    assert piece_of('{"error": {"code": 503, "message": "busy"}}', -1).is_broken
    old = '{"choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.5], "top_logprobs": [{"token_id:7": -1.5}]}}]}'
    (drawn,) = piece_of(old, 1).logprobs
    assert (drawn.logprob, drawn.top) == (-1.5, ((7, -1.5),))
    with pytest.raises(TaskFailed):
        piece_of('{"choices": [{"delta": {"content": "\\ud800"}}]}', -1)


def test_a_refusal_says_what_the_server_said_on_one_line() -> None:
    assert isinstance(refusal(400, b"{}"), BadRequest)
    assert words_of(b'{"detail": [{"msg": "no"}]}') == '[{"msg": "no"}]'
    assert words_of(b'{"error": "plain\\nwords"}') == "plain words"
    assert words_of(b"\xff<html>\x1b[31m") == "�<html> [31m"
    assert len(words_of(b"x" * 10_000)) == 500


# --- which request goes out when --------------------------------------------------------------------------------


class Scene:
    """A brain with one served model `far`, two requests at a time, and one that runs here; whatever is put out is applied."""

    def __init__(self, *steps: StepSpec) -> None:
        self.runs = table()
        self.engines = Engines({"near": NEAR, "far": FAR}, keeper_of(), 16, 1)
        self.brain = Brain(self.runs, CostModel(), self.engines)
        for device in (
            Device("pool:0", DeviceKind.POOL, 64, "pool", ready=True),
            Device("cpu:0", DeviceKind.CPU, 64, "cpu:0", ready=True),
            Device("endpoint:far", DeviceKind.ENDPOINT, 2, "endpoint:far", ready=True),
        ):
            self.brain.add_device(device)
        self.run: Run = submit(self.runs, Workflow(steps))
        self.sent: list[Any] = []  # to the server
        self.events: list[Any] = []
        self.now = 1

    def turn(self) -> list[Any]:
        """What goes to the server; steps are tokenised at once."""
        first = len(self.sent)
        while True:
            self.now += 1
            commands = self.brain.decide(self.now)
            launches = commands.send.pop("pool:0", [])
            self.sent += commands.send.pop("endpoint:far", [])
            assert not commands.send
            events = list(commands.events)
            for launch in launches:
                task = self.brain.devices["pool:0"].drop(launch[1])
                assert task is not None
                prompt = {"messages": [{"role": "user", "content": task.step.node.id}]}
                events.append(Finished(task.run.id, task.step.node.index, task.part, task.attempt, "pool:0", 1, self.now, msgspec.Raw(msgspec.msgpack.encode(prompt))))  # fmt: skip
            for event in events:
                self.runs.apply(event)
            self.events += events
            self.runs.check_integrity()
            self.engines.endpoints.check_integrity()
            if not events and not launches:
                return self.sent[first:]

    def report(self, report: Any) -> list[Any]:
        self.engines.endpoints.report(self.brain.devices["endpoint:far"], report)
        return self.turn()

    def answer(self, command: int, text: str = "yes") -> list[Any]:
        return self.report(Said(command, text, self.now)) + self.report(Answered(command, "stop", 3, 1, self.now))

    def output(self, step: str) -> Answer:
        found = next(s for s in self.run.steps if s.node.id == step)
        assert found.state is TaskState.DONE, found.error
        return msgspec.msgpack.decode(found.output or b"", type=Answer)


def step(name: str, priority: int = 0, op: str = "llm.generate", model: str = "far", **more: Any) -> StepSpec:
    return StepSpec(id=name, op=op, params={"model": model}, inputs={"prompt": name}, priority=priority, **more)


def prompts(messages: list[Any]) -> list[str]:
    return [message.messages[0]["content"] for message in messages if isinstance(message, Ask)]


def test_no_more_requests_than_the_server_takes_are_with_it_and_the_others_wait_in_order_of_priority() -> None:
    scene = Scene(step("a", 9), step("b", 8), step("low", -1), step("high", 5))
    asked = scene.turn()
    assert prompts(asked) == ["a", "b"]
    assert scene.report(Said(asked[0].command, "x", 5)) == []  # its decode task holds the same place
    assert prompts(scene.report(Answered(asked[0].command, "stop", 1, 1, 6))) == ["high"]
    assert prompts(scene.answer(asked[1].command)) == ["low"]


def test_what_is_with_the_server_goes_on_before_anything_that_waits() -> None:
    scene = Scene(step("a", -5), step("b", -5))
    first, _ = scene.turn()
    submit(scene.runs, Workflow(tuple(step(f"urgent{i}", 9) for i in range(3))))
    assert scene.turn() == []
    scene.report(Said(first.command, "x", scene.now))
    decode = scene.run.steps[0].tasks[2]
    assert decode.state in (TaskState.PLACED, TaskState.RUNNING)
    assert prompts(scene.answer(first.command)) == ["urgent0"]


def test_the_time_to_the_first_token_is_the_prefills_and_the_rest_the_decodes() -> None:
    scene = Scene(step("a"))
    (sent,) = scene.turn()
    scene.report(Said(sent.command, "Hel", 1_000))
    scene.report(Said(sent.command, "lo", 2_000))
    scene.report(Answered(sent.command, "length", 5, 2, 3_000))
    prefill, decode = scene.run.steps[0].tasks[1:]
    assert (prefill.end_ns, decode.end_ns) == (1_000, 3_000) and prefill.device == decode.device == "endpoint:far"
    answer = scene.output("a")
    assert (answer.text, answer.ids, answer.prompt_tokens, answer.answer_tokens) == ("Hello", (), 5, 2)
    assert answer.messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "Hello"})
    assert [e.text for e in scene.events if isinstance(e, Emitted)] == ["Hel", "lo"]
    assert all(e.first == 0 and e.ids == () for e in scene.events if isinstance(e, Emitted))
    device = scene.brain.devices["endpoint:far"]
    assert not device.window and device.done == 2
    assert scene.brain.cost.estimate("llm.generate", 2, "endpoint:far", decode.work).count == 1
    assert len([e for e in scene.events if isinstance(e, Started)]) == 2


def test_an_attempt_that_failed_is_gone_on_with_by_the_next() -> None:
    scene = Scene(step("a", retries=1))
    (sent,) = scene.turn()
    scene.report(Said(sent.command, "Hel", 10))
    (again,) = scene.report(Broke(sent.command, ErrorRecord("task_failed", "gone"), 20))
    assert (again.text, again.tokens) == ("Hel", 1) and again.command != sent.command
    scene.report(Said(again.command, "lo", 30))
    scene.report(Answered(again.command, "stop", 5, 2, 40))
    assert scene.output("a").text == "Hello"


def test_a_request_that_fails_fails_its_step_alone_and_frees_its_place() -> None:
    scene = Scene(step("a"), step("b"), step("c"))
    first, second = scene.turn()
    assert prompts(scene.report(Broke(first.command, ErrorRecord("bad_request", "no"), 10))) == ["c"]
    (failed,) = [e for e in scene.events if isinstance(e, Failed)]
    assert failed.error.message == "no" and scene.run.steps[0].state is TaskState.FAILED
    scene.answer(second.command)
    assert scene.output("b").text == "yes"


def test_a_cancelled_step_lets_go_of_its_request_in_whatever_state() -> None:
    for said in (0, 1):
        scene = Scene(step("a"), step("b"), step("c"))
        first, _ = scene.turn()
        for _ in range(said):
            scene.report(Said(first.command, "x", 5))
        task = next(t for t in scene.run.steps[0].tasks if t.state in (TaskState.PLACED, TaskState.RUNNING))
        scene.runs.stop.append(task)
        more = scene.turn()
        assert more[0] == Abort(first.command) and prompts(more) == ["c"]
        assert scene.report(Said(first.command, "late", 9)) == []
        scene.engines.run_ended(scene.run.id)
        assert [type(m) for m in scene.turn()] == [Abort, Abort]


def test_what_is_known_of_a_server_is_shown_with_its_device() -> None:
    scene = Scene(step("a"))
    scene.report(Seen({"reachable": False}))
    assert scene.brain.devices["endpoint:far"].facts == {"reachable": False}


@pytest.mark.parametrize(
    ("written", "kind", "where", "words"),
    [
        (step("a", op="llm.prefill"), Unavailable, "steps.a.params.model", "use llm.generate"),
        (StepSpec(id="a", op="llm.generate", params={"model": "far", "numerics": "exact"}, inputs={"prompt": "x"}), Unavailable, "steps.a.params.numerics", "exact"),
        (step("a", needs=Needs(device="cpu:0")), BadRequest, "steps.a.needs.device", "a server answers"),
        (step("a", model="near", needs=Needs(device="endpoint")), BadRequest, "steps.a.needs.device", "no server answers"),
    ],
)  # fmt: skip
def test_what_a_server_cannot_do_is_refused_before_it_is_taken(written: StepSpec, kind: type[HexrtError], where: str, words: str) -> None:  # fmt: skip
    scene = Scene(written)
    assert scene.run.graph is not None
    with pytest.raises(kind, match=words) as caught:
        scene.brain.check_runnable(scene.run.graph)
    assert caught.value.where == where


def test_a_step_may_name_the_kind_and_default_is_the_first_model() -> None:
    scene = Scene(step("a", needs=Needs(device="endpoint")))
    assert scene.run.graph is not None
    scene.brain.check_runnable(scene.run.graph)
    assert prompts(scene.turn()) == ["a"]
    node = Scene(step("a", model="default")).run.steps[0].node
    assert scene.engines.endpoints.device_of(node, 1) is None  # the first is one that runs here
    assert Engines({"far": FAR, "near": NEAR}, keeper_of(), 16, 1).endpoints.device_of(node, 1) == "endpoint:far"


# --- conversations ----------------------------------------------------------------------------------------------


def said(*messages: tuple[str, str]) -> Continued:
    return Continued(messages=tuple(SaidMessage(role, content) for role, content in messages))  # type: ignore[arg-type]


def test_a_conversation_goes_on_by_its_messages_and_a_raw_one_by_its_text() -> None:
    before = said(("user", "a"), ("assistant", "b"))
    chat = {"messages": [ChatMessage("user", "c")], "continue_from": before}
    assert [m["content"] for m in messages_of("far", False, chat)] == ["a", "b", "c"]
    raw = {"prompt": " c", "continue_from": said(("raw", "a b"))}
    assert messages_of("far", True, raw) == [{"role": "raw", "content": "a b c"}]
    first = {"prompt": "x", "system": "s"}
    assert [m["role"] for m in messages_of("far", False, first)] == ["system", "user"]


@pytest.mark.parametrize(
    ("raw", "prior", "words"),
    [
        (False, Continued((1, 2), 1), "so it holds ids"),
        (True, said(("user", "a")), "leave out `raw`"),
        (False, said(("raw", "a")), "set `raw`"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_by_name(raw: bool, prior: Continued, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        messages_of("far", raw, {"prompt": "x", "continue_from": prior})
    assert caught.value.where == "inputs.continue_from"


def test_a_model_that_runs_here_goes_on_from_a_servers_answer_by_its_messages() -> None:
    vocabulary = load_vocabulary(model_folder(), "near")
    before = [("user", "a"), ("assistant", "b")]
    whole = [ChatMessage(role, content) for role, content in (*before, ("user", "c"))]  # type: ignore[arg-type]
    ids = tokenise(vocabulary, "near", False, {"messages": whole})
    assert tokenise(vocabulary, "near", False, {"prompt": "c", "continue_from": said(*before)}) == ids
    raw = {"prompt": " c", "continue_from": said(("raw", "a b"))}
    assert tokenise(vocabulary, "near", True, raw) == tokenise(vocabulary, "near", True, {"prompt": "a b c"})
    with pytest.raises(BadRequest, match="leave out `raw`"):
        tokenise(vocabulary, "near", True, {"prompt": "c", "continue_from": said(*before)})


def test_an_output_without_ids_and_messages_is_no_llm_steps() -> None:
    with pytest.raises(msgspec.ValidationError, match="neither"):
        msgspec.convert({"text": "x"}, Continued)
