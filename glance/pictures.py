"""Pictures as people have them: checked whole before any work, read upright in RGB on white, and shown small in notebooks.

Conventions that decide pixels:

- An EXIF orientation is applied, so that a target reads the page as people see it.
- Transparency is composited on white.
- Grey of 16 bits is scaled by its range, 0 to 65535; floating point grey by 0 to 1. What has no such range is refused.
- `max_pixels` scales an upright picture down, keeping its shape.
"""

import base64
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

MAX_ASPECT = 200  # Qwen's processors refuse longer strips
SHOWN = 768  # px, the longer side of a picture in a notebook


def read_picture(path: str | Path, max_pixels: int | None = None) -> Any:
    """Read a picture as RGB.

    Raises:
        ValueError: it cannot be read whole, or not without a guess; one line, without the file's name.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            upright = _to_rgb(image)
    except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
        raise ValueError(f"{_said(error)}") from None
    size = upright.width * upright.height
    if max_pixels and size > max_pixels:
        scale = (max_pixels / size) ** 0.5
        width = max(1, int(upright.width * scale))
        height = max(1, int(upright.height * scale))
        # Rounding down a strip's shorter side must not make it longer than processors take.
        upright = upright.resize((min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)))
    return upright


def check_picture(path: str | Path) -> None:
    """Decode a picture wholly, once per state of the file; refuse what a target could not be shown.

    Raises:
        ValueError: as `read_picture`, or a strip that processors refuse.
    """
    path = Path(path)
    state = path.stat()
    problem = _problem(str(path), state.st_mtime_ns, state.st_size)
    if problem:
        raise ValueError(problem)


@lru_cache(maxsize=100_000)
def _problem(path: str, changed: int, size: int) -> str:
    """Say what is wrong with a picture, "" for nothing; `changed` and `size` tell a file's states apart."""
    try:
        image = read_picture(path)
    except ValueError as error:
        return str(error)
    longer = max(image.size)
    shorter = min(image.size)
    if longer > MAX_ASPECT * shorter:
        return f"it is {image.width} x {image.height}, more than {MAX_ASPECT} times as long as wide: crop it"
    return ""


def show_picture(picture: Any, longest: int = SHOWN) -> Any:
    """Show a picture, or a picture file of any kind, in a notebook: as PNG, at most `longest` px on its longer side."""
    from IPython.display import Image

    return Image(data=png_bytes(picture, longest), format="png")


def png_bytes(picture: Any, longest: int = SHOWN) -> bytes:
    """Encode a picture, or a picture file of any kind, as PNG of at most `longest` px on its longer side."""
    image = read_picture(picture) if isinstance(picture, (str, Path)) else _to_rgb(picture)
    image.thumbnail((longest, longest))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(picture: Any, longest: int = SHOWN) -> str:
    """Return a picture as a URL that a page carries with it: an SVG file as it is, anything else as `png_bytes`."""
    if isinstance(picture, Path) and picture.suffix.lower() == ".svg":
        return f"data:image/svg+xml;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    return f"data:image/png;base64,{base64.b64encode(png_bytes(picture, longest)).decode()}"


def _to_rgb(image: Any) -> Any:
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)  # decodes all of it
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return _scaled(np.asarray(image), 65535)
    if image.mode in ("I", "F"):
        return _scaled(np.asarray(image), 1.0 if image.mode == "F" else None)
    if image.mode == "La":  # Pillow turns it into nothing but this
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        page = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(page, image)
    return image.convert("RGB")


def _scaled(values: np.ndarray, top: float | None) -> Any:
    """Turn grey values (h, w) of the range 0 to `top` into a picture; refuse values outside, and an unknown range."""
    from PIL import Image

    low = float(values.min())
    high = float(values.max())
    if top is None or not 0 <= low <= high <= top:
        known = "no range of its own" if top is None else f"the range 0 to {top:g}"
        raise ValueError(f"grey values {low:g} to {high:g} in a format with {known}: save it as 8 bit")
    grey = Image.fromarray(np.round(values.astype(np.float64) * (255 / top)).astype(np.uint8))
    return grey.convert("RGB")


def _said(error: Exception) -> str:
    """Put an error into one line."""
    return " ".join(str(error).split()) or type(error).__name__
