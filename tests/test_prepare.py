"""The preparation of models and data: once, whole, and again only when something changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hexrt.cli.prepare import CORPUS_TITLES, Item, package_folder, prepare_item
from hexrt.errors import Unavailable
from tests.bodies import MODELS, is_prepared, need_models


def item(text: str = "content", recipe: int = 1, package: str = "msgspec") -> Item:
    return Item("thing", recipe, (package,), lambda folder: [(folder / "data.txt").write_text(text)].clear())


def test_a_folder_is_made_once_and_again_when_recipe_or_content_changed(tmp_path: Path) -> None:
    assert prepare_item(item(), tmp_path) is True
    assert prepare_item(item("never written"), tmp_path) is False
    assert (tmp_path / "thing/data.txt").read_text() == "content"
    assert prepare_item(item("newer", recipe=2), tmp_path) is True
    assert (tmp_path / "thing/data.txt").read_text() == "newer"
    (tmp_path / "thing/data.txt").write_text("spoilt")
    assert prepare_item(item("newer", recipe=2), tmp_path) is True
    assert (tmp_path / "thing/data.txt").read_text() == "newer"
    (tmp_path / "thing/prepared.json").write_text("{")
    assert prepare_item(item("newer", recipe=2), tmp_path) is True
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_preparation_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "data.txt").write_text("half")
        raise OSError("disk full")

    prepare_item(item(), tmp_path)
    with pytest.raises(OSError, match="disk full"):
        prepare_item(Item("thing", 2, ("msgspec",), fails), tmp_path)
    assert (tmp_path / "thing/data.txt").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="thing: package no-such-package is not installed"):
        prepare_item(item(package="no-such-package"), tmp_path)
    with pytest.raises(Unavailable, match="package no_such_package is not installed"):
        package_folder("no_such_package")


@pytest.mark.parametrize(
    ("last", "prepared"), [("prepared.json", True), ("conversion.json", True), ("config.json", False)]
)
def test_a_folder_counts_as_prepared_once_what_is_written_last_is_there(
    tmp_path: Path, last: str, prepared: bool
) -> None:
    assert not is_prepared("thing", tmp_path)
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / last).write_text("{}")
    assert is_prepared("thing", tmp_path) is prepared


def test_the_corpus_holds_the_leads_that_the_demo_asks_about_and_names_its_licence() -> None:
    need_models("corpus")
    from hexrt.cli.demo_questions import QUESTIONS

    lines = (MODELS / "corpus/leads.jsonl").read_text(encoding="utf-8").splitlines()
    leads = [json.loads(line) for line in lines]
    assert [lead["id"] for lead in leads] == list(range(CORPUS_TITLES))
    titles = [lead["title"] for lead in leads]
    assert len(set(titles)) == CORPUS_TITLES and all(lead["text"] for lead in leads)
    assert {question.title for question in QUESTIONS} <= set(titles)
    assert "Creative Commons Attribution-ShareAlike 4.0" in (MODELS / "corpus/LICENCE.txt").read_text()
