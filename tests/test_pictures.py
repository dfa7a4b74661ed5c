"""Pictures as people have them: every orientation, mode and kind of damage, against Pillow and by eye of a few pixels."""

import io
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from glance.paths import POCKET
from glance.pictures import MAX_ASPECT, check_picture, png_bytes, read_picture


def page() -> Image.Image:
    """Return a page whose four corners differ: red, green, blue, white; 6 wide, 4 high."""
    image = Image.new("RGB", (6, 4), (90, 90, 90))
    for place, colour in {(0, 0): "red", (5, 0): "green", (0, 3): "blue", (5, 3): "white"}.items():
        image.putpixel(place, Image.new("RGB", (1, 1), colour).getpixel((0, 0)))
    return image


LAY_DOWN = {  # orientation -> what a camera did to the upright page
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["png", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_read_upright(tmp_path, orientation, kind):
    stored = page() if LAY_DOWN[orientation] is None else page().transpose(LAY_DOWN[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"a.{kind}", exif=exif)
    assert np.array_equal(np.asarray(read_picture(tmp_path / f"a.{kind}")), np.asarray(page()))
    small = read_picture(tmp_path / f"a.{kind}", max_pixels=6)
    assert (small.width, small.height) == (3, 2)


def grey_ramp() -> np.ndarray:
    return np.linspace(0, 1, 24).reshape(4, 6)


@pytest.mark.parametrize(
    ("mode", "top", "kind"),
    [("L", 255, "png"), ("I;16", 65535, "png"), ("I;16", 65535, "tiff"), ("F", 1, "tiff"), ("1", 1, "png")],
)
def test_grey_of_every_depth_keeps_its_range(tmp_path, mode, top, kind):
    values = grey_ramp() * top
    types = {"L": np.uint8, "I;16": np.uint16, "F": np.float32, "1": bool}
    Image.fromarray(np.round(values).astype(types[mode]) if mode != "F" else values.astype(np.float32)).save(
        tmp_path / f"a.{kind}"
    )
    read = np.asarray(read_picture(tmp_path / f"a.{kind}"))[..., 0].astype(int)
    wanted = 255 * (grey_ramp().round() if mode == "1" else grey_ramp())
    assert np.abs(read - wanted).max() <= 1
    assert read.min() == 0 and read.max() == 255


@pytest.mark.parametrize(
    "values",
    [np.full((4, 6), 300_000, np.int32), np.full((4, 6), 700.0, np.float32), np.full((4, 6), np.nan, np.float32)],
)
def test_grey_without_a_known_range_is_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="save it as 8 bit"):
        check_picture(tmp_path / "a.tiff")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_what_is_transparent_is_white(tmp_path, mode):
    ink = Image.new("RGBA", (6, 4), (0, 0, 0, 0))
    ink.putpixel((2, 1), (0, 0, 0, 255))
    path = tmp_path / "a.png"
    if mode in ("RGB", "L"):  # one colour is marked as transparent
        image = Image.new(mode, (6, 4), "white" if mode == "RGB" else 200)
        image.putpixel((2, 1), 0 if mode == "L" else (0, 0, 0))
        image.save(path, transparency=(255, 255, 255) if mode == "RGB" else 200)
    elif mode == "P":
        ink.convert("P").save(path, transparency=ink.convert("P").getpixel((0, 0)))
        paletted = Image.new("P", (6, 4), 0)
        paletted.putpalette([0, 0, 0, 0, 0, 0])
        paletted.putpixel((2, 1), 1)
        paletted.save(path, transparency=0)
    else:
        ink.convert(mode).save(path)
    read = np.asarray(read_picture(path))
    assert read[0, 0].tolist() == [255, 255, 255] and read[1, 2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]
)
def test_every_mode_of_pillow_becomes_the_same_picture(mode):
    """Black ink on a white or transparent page is black ink on white, however it is kept."""
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0) if mode in ("LA", "La", "PA", "RGBA", "RGBa") else "white")
    image.paste((0, 0, 0, 255), (2, 2, 6, 6))
    through = {"La": "LA", "RGBa": "RGBA", "PA": "LA", "LAB": "RGB"}.get(mode, mode)
    image = image.convert("RGB") if mode not in ("LA", "La", "PA", "RGBA", "RGBa") else image
    if mode == "LAB":
        image = Image.merge("LAB", [image.convert("L"), *[Image.new("L", (8, 8), 128)] * 2])
    elif mode == "PA":
        alpha = image.getchannel("A")
        image = image.convert("RGB").convert("P").convert("PA")
        image.putalpha(alpha)
    else:
        image = image.convert(through).convert(mode)
    shown = np.asarray(Image.open(io.BytesIO(png_bytes(image))).convert("L")).astype(int)
    assert shown[0, 0] > 250 and shown[3, 3] < 5


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_grey_of_16_bits_is_scaled_in_every_byte_order(mode):
    image = Image.new(mode, (2, 1))
    image.putpixel((1, 0), 65535)
    shown = Image.open(io.BytesIO(png_bytes(image)))
    assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]


