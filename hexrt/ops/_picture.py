"""Opens picture files that strangers made: bounded, upright, in RGB.

Owns the limits. Used by the bodies of `image.*`. Nothing is written and no other format's parser is reached.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hexrt.errors import BadRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000
MAX_SIDE = 30_000


def open_picture(data: bytes, where: str, wanted_side: int | None = None) -> Image.Image:
    """The first frame as upright RGB, what is see-through laid on white.

    A JPEG may be decoded smaller, yet with sides of at least `wanted_side`. Raises BadRequest that names `where` and what is wrong.
    """
    if not data:
        raise BadRequest("is empty: give the bytes of a picture file", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # of damaged side data, such as EXIF
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                raise BadRequest(
                    f"has {width} x {height} pixels; at most {MAX_PIXELS} pixels and {MAX_SIDE} a side are taken", where
                )
            if wanted_side is not None:
                picture.draft("RGB", (wanted_side, wanted_side))
            picture.load()
            return _to_rgb(ImageOps.exif_transpose(picture))
    except UnidentifiedImageError:
        raise BadRequest(f"is no picture that can be read; {', '.join(FORMATS)} can", where) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadRequest(f"has more pixels than the {MAX_PIXELS} that are taken", where) from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error, OverflowError) as error:
        raise BadRequest(f"is damaged: {type(error).__name__}: {error}", where) from None


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16") or picture.mode == "I":
        return Image.fromarray((np.asarray(picture, np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        above = picture.convert("RGBA")
        ground = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(ground, above).convert("RGB")
    return picture.convert("RGB")
