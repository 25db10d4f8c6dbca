"""The real peers of `hexrt bench llm`: each gives its rows on a tiny model, and nothing of it is left running."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from hexrt.cli import bench_llm
from hexrt.cli.bench_llm import Plan, Subject
from hexrt.cli.bench_llm_load import Sizes
from tests.llm_families import make, tiny, write_gguf

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(500)]

SIZES = Sizes(prefill=64, context=33, answer=16, sequences=(1, 4), clients=2, words=8, requests=1, arrivals=3, repeats=1)  # fmt: skip
ANSWERED = [
    "prefill 64", "decode 1", "decode 4", "clients 2", "clients 2 first token p50",
    *(f"poisson {name} {p}" for name in ("first token", "between tokens") for p in ("p50", "p99")),
]  # fmt: skip
VLLM = os.environ.get("HEXRT_BENCH_VLLM_PYTHON")


def measured(model: Path, ggufs: Sequence[Path] = (), vllm: str | None = None, rows: frozenset[str] = bench_llm.SERVED) -> dict[str, Subject]:  # fmt: skip
    """The peers by the first word of their names. None has left a process."""
    plan = Plan(model, tuple(ggufs), 1, SIZES, rows, ("exact",), True, vllm)
    shape = bench_llm.model_shape(bench_llm.read_config(model))
    form = bench_llm.forms(False)["exact"]
    child = bench_llm.Child(plan, bench_llm.read_config(model), shape, form, [])
    found = {peer.name.split()[0]: peer for peer in bench_llm.measure_peers(plan, child, shape, rows, 2.0)}
    assert psutil.Process().children() == []
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=1024)


def test_transformers_gives_prefill_and_decode(model: Path) -> None:
    found = measured(model, rows=frozenset({"prefill", "decode"}))
    assert found["transformers"].why == "" and found["transformers"].exact
    assert [each.what for each in found["transformers"].found.found] == ["prefill 64", "decode 1", "decode 4"]
    assert all((each.value or 0) > 0 for each in found["transformers"].found.found)
    assert "--gguf" in found["llama.cpp"].why and "--vllm-python" in found["vLLM"].why


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: pip install 'hexrt[peers]'")  # fmt: skip
def test_llama_cpp_s_server_gives_all_rows(model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny-f32.gguf", tiny("llama", max_position_embeddings=1024), "llama")
    found = measured(model, [file], rows=frozenset({"prefill", "decode", "clients", "poisson"}))["llama.cpp"]
    assert (found.name, found.exact, found.why) == ("llama.cpp F32", True, "")
    assert [each.what for each in found.found.found] == ANSWERED


@pytest.mark.skipif(VLLM is None, reason="HEXRT_BENCH_VLLM_PYTHON names no interpreter with vLLM for the CPU")
def test_vllm_gives_all_rows(model: Path) -> None:
    found = measured(model, vllm=VLLM)["vLLM"]
    assert found.why == "" and [each.what for each in found.found.found] == ANSWERED


def test_an_interpreter_without_vllm_is_said(model: Path) -> None:
    found = measured(model, vllm=sys.executable, rows=frozenset({"clients"}))
    assert "No module named 'vllm'" in found["vLLM"].why