FORMATS = {"png": {}, "jpeg": {}, "bmp": {}, "gif": {}, "tiff": {}, "webp": {"lossless": True}}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_cut_anywhere_is_refused_in_one_line_or_whole(tmp_path, kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, kind, **FORMATS[kind])
    whole = buffer.getvalue()
    full = np.asarray(read_picture(_written(tmp_path / f"whole.{kind}", whole)))
    for share in (0.0, 0.02, 0.3, 0.6, 0.9):
        path = _written(tmp_path / f"{share}.{kind}", whole[: int(share * len(whole))])
        try:
            check_picture(path)
        except ValueError as error:
            assert str(error) and "\n" not in str(error)
        else:
            assert np.array_equal(np.asarray(read_picture(path)), full)


def _written(path, data):
    path.write_bytes(data)
    return path


def test_modes_that_a_file_can_have_are_all_read(tmp_path):
    for mode, kind in {
        "CMYK": "tiff",
        "YCbCr": "tiff",
        "LAB": "tiff",
        "RGBX": "tiff",
        "P": "gif",
        "1": "tiff",
        "CMYK ": "jpeg",
    }.items():
        page().convert("RGB").convert(mode.strip() if mode.strip() not in ("LAB", "RGBX") else "RGB").save(
            tmp_path / f"a.{kind}"
        )
        assert read_picture(tmp_path / f"a.{kind}").mode == "RGB"


def test_a_picture_past_pillows_limit_and_a_strip_are_refused_in_one_line(tmp_path, monkeypatch):
    page().save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="exceeds limit"):
        warnings.simplefilter("ignore")
        check_picture(tmp_path / "a.png")
    monkeypatch.undo()
    Image.new("RGB", (3000, 10)).save(tmp_path / "strip.png")
    with pytest.raises(ValueError, match=f"3000 x 10, more than {MAX_ASPECT} times"):
        check_picture(tmp_path / "strip.png")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.integers(1, MAX_ASPECT), st.integers(1, 3000), st.booleans())
def test_scaling_leaves_no_strip_that_a_processor_refuses(short, aspect, max_pixels, lies):
    size = (short * aspect, short) if lies else (short, short * aspect)
    buffer = io.BytesIO()
    Image.new("L", size).save(buffer, "PNG")
    read = read_picture(buffer, max_pixels)
    assert max(read.size) <= MAX_ASPECT * min(read.size)


def test_shipped_pages_reach_the_target_bit_for_bit_as_pillow_reads_them():
    for page in sorted((POCKET / "eval").rglob("*.png"))[::50]:
        assert np.array_equal(np.asarray(read_picture(page)), np.asarray(Image.open(page).convert("RGB")))


def test_a_check_sees_that_a_file_has_changed(tmp_path):
    page().save(tmp_path / "a.png")
    check_picture(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"gone")
    with pytest.raises(ValueError):
        check_picture(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["bmp", "tiff", "gif"])
def test_pictures_are_shown_as_png_whatever_they_are(tmp_path, kind):
    Image.new("RGB", (2000, 500), "red").save(tmp_path / f"a.{kind}")
    shown = Image.open(io.BytesIO(png_bytes(tmp_path / f"a.{kind}", 400)))
    assert shown.format == "PNG" and shown.size == (400, 100)
