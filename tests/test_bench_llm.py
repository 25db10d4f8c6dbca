"""`hexrt bench llm`: what a rate, a quantile and a ratio are, what a missing peer leaves, and the whole of it once over a tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hexrt.cli import bench_llm, bench_llm_peers
from hexrt.cli.bench_llm import Subject, bound, held, measure_peers, paged_rows, plain, quantisation
from hexrt.cli.bench_llm_hexrt import About, Form, forms, tables
from hexrt.cli.bench_llm_load import (
    PAGE_TOKENS,
    Finding,
    Findings,
    Sizes,
    Stream,
    decode_rate,
    measure,
    prompt_ids,
    prompt_text,
    quantile,
)
from hexrt.cli.bench_llm_turn import measure_turn
from hexrt.errors import TaskFailed, TimedOut, Unavailable
from hexrt.llm.steps import ModelShape
from tests.llm_families import make

pytestmark = pytest.mark.timeout(100)

SHAPE = ModelShape(2, 3, 64, 1024, 320)
SMALL = Sizes(
    prefill=64, context=33, answer=20, sequences=(1, 4), clients=2, words=8, requests=1, arrivals=3, repeats=1
)
SERVED = frozenset({"prefill", "decode", "clients", "poisson"})


# --- arithmetic ---------------------------------------------------------------------------------------------------


def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert quantile([7.0], 0.99) == 7.0
    assert math.isnan(quantile([], 0.5))


def test_a_decode_rate_counts_what_came_while_all_decoded() -> None:
    early = Stream(0.0, (1.0, 2.0, 3.0, 4.0), 8)  # two tokens a piece
    late = Stream(0.0, (2.0, 3.0, 4.0, 5.0), 4)
    assert decode_rate([early, late]) == pytest.approx((2 * 2 + 2 * 1) / 2.0)  # from 2 to 4
    assert decode_rate([early]) == pytest.approx(3 * 2 / 3.0)


def test_a_rate_of_answers_that_never_decoded_together_is_none() -> None:
    assert math.isnan(decode_rate([Stream(0.0, (1.0, 2.0), 2), Stream(0.0, (3.0, 4.0), 2)]))


def test_prompts_are_the_same_for_everybody_and_differ_from_each_other() -> None:
    ids = [prompt_ids(f"decode {number}", 33, 320) for number in range(64)]
    assert ids == [prompt_ids(f"decode {number}", 33, 320) for number in range(64)]
    assert len({tuple(each[:PAGE_TOKENS]) for each in ids}) == 64  # so that no page of them is shared
    assert all(100 <= token < 320 for each in ids for token in each)
    assert prompt_text("a", 5) != prompt_text("b", 5)


def test_a_context_is_whole_pages_and_one_token() -> None:
    assert Sizes().context % PAGE_TOKENS == 1
    assert max(Sizes().quick().sequences) == 16


# --- a server that is played --------------------------------------------------------------------------------------


class Played:
    """Answers at once; a chat of `broken` breaks off."""

    def __init__(self, broken: bool = False) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self._broken = broken
        self._now = 0.0

    def _stream(self, tokens: int) -> Stream:
        self._now += 1.0
        return Stream(self._now, tuple(self._now + 0.1 * n for n in range(1, tokens + 1)), tokens)

    async def complete(self, ids: Sequence[int], tokens: int, client: int) -> Stream:
        self.asked.append((tuple(ids), tokens))
        return Stream(0.0, tuple(0.1 * n for n in range(1, tokens + 1)), tokens)

    async def chat(self, text: str, tokens: int, client: int) -> Stream:
        if self._broken:
            raise TaskFailed("it broke")
        return self._stream(tokens)


def test_a_server_is_asked_for_its_prompts_before_their_answers_are_timed() -> None:
    server, found = Played(), Findings()
    asyncio.run(measure(server, SMALL, frozenset({"decode"}), 320, found))
    contexts = [(ids, tokens) for ids, tokens in server.asked if len(ids) == SMALL.context]
    assert [tokens for _, tokens in contexts] == [1, 20, 1, 1, 1, 20, 20, 20, 20]
    assert len({ids for ids, _ in contexts}) == 4
    assert [(each.what, each.value) for each in found.found] == [("decode 1", pytest.approx(10)), ("decode 4", pytest.approx(40))]  # fmt: skip


def test_what_was_found_before_a_server_broke_off_stays() -> None:
    found = Findings()
    with pytest.raises(TaskFailed, match="it broke"):
        asyncio.run(measure(Played(broken=True), SMALL, SERVED, 320, found))
    assert [each.what for each in found.found] == ["prefill 64", "decode 1", "decode 4"]


def test_answers_that_never_decoded_together_leave_a_row_that_says_so() -> None:
    found = Findings()
    asyncio.run(measure(Played(), replace(SMALL, answer=1), frozenset({"decode"}), 320, found))
    assert [(each.value, each.note) for each in found.found] == [(None, "the answers came in one piece")] * 2


def test_rows_whose_prompts_would_take_too_long_are_left_out_and_say_so() -> None:
    found = Findings()
    asyncio.run(measure(Played(), replace(SMALL, most_s=0.0), frozenset({"decode"}), 320, found))
    assert [(each.what, each.value) for each in found.found] == [("decode 1", None), ("decode 4", None)]
    assert all("left out" in each.note for each in found.found)


def test_a_server_that_is_too_slow_is_broken_off() -> None:
    with pytest.raises(TimedOut, match="longer than 0 s"):
        asyncio.run(measure(Played(), replace(SMALL, subject_s=0.0), frozenset({"poisson"}), 320, Findings(), rate=1e-6))  # fmt: skip


def test_the_load_of_arrivals_gives_times_to_the_first_token_and_between_tokens() -> None:
    found = Findings()
    asyncio.run(measure(Played(), SMALL, frozenset({"poisson"}), 320, found, rate=1e6))
    values = {each.what: each.value for each in found.found}
    assert values == {
        "poisson first token p50": pytest.approx(100), "poisson first token p99": pytest.approx(100),
        "poisson between tokens p50": pytest.approx(100), "poisson between tokens p99": pytest.approx(100),
    }  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------------------------


def subject(name: str, exact: bool = False, why: str = "", **values: float) -> Subject:
    made = Subject(name, exact, why=why)
    for what, value in values.items():
        made.found.add(what.replace("_", " "), value, "ms" if "token" in what else "tokens/s")
    return made


def test_a_row_is_held_against_the_best_peer_that_has_one() -> None:
    ours = subject("hexrt", prefill_512=800.0, decode_16=300.0, decode_4=100.0)
    peers = [subject("transformers float32", True, prefill_512=400.0, decode_16=100.0), subject("llama.cpp Q4_1", prefill_512=200.0, decode_16=200.0)]  # fmt: skip
    prefill, sixteen, four = held([ours], peers)
    assert (prefill["limit"], prefill["ratio"], prefill["met"], prefill["asked"]) == (400.0, 2.0, True, ">= 100%")
    assert prefill["note"] == "limit: transformers float32"
    assert (sixteen["name"], sixteen["limit"], sixteen["ratio"]) == ("hexrt decode 16", 200.0, 1.5)
    assert (four["limit"], four["ratio"], four["asked"], four["met"]) == (None, None, "", None)


def test_exact_float32_is_held_against_peers_that_compute_so_and_nothing_is_asked_of_a_second_form() -> None:
    peers = [subject("transformers float32", True, decode_1=20.0), subject("llama.cpp Q4_1", decode_1=100.0)]
    first, second = held([subject("hexrt", decode_1=110.0), subject("hexrt exact", True, decode_1=30.0)], peers)
    assert (first["limit"], first["met"]) == (100.0, True)
    assert (second["name"], second["limit"], second["asked"]) == ("hexrt exact decode 1", 20.0, "")


def test_streaming_clients_are_held_against_vllm_and_without_it_nothing_is_decided() -> None:
    ours, llama = subject("hexrt", clients_8=250.0), subject("llama.cpp Q4_1", clients_8=300.0)
    (row,) = held([ours], [llama, subject("vLLM float32", True, clients_8=200.0)])
    assert (row["limit"], row["ratio"], row["asked"], row["met"]) == (200.0, 1.25, ">= 130% of vLLM", False)
    (row,) = held([ours], [llama])
    assert (row["limit"], row["met"], row["note"]) == (300.0, None, "limit: llama.cpp Q4_1")


def test_of_times_the_least_is_the_limit() -> None:
    peers = [subject("a", poisson_first_token_p50=40.0), subject("b", poisson_first_token_p50=30.0)]
    (row,) = held([subject("hexrt", poisson_first_token_p50=60.0)], peers)
    assert (row["limit"], row["ratio"]) == (30.0, 2.0)


def test_a_subject_that_broke_off_keeps_its_rows_and_says_why() -> None:
    first, second = plain(subject("vLLM float32", True, "it broke off", prefill_512=1.0))
    assert (first["name"], first["value"]) == ("vLLM float32 prefill 512", 1.0)
    assert (second["name"], second["value"], second["unit"], second["note"]) == ("vLLM float32", None, "absent", "it broke off")  # fmt: skip
    (row,) = held([Subject("hexrt", False, why="no room")], [])
    assert (row["name"], row["value"], row["note"]) == ("hexrt", None, "no room")


def test_one_sequence_is_held_against_what_the_memory_allows() -> None:
    about, form = About(80_000_000, ""), Form("exact", "float32", "as_dtype", "float32")
    sizes = replace(SMALL, context=65, answer=0)
    (row,) = bound(subject("hexrt", decode_1=50.0), form, about, SHAPE, sizes, 10.0)
    a_token = 80_000_000 + 65 * 2 * 2 * 3 * 64 * 4
    assert (row["name"], row["value"], row["asked"]) == ("hexrt decode 1 / memory", 50.0, "")
    assert row["limit"] == pytest.approx(10e9 / a_token) and row["ratio"] == pytest.approx(50 * a_token / 10e9)
    assert bound(subject("hexrt"), form, about, SHAPE, sizes, 10.0) == []


def test_attention_over_pages_is_held_against_the_contiguous_form() -> None:
    (row,) = paged_rows([Finding("paged decode 16", 80.0, "tokens/s"), Finding("contiguous decode 16", 100.0, "tokens/s")])  # fmt: skip
    assert (row["name"], row["ratio"], row["met"]) == ("paged / contiguous decode 16", 0.8, False)
    (row,) = paged_rows([Finding("attention", None, "absent", "no torch")])
    assert (row["name"], row["value"], row["note"]) == ("attention", None, "no torch")


def test_peers_that_are_not_there_are_rows_that_say_why(tmp_path: Path) -> None:
    broken = tmp_path / "model.Q4_0.gguf"
    broken.write_bytes(b"GGUF")
    plan = bench_llm.Plan(tmp_path, (broken,), 1, SMALL, SERVED, ("exact",), True, sys.executable)
    child: Any = None  # without rows of its kinds transformers is not started
    llama, vllm = measure_peers(plan, child, SHAPE, frozenset({"clients"}), 1.0)
    assert (llama.name, llama.found.found) == ("llama.cpp Q4_0", []) and llama.why
    assert vllm.name.startswith("vLLM ") and "No module named 'vllm'" in vllm.why
    assert psutil.Process().children() == []


def test_a_server_that_cannot_be_started_says_why() -> None:
    with pytest.raises(Unavailable, match="No such file"), bench_llm_peers.serving(["/nowhere/python"], 1, {}):
        pytest.fail("it was not started")


def test_a_server_that_never_answers_is_ended() -> None:
    stuck = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with pytest.raises(Unavailable, match=r"within 0\.1 s"), bench_llm_peers.serving(stuck, bench_llm_peers.free_port(), {}, 0.1):  # fmt: skip
        pytest.fail("it did not answer")
    assert psutil.Process().children() == []


def test_a_server_s_last_words_are_its_error_and_not_what_follows() -> None:
    log = "INFO starting\n  File x\n(EngineCore pid=7) ValueError: too little memory\nleaked 64 types\n"
    assert bench_llm_peers.last_words(log) == "(EngineCore pid=7) ValueError: too little memory"
    assert bench_llm_peers.last_words("one\ntwo\n") == "two" and bench_llm_peers.last_words("") == ""


def test_a_piece_of_an_answer_has_text_as_a_completion_or_a_chat() -> None:
    assert bench_llm_peers.has_text({"text": "a"}) and bench_llm_peers.has_text({"delta": {"content": "a"}})
    assert not any(map(bench_llm_peers.has_text, ({"delta": {"role": "assistant"}}, {"text": ""}, {"delta": None})))


def test_a_gguf_file_is_called_after_its_quantisation() -> None:
    assert [quantisation(Path(n)) for n in ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-f32.gguf")] == ["Q4_1", "F32"]


def test_a_busy_machine_is_said() -> None:
    assert "load 6.2" in bench_llm.busy(6.2) and bench_llm.busy(0.1) == ""


def test_forms_compute_in_bf16_where_the_processor_does() -> None:
    assert set(forms(False)) == {"exact", "int8", "int4"} and forms(False)["int4"].dtype == "float32"
    assert forms(True)["int4"].dtype == "bfloat16" and "bf16" in forms(True)
    assert [each.name for each in forms(True).values() if each.is_exact] == ["exact"]


def test_the_arena_holds_all_prompts_and_answers_at_a_time() -> None:
    form = Form("exact", "float32", "as_dtype", "float32")
    made = tables(form, Path("/models/m"), SHAPE, 2, Sizes())
    pages = 64 * -(-(Sizes().context + Sizes().answer) // PAGE_TOKENS)
    assert int(str(made["cpu"]["arena_mib"])) << 20 > pages * SHAPE.page_bytes("float32", PAGE_TOKENS)
    assert "kv_dtype" not in made["models.bench"]


def test_a_turn_of_the_daemon_is_timed() -> None:
    cost = measure_turn(sequences=8, turns=5)
    assert 0 < cost.decided_ms < cost.whole_ms <= cost.worst_ms


# --- the whole ----------------------------------------------------------------------------------------------------


def test_a_tiny_model_is_measured_through_a_daemon_of_its_own(tmp_path: Path) -> None:
    model = make(tmp_path / "tiny", "llama", max_position_embeddings=512)
    plan = bench_llm.Plan(model, (), 1, SMALL, SERVED, ("exact",), False)
    before = set(os.listdir("/proc/self/fd"))
    rows = {row["name"]: row for row in bench_llm.measure(plan)}
    assert set(rows) == {
        "hexrt prefill 64", "hexrt decode 1", "hexrt decode 4", "hexrt clients 2", "hexrt clients 2 first token p50",
        *(f"hexrt poisson {name} {p}" for name in ("first token", "between tokens") for p in ("p50", "p99")),
    }  # fmt: skip
    assert all(row["value"] > 0 and row["met"] is None for row in rows.values())
    assert psutil.Process().children() == [] and set(os.listdir("/proc/self/fd")) == before


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hexrt.cli.main", "bench", "llm", "--json", "--rows", "daemon", "--no-peers"]
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 64, "vocab_size": 320}))  # fmt: skip
    done = subprocess.run([*command, "--model", str(model)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["bench"] == "llm" and {"threads", "load_before", "load_after"} <= set(answer["machine"])
    (row,) = answer["rows"]
    assert (row["name"], row["asked"], row["unit"]) == ("daemon 64", "< 1", "ms") and row["value"] > 0


def test_an_unknown_row_or_form_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "hexrt.cli.main", "bench", "llm"]
    done = subprocess.run([*command, "--rows", "prefil"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "'prefil' is none of memory, daemon" in done.stderr
