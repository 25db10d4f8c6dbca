"""image.encode and image.text on real pictures, and on files that strangers might send."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from hexrt.errors import BadRequest, NotFound
from tests.bodies import IMAGES, Machine, need_models


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    need_models("efficientnet-lite0", "rapidocr")
    return Machine(tmp_path)


def saved(picture: Image.Image, form: str, **more: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **more)
    return out.getvalue()


def real(name: str) -> Image.Image:
    return Image.open(IMAGES / name)


@pytest.mark.parametrize(("name", "word"), [("cat.jpg", "cat"), ("coffee.jpg", "espresso"), ("rocket.jpg", "missile")])
def test_a_picture_is_labelled_with_what_it_shows(machine: Machine, name: str, word: str) -> None:
    seen = machine.run("image.encode", {"top_k": 3}, {"image": (IMAGES / name).read_bytes()})
    assert any(word in entry["label"] for entry in seen["labels"]), seen["labels"]
    assert seen["label"] == seen["labels"][0]["label"]
    chances = [entry["probability"] for entry in seen["labels"]]
    assert chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1.00001
    assert seen["embedding"].shape == (1280,) and seen["embedding"].dtype == np.float32


def test_several_pictures_give_what_each_gives_alone(machine: Machine) -> None:
    files = [(IMAGES / name).read_bytes() for name in ("cat.jpg", "coffee.jpg")]
    both = machine.run("image.encode", {}, {"images": files})
    assert both["embeddings"].shape == (2, 1280)
    for row, data in enumerate(files):
        alone = machine.run("image.encode", {}, {"image": data})
        assert both["embeddings"][row].tobytes() == alone["embedding"].tobytes()
        assert both["labels"][row] == alone["labels"]


def test_the_same_picture_in_other_forms_stays_near(machine: Machine) -> None:
    cat = real("cat.jpg").convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to look at it
    see_through = cat.copy()
    see_through.putalpha(255)
    forms = [
        saved(cat, "PNG"),
        saved(cat, "WEBP", quality=95),
        saved(cat, "BMP"),
        saved(cat.convert("CMYK"), "JPEG", quality=95),
        saved(cat.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95),
        saved(see_through, "PNG"),
        saved(cat, "GIF", save_all=True, append_images=[Image.new("RGB", cat.size, "red")]),
        saved(cat.resize((cat.width * 4, cat.height * 4)), "JPEG", quality=95),
    ]
    vectors = machine.run("image.encode", {}, {"images": [*forms, (IMAGES / "rocket.jpg").read_bytes()]})["embeddings"]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors @ vectors[0]
    assert near[:-1].min() > 0.9, near
    assert near[-1] < 0.6, near


def test_gray_16_bit_and_palette_pictures_and_a_single_pixel_are_taken(machine: Machine) -> None:
    gray = real("cat.jpg").convert("L")
    deep = Image.fromarray(np.asarray(gray, np.uint16) * 257)
    palette = real("cat.jpg").convert("P")
    palette.info["transparency"] = 0
    pictures = [saved(gray, "PNG"), saved(deep, "PNG"), saved(palette, "PNG"), saved(Image.new("1", (1, 1)), "PNG")]
    pictures.append(saved(Image.new("RGB", (20_000, 1)), "PNG"))
    vectors = machine.run("image.encode", {}, {"images": pictures})["embeddings"]
    assert np.isfinite(vectors).all()
    gray_vector, deep_vector = vectors[0] / np.linalg.norm(vectors[0]), vectors[1] / np.linalg.norm(vectors[1])
    assert gray_vector @ deep_vector > 0.99


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*one) for one in chunks) + chunk(b"IEND", b"")


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"hello, this is no picture", "is no picture that can be read"),
    "zeros": (lambda: bytes(100_000), "is no picture that can be read"),
    "pdf": (lambda: b"%PDF-1.7\n" + bytes(100), "is no picture that can be read"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture that can be read"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture that can be read"),
    "tiff": (lambda: saved(Image.new("RGB", (9, 9)), "TIFF"), "is no picture that can be read"),
    "half a jpeg": (lambda: (IMAGES / "cat.jpg").read_bytes()[:15_000], "is damaged"),
    "half a png": (lambda: (IMAGES / "page.png").read_bytes()[:9_000], "is damaged"),
    "only a png's first bytes": (lambda: (IMAGES / "page.png").read_bytes()[:20], "is damaged|is no picture"),
    "png without pixels": (lambda: png(64, 64), "is damaged"),
    "png with spoilt pixels": (lambda: png(64, 64, (b"IDAT", b"\x00" * 99)), "is damaged"),
    "png bomb of 900 megapixels": (lambda: png(30_000, 30_000, (b"IDAT", zlib.compress(bytes(9_999)))), "pixels"),
    "png of 60 megapixels": (
        lambda: png(6_000, 10_000, (b"IDAT", zlib.compress(bytes(9_999)))),
        r"6000 x 10000 pixels",
    ),
    "png line of 2 ** 31 pixels": (lambda: png(2**31 - 1, 1, (b"IDAT", zlib.compress(b"a"))), "pixels"),
    "png of no width": (lambda: png(0, 5, (b"IDAT", zlib.compress(b"a"))), "is damaged|is no picture"),
    "png text bomb": (
        lambda: png(1, 1, (b"zTXt", b"k\x00\x00" + zlib.compress(bytes(80 << 20))), (b"IDAT", zlib.compress(bytes(4)))),
        "is damaged",
    ),
    "half a webp": (lambda: saved(real("cat.jpg"), "WEBP")[:4_000], "is damaged|is no picture"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(machine: Machine, case: str) -> None:
    make, message = HOSTILE[case]
    data = make()
    good = (IMAGES / "cat.jpg").read_bytes()
    with pytest.raises(BadRequest, match=rf"^s\.inputs\.image: .*({message})"):
        machine.run("image.encode", {}, {"image": data})
    with pytest.raises(BadRequest, match=rf"^s\.inputs\.images\.1: .*({message})"):
        machine.run("image.encode", {}, {"images": [good, data]})
    with pytest.raises(BadRequest, match=rf"^s\.inputs\.image: .*({message})"):
        machine.run("image.text", {}, {"image": data})


def test_spoilt_bytes_never_raise_anything_but_a_named_error(machine: Machine) -> None:
    draw = np.random.default_rng(0)
    outcomes = set()
    for name in ("cat.jpg", "page.png"):
        small = real(name)
        small.thumbnail((96, 96))
        whole = np.frombuffer(saved(small, "JPEG" if name.endswith("jpg") else "PNG"), np.uint8)
        for _ in range(40):
            spoilt = whole.copy()
            places = draw.integers(0, len(spoilt), 12)
            spoilt[places] = draw.integers(0, 256, 12)
            try:
                machine.run("image.encode", {}, {"image": spoilt.tobytes()})
                outcomes.add("read")
            except BadRequest:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("inputs", [{}, {"image": b"x", "images": [b"x"]}, {"images": []}])
def test_neither_both_nor_no_pictures_are_refused(machine: Machine, inputs: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"s.inputs(.images: is an empty list|: give either image or images)"):
        machine.run("image.encode", {}, inputs)


@pytest.mark.parametrize("image", ["no base64 !", 5, [1], {"a": 1}])
def test_what_is_no_bytes_is_refused_by_name(machine: Machine, image: Any) -> None:
    for op in ("image.encode", "image.text"):
        with pytest.raises(BadRequest, match=r"s.inputs.image"):
            machine.run(op, {}, {"image": image})


def test_the_text_of_a_photographed_page_is_read_in_order(machine: Machine) -> None:
    seen = machine.run("image.text", {}, {"image": (IMAGES / "page.png").read_bytes()})
    text = seen["text"].replace(" ", "").lower()
    assert text.startswith("region-basedsegmentation")
    assert text.index("letusfirstdetermine") < text.index("histogramofgreyvalues")
    assert seen["text"] == "\n".join(line["text"] for line in seen["lines"])
    for line in seen["lines"]:
        assert 0.5 <= line["score"] <= 1.0001 and len(line["box"]) == 4
        assert all(-5 <= x <= 389 and -5 <= y <= 196 for x, y in line["box"])


def test_a_picture_without_text_gives_no_lines(machine: Machine) -> None:
    assert machine.run("image.text", {}, {"image": saved(Image.new("RGB", (64, 64), "white"), "PNG")}) == {
        "text": "",
        "lines": [],
    }


@pytest.mark.parametrize("size", [(29_000, 40), (40, 29_000), (1, 1), (29_000, 1), (3, 900)])
def test_a_strip_too_thin_for_letters_gives_no_lines(machine: Machine, size: tuple[int, int]) -> None:
    assert machine.run("image.text", {}, {"image": saved(Image.new("RGB", size, "white"), "PNG")})["lines"] == []


def test_drawn_text_is_read_and_unsure_lines_can_be_left_out(machine: Machine) -> None:
    picture = Image.new("RGB", (480, 90), "white")
    ImageDraw.Draw(picture).text((12, 20), "Invoice 4711: 86 EUR", fill="black", font_size=40)
    data = saved(picture, "PNG")
    assert machine.run("image.text", {}, {"image": data})["text"] == "Invoice 4711: 86 EUR"
    assert machine.run("image.text", {"min_score": 1.0}, {"image": data})["lines"] == []


def test_a_model_of_another_kind_is_named(machine: Machine) -> None:
    with pytest.raises(NotFound, match=r"s.params.model: model 'rapidocr' is not of the kind"):
        machine.run("image.encode", {"model": "rapidocr"}, {"image": b"x"})
    with pytest.raises(NotFound, match=r"s.params.model: model 'nothing' is not in"):
        machine.run("image.text", {"model": "nothing"}, {"image": b"x"})
