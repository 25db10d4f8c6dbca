"""The models of a folder through a real hexrtd: found by their files, a GGUF file served as its folder is, a broken one failing only its own step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from hexrt.core import RunState
from hexrt.workflow.build import WorkflowBuilder
from tests.llm_families import make, tiny, write_gguf
from tests.llm_support import LLM_ONLY
from tests.running import Running

pytestmark = pytest.mark.timeout(300)  # the first step waits for torch

CONFIG = f"{LLM_ONLY}[cpu]\nthreads = 1\narena_mib = 64\n"
FINE = ("folder", "file")
BROKEN = ("cut", "lies", "nested", "pickled")


def lay_out(models: Path) -> None:
    make(models / "folder", "qwen3")
    write_gguf(models / "file.gguf", tiny("qwen3"), "qwen3")
    cut = make(models / "cut", "llama") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    (models / "lies.gguf").write_bytes((models / "file.gguf").read_bytes().replace(b"qwen3.block_count\4\0\0\0\4", b"qwen3.block_count\4\0\0\0\5"))  # fmt: skip
    nested = make(models / "nested", "llama")
    (nested / "config.json").write_text('{"a": ' * 5000)
    pickled = make(models / "pickled", "llama")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")


def test_models_of_a_folder_are_found_and_a_broken_one_fails_only_the_step_that_names_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    lay_out(models)
    w = WorkflowBuilder()
    for name in (*FINE, *BROKEN):
        step = w.step(
            "llm.generate", id=name, inputs={"prompt": "the world"},
            params={"model": name, "max_tokens": 12, "numerics": "exact", "ignore_eos": True},
        )  # fmt: skip
        if name in FINE:
            w.output(name, step)
    with Running(tmp_path, CONFIG.format(models_dir=models)) as daemon, daemon.client() as client:
        outcome = client.run(w.build())
    assert outcome.state is RunState.FAILED
    said = {name: (error.kind, error.message) for name, error in outcome.errors.items()}
    assert said.keys() == set(BROKEN), said
    assert "there is no model 'pickled'; configured are: cut, file, folder, lies, nested" in said["pickled"][1]
    for name in BROKEN[:3]:
        assert said[name][0] == "unavailable" and f"'{name}'" in said[name][1], said[name]
        assert str(tmp_path) not in said[name][1]
    answers: dict[str, Any] = dict(outcome.outputs)
    assert answers["file"] == answers["folder"]
    assert answers["file"]["answer_tokens"] == 12
