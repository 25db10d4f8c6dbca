"""`hexrt models`: what people and programs are shown of the models, and what the daemon says of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hexrt.brain.models import ModelSource
from hexrt.brain.view import Device
from hexrt.cli.models import ago, number, print_models
from hexrt.cli.output import plain
from hexrt.client import AsyncClient, Client
from hexrt.core import DeviceKind, Peer
from hexrt.errors import ErrorRecord
from hexrt.protocol import messages as m
from hexrt.protocol.models import ModelPlace, ModelStatus
from hexrt.runtime.models import models_of
from tests.running import CONFIG, Running
from tests.serving import connected, serving
from tests.test_brain_models import MIB, SECOND, Host, decode
from tests.test_cli import Cli, cli

__all__ = ["cli"]
pytestmark = pytest.mark.timeout(60)

# --- what is shown ------------------------------------------------------------------------------------------------------


async def test_models_shows_what_each_is_where_it_is_and_the_budget(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s"):
        code, out, err = await cli("models")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    for row in (
        "small folder /srv/models/small LlamaForCausalLM 135M float32 as_dtype float32 8192 720 KiB",
        "broken gguf b.gguf - - bfloat16 int8 bfloat16 - -",
        "far endpoint http://127.0.0.1:8000/v1 - - - - - - -",
        "small cpu:0 loaded 513 MiB 2 1 3 4 s ago 31.2",
        "broken cpu:0 refused - 0 0 0 never -",
        "far endpoint:far ready - 3 of 8 0 0 never -",
        "broken on cpu:0 is refused: its folder holds no safetensors (tried 3 s ago, 2 times in a row)",
        "weights on cpu:0 take 513 MiB of 2.0 GiB",
    ):
        assert row.split() in rows, (row, out)


async def test_models_as_json_has_every_field_by_its_name(cli: Cli, tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here:
        found = json.loads((await cli("models", "--json"))[1])
        assert found == json.loads(msgspec.json.encode(plain(here.backend.models(Peer(0, 0)))))
    assert found["models"][0]["places"][0]["answer_tokens"] == 90 and found["models"][0]["facts"] == {"attention": "native"}  # fmt: skip


async def test_models_come_over_the_wire_and_through_the_client(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as here, connected(tmp_path / "s") as raw:
        answer = await raw.ask(m.Models(7))
        assert isinstance(answer, m.ModelList) and answer.request == 7
        async with AsyncClient(tmp_path / "s") as client:
            assert (await client.models()).models == here.backend.models(Peer(0, 0)).models


def test_a_name_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    status = ModelStatus("a\x1b[2J", "folder", "b\nc", places=(ModelPlace("cpu:0", "refused", "no\x1b"),))
    print_models(m.ModelList(0, (status,), ()))
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "-"), (999, "999"), (134_515_008, "135M"), (1_543_000_000, "1.54B"), (70_600_000_000, "70.6B"), (10**13, "10000B")],
)  # fmt: skip
def test_parameters_are_short(count: int, text: str) -> None:
    assert number(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "never"), (0.2, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (10**6, "11 d ago")])  # fmt: skip
def test_times_are_short(seconds: float | None, text: str) -> None:
    assert ago(seconds) == text


# --- what the daemon says -----------------------------------------------------------------------------------------------


def places(host: Host) -> dict[str, ModelPlace]:
    return {model.name: model.places[0] for model in models_of(host.brain, host.now, True).models}


def test_a_model_goes_through_its_states_in_the_list() -> None:
    host = Host(a=6, b=6)
    assert {name: place.state for name, place in places(host).items()} == {"a": "unloaded", "b": "unloaded"}
    host.hold.add("a")
    host.submit(s=decode())
    load = host.decide()
    loading = places(host)["a"]
    assert (loading.state, loading.weight_bytes, loading.waiting) == ("loading", 6 * MIB, 1)
    host.serve(load)
    host.run()
    host.submit(s=decode(model="b"))
    host.run()
    there = places(host)
    assert (there["a"].state, there["a"].live, there["b"].state, there["b"].waiting) == ("loaded", 1, "waiting", 1)
    host.now += 3 * SECOND
    host.run()
    assert (places(host)["a"].state, places(host)["a"].why) == ("draining", "it makes way for 'b'")
    host.let_go()
    host.run()
    last = places(host)
    assert (last["a"].state, last["b"].state) == ("unloaded", "loaded")
    assert last["a"].answer_tokens == 1 and last["a"].tokens_per_s > 0
    assert last["a"].used_s is not None and last["b"].used_s is not None and last["b"].used_s < last["a"].used_s
    (budget,) = models_of(host.brain, host.now, True).budgets
    assert (budget.device, budget.used_bytes, budget.budget_bytes) == ("cpu:0", 6 * MIB, 10 * MIB)


def test_a_refused_model_says_why_and_how_often_it_was_tried() -> None:
    host = Host(a=6, big=11)
    host.broken["a"] = ErrorRecord("unavailable", "its folder holds no safetensors")
    for _ in range(2):
        host.submit(s=decode())
        host.run()
    host.now += 2 * SECOND
    found = places(host)
    assert found["a"].state == found["big"].state == "refused"
    assert found["a"].why == "its folder holds no safetensors (tried 2 s ago, 2 times in a row)"
    assert "cpu.weights_mib" in found["big"].why
    host.device.ready, host.device.lost = False, "it died thrice"
    assert (places(host)["a"].state, places(host)["a"].why) == ("lost", "it died thrice")


def test_where_models_lie_is_told_to_admins_alone() -> None:
    host = Host(a=6)
    host.brain.engines.models = {  # type: ignore[assignment]
        "a": ModelSource("/srv/secret/a", "float32"),
        "g": ModelSource("/srv/secret/g.gguf", "bfloat16", weights="int8", kv_dtype="float16"),
        "e": ModelSource("", "float32", endpoint="http://me:word@10.0.0.7:8000/secret/v1", concurrency=4),
    }
    host.brain.engines.loading._models = host.brain.engines.models
    server = Device(
        "endpoint:e",
        DeviceKind.POOL,
        4,
        "endpoint:e",
        ready=True,
        facts={"url": "x", "why": "HTTP 503", "reachable": False},
    )
    host.brain.add_device(server)
    full = {model.name: model for model in models_of(host.brain, host.now, True).models}
    assert {n: (f.kind, f.source, f.kv_dtype) for n, f in full.items()} == {
        "a": ("folder", "/srv/secret/a", "float32"),
        "g": ("gguf", "/srv/secret/g.gguf", "float16"),
        "e": ("endpoint", "http://10.0.0.7:8000/secret/v1", ""),
    }
    assert full["e"].places == (ModelPlace("endpoint:e", "unreachable", "HTTP 503", limit=4),)
    told = models_of(host.brain, host.now, False)
    assert [model.source for model in told.models] == ["a", "g.gguf", "10.0.0.7:8000"]
    assert b"secret" not in msgspec.msgpack.encode(told) and b"word" not in msgspec.msgpack.encode(told)


def test_a_daemon_without_models_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hexrt.cli.main import main

    with Running(tmp_path, CONFIG) as daemon:
        with Client(daemon.socket) as client:
            assert client.models().models == ()
        assert main(["--socket", str(daemon.socket), "models"]) == 0
    assert "[models.NAME]" in capsys.readouterr().out
