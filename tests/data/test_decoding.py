import io
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import ExifTags, Image

from trainkit.data import decoding, packs
from trainkit.data.decoding import BrokenImageError, Part
from trainkit.data.photo_transforms import CenterCrop

Values = numpy.ndarray[Any, Any]


def tiff(
    pixels: bytes, size: tuple[int, int], bits: int, sample: int = 1, *, white: int = 255, preview: int = 0
) -> bytes:
    """A gray TIFF file, little-endian and not compressed.

    Args:
        sample: 1 whole numbers, 2 with a sign, 3 floats.
        white: 255, or 0 where the largest number is black.
    """
    width, height = size
    tags = ((254, preview), (256, width), (257, height), (258, bits), (259, 1), (262, white == 255), (273, 8), (277, 1),
            (278, height), (279, len(pixels)), (339, sample))  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag > 270 and tag != 339 else 3, 1, value) for tag, value in tags)
    where = 8 + len(pixels)
    return b"II*\0" + struct.pack("<I", where) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


def packed(values: list[int], bits: int) -> bytes:
    whole = "".join(format(value, f"0{bits}b") for value in values)
    return int(whole, 2).to_bytes(len(whole) // 8, "big")


def of(values: list[float], kind: str) -> bytes:
    return numpy.array(values, kind).tobytes()


def png(values: list[int]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(numpy.array([values], numpy.uint16)).save(out, "PNG")
    return out.getvalue()


def pnm(head: str, pixels: bytes) -> bytes:
    return head.encode() + pixels


ROW = (4, 1)
DEPTHS: dict[str, tuple[bytes, list[Any]]] = {
    "TIFF, 1 bit": (tiff(b"\x50", ROW, 1), [0, 255, 0, 255]),
    "TIFF, 1 bit, 0 is white": (tiff(b"\x50", ROW, 1, white=0), [255, 0, 255, 0]),
    "TIFF, 4 bits": (tiff(b"\x0f\x84", ROW, 4), [0, 255, 136, 68]),
    "TIFF, 8 bits": (tiff(b"\0\x01\x80\xff", ROW, 8), [0, 1, 128, 255]),
    "TIFF, 12 bits": (tiff(packed([0, 16, 2048, 4095], 12), ROW, 12), [0, 1, 128, 255]),
    "TIFF, 16 bits": (tiff(of([0, 256, 32768, 65535], "<u2"), ROW, 16), [0, 1, 128, 255]),
    "TIFF, 16 bits, 0 is white": (tiff(of([0, 256, 32768, 65535], "<u2"), ROW, 16, white=0), [255, 254, 127, 0]),
    "TIFF, 32 bits": (tiff(of([0, 1, 128, 255], "<u4"), ROW, 32), [0, 1, 128, 255]),
    "TIFF, 32 bits with a sign": (tiff(of([0, 1, 128, 255], "<i4"), ROW, 32, 2), [0, 1, 128, 255]),
    "TIFF, 16 bits with a sign": (tiff(of([0, 1, 128, 255], "<i2"), ROW, 16, 2), [0, 1, 128, 255]),
    "TIFF, 8 bits with a sign": (tiff(of([0, 1, 100, 127], "i1"), ROW, 8, 2), [0, 1, 100, 127]),
    "TIFF, floats to 255": (tiff(of([0, 1.9, 128, 255], "<f4"), ROW, 32, 3), [0, 1, 128, 255]),
    "TIFF, floats that are 0": (tiff(of([0, 0, 0, 0], "<f4"), ROW, 32, 3), [0, 0, 0, 0]),
    "PNG, 16 bits": (png([0, 256, 32768, 65535]), [0, 1, 128, 255]),
    "PGM, maxval 15": (pnm("P5\n4 1\n15\n", b"\0\x01\x08\x0f"), [0, 17, 136, 255]),
    "PGM, maxval 4095": (pnm("P5\n4 1\n4095\n", of([0, 16, 2048, 4095], ">u2")), [0, 1, 128, 255]),
    "PGM, maxval 65535": (pnm("P5\n4 1\n65535\n", of([0, 256, 32768, 65535], ">u2")), [0, 1, 128, 255]),
    "PPM, maxval 4095": (pnm("P6\n1 1\n4095\n", of([0, 2048, 4095], ">u2")), [[0, 128, 255]]),
    "PBM": (pnm("P4\n4 1\n", b"\x50"), [255, 0, 255, 0]),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_each_depth_has_one_scale(name: str) -> None:
    data, expected = DEPTHS[name]
    pixels = decoding.decode_pixels(data, 3, name)
    assert pixels.dtype == numpy.uint8
    assert pixels[0].tolist() == [one if isinstance(one, list) else [one] * 3 for one in expected]
    gray = decoding.decode_pixels(data, 1, name)
    assert (gray[..., 0] == decoding.gray_of(pixels)[..., 0]).all()


NO_SCALE = {
    "TIFF, 8 bits in 16": (tiff(of([0, 1, 128, 255], "<u2"), ROW, 16), "at most 255, and white is 65535"),
    "PNG, 8 bits in 16": (png([0, 1, 128, 255]), "at most 255, and white is 65535"),
    "JPEG, lossless of 16 bits": (
        b"\xff\xd8\xff\xc3\0\x0b\x10\0\x04\0\x04\x01\x01\x11\0",
        "It begins as a JPEG file, but is damaged",
    ),
    "TIFF, 32 bits": (tiff(of([0, 1, 128, 256], "<u4"), ROW, 32), "from 0 to 256; only 0 to 255 are accepted"),
    "TIFF, all of 32 bits": (tiff(of([0, 1, 128, 1 << 31], "<u4"), ROW, 32), "only 0 to 255 are accepted"),
    "TIFF, 32 bits below 0": (tiff(of([-1, 1, 128, 255], "<i4"), ROW, 32, 2), "from -1 to 255"),
    "TIFF, 16 bits below 0": (tiff(of([-1000, 1, 128, 255], "<i2"), ROW, 16, 2), "from -1000 to 255"),
    "TIFF, 8 bits below 0": (tiff(of([-1, 1, 100, 127], "i1"), ROW, 8, 2), "from -1 to 127"),
    "TIFF, floats to 1": (tiff(of([0, 0.1, 0.5, 1], "<f4"), ROW, 32, 3), "from 0 to 1: white may be 1 or 255"),
    "TIFF, floats above 255": (tiff(of([0, 1, 2, 4095], "<f4"), ROW, 32, 3), "from 0 to 4095"),
    "TIFF, no numbers": (tiff(of([0, 1, 2, float("nan")], "<f4"), ROW, 32, 3), "from nan to nan"),
    "TIFF, doubles": (tiff(of([0, 1, 2, 3], "<f8"), ROW, 64, 3), "a variant that Pillow does not read"),
    "TIFF, 10 bits": (tiff(packed([0, 1, 2, 3], 10), ROW, 10), "a variant that Pillow does not read"),
    "TIFF, the preview of a photo": (tiff(b"\0\x01\x80\xff", ROW, 8, preview=1), "Its first picture is a preview"),
    "PFM": (pnm("Pf\n4 1\n-1.0\n", of([0, 0.1, 0.5, 1], "<f4")), "not an image in a known format"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image in a known format"),
}


@pytest.mark.parametrize("name", NO_SCALE)
def test_values_without_a_scale_are_refused_by_name_and_never_black(name: str) -> None:
    data, why = NO_SCALE[name]
    for in_chans in (1, 3):
        with pytest.raises(BrokenImageError, match="Cannot decode the image of tests") as caught:
            decoding.decode_pixels(data, in_chans, "of tests")
        assert why in caught.value.why


def jpeg(factors: tuple[tuple[int, int], ...] = ((1, 4), (1, 1), (1, 1))) -> bytes:
    """A gray JPEG of 32 x 32 whose components are sampled so: 4:4:1, as after turning one of a DV camera's."""
    out = io.BytesIO()
    Image.new("RGB", (32, 32)).save(out, "JPEG", subsampling=2)
    data = bytearray(out.getvalue())
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    for at, (across, down) in enumerate(factors):
        data[frame + 11 + 3 * at] = across << 4 | down
    rounds = (32 // (8 * max(a for a, _ in factors))) * (32 // (8 * max(d for _, d in factors)))
    blocks = "".join(("001010" if at == 0 else "0000") * (a * d) for at, (a, d) in enumerate(factors)) * rounds
    blocks += "1" * (-len(blocks) % 8)
    body = int(blocks, 2).to_bytes(len(blocks) // 8, "big").replace(b"\xff", b"\xff\0")
    return bytes(data[: scan + 14]) + body + b"\xff\xd9"


def test_what_the_fast_decoder_does_not_know_goes_to_pillow(tmp_path: Path) -> None:
    data = jpeg()
    with Image.open(io.BytesIO(data)) as picture:
        expected = numpy.array(picture.convert("RGB"))
    assert numpy.array_equal(decoding.decode_pixels(data, 3, "photo.jpg"), expected)
    (tmp_path / "photo.jpg").write_bytes(data)
    kind, height, width, _ = packs._record(str(tmp_path / "photo.jpg"), side=64, kind="raw")
    assert (kind, height, width) == (packs.PIXELS, 32, 32)


BOX = (56, 112, 120, 160)
"""Of which a half, a quarter and an eighth begin at whole pixels."""


class Asked(list[tuple[int, int]]):
    """Chooses `BOX`, and notes the sizes of the images that it is asked for."""

    def __call__(self, height: int, width: int) -> decoding.Box:
        self.append((height, width))
        return BOX


def photo(kind: str, orientation: int = 1) -> bytes:
    """A real photo of 640 x 416."""
    from sklearn.datasets import load_sample_images

    out = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(load_sample_images().images[0][:416]).save(out, kind, exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("in_chans", [1, 3])
def test_a_part_is_what_the_whole_photo_shows_there(orientation: int, in_chans: int) -> None:
    data = photo("JPEG", orientation)
    asked = Asked()
    part = decoding.decode_pixels(data, in_chans, "x", exif=True, part=Part(asked, 61))
    whole = decoding.decode_pixels(data, in_chans, "x", exif=True)
    assert numpy.array_equal(part, whole[56:176, 112:272])
    assert asked == [whole.shape[:2]]


@pytest.mark.parametrize("orientation", [1, 6, 8])
@pytest.mark.parametrize(("size", "factor"), [(61, 1), (60, 2), (31, 2), (30, 4), (15, 8), (2, 8)])
def test_a_part_that_is_twice_as_large_as_needed_is_decoded_at_half_its_size(
    size: int, factor: int, orientation: int
) -> None:
    data = photo("JPEG", orientation)
    part = decoding.decode_pixels(data, 3, "x", exif=True, part=Part(Asked(), size)).astype(float)
    whole = decoding.decode_pixels(data, 3, "x", exif=True)[56:176, 112:272].astype(float)
    means = whole.reshape(120 // factor, factor, 160 // factor, factor, 3).mean((1, 3))
    assert part.shape == means.shape
    assert abs(part.mean() - means.mean()) < 1
    assert abs(part - means).mean() < 2, "a pixel aside would make 20"


def test_who_chooses_a_part_is_asked_once_whoever_decodes_it() -> None:
    """A random part costs draws: those of the next photo must not depend on damage."""
    sound = photo("JPEG")
    damaged = bytearray(sound)
    damaged[len(sound) // 2 : len(sound) // 2 + 9] = b"U" * 9  # Pillow makes something of it
    for data in (bytes(damaged), photo("PNG")):
        asked = Asked()
        part = decoding.decode_pixels(data, 3, "x", part=Part(asked, 8))
        assert numpy.array_equal(part, decoding.decode_pixels(data, 3, "x")[56:176, 112:272])
        assert asked == [(416, 640)]


def saturated() -> Image.Image:
    pixels = numpy.random.default_rng(0).integers(0, 2, (64, 64, 3), numpy.uint8) * 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "TIFF"])
def test_gray_is_one_formula_for_files_packs_and_pictures(kind: str, tmp_path: Path) -> None:
    """A JPEG's own brightness is up to 43 levels from it where colours are clipped."""
    path = tmp_path / f"a.{kind}"
    saturated().save(path, kind)
    gray = decoding.read_image(path, 1)[0].numpy()
    with Image.open(path) as picture:
        assert numpy.array_equal(gray, numpy.array(picture.convert("RGB").convert("L")))
        assert numpy.array_equal(gray, decoding.pixels_of(picture, 1)[..., 0])
    *_, stored = packs._record(str(path), side=64, kind="raw")
    assert numpy.array_equal(gray, decoding.gray_of(numpy.frombuffer(stored, numpy.uint8).reshape(64, 64, 3))[..., 0])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I;16"])
def test_a_picture_of_any_mode_has_colours_and_gray(mode: str) -> None:
    picture = Image.new(mode, (5, 4))
    assert decoding.pixels_of(picture, 3).shape == (4, 5, 3)
    assert decoding.pixels_of(picture, 1).shape == (4, 5, 1)


@pytest.mark.parametrize(("height", "width"), [(2, 10_000), (10_000, 2), (1, 60_001), (3, 49)])
def test_of_a_strip_only_the_middle_is_resized(height: int, width: int) -> None:
    """One of 2 x 10,000 took a gigabyte."""
    strip = torch.zeros(3, height, width, dtype=torch.uint8)
    strip[:, height // 3 : -(-2 * height // 3), width // 2 - 1 : width // 2 + 2] = 255
    strip[:, height // 2 - 1 : height // 2 + 2, width // 3 : -(-2 * width // 3)] = 255
    sizes: list[int] = []

    def counting(image: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        made = interpolate(image, *args, **options)
        sizes.append(made.numel())
        return made

    interpolate = torch.nn.functional.interpolate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "interpolate", counting)
        found = CenterCrop(64, 73, "bilinear")(strip)
    assert found.shape == (3, 64, 64)
    assert found[:, 28:36, 28:36].float().mean() > 200, "the middle stays in the middle"
    assert sizes == [pytest.approx(3 * 73 * 73 * 16, rel=0.1)]


def test_an_image_that_is_no_strip_is_resized_as_before() -> None:
    image = torch.randint(256, (3, 20, 320), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crop = CenterCrop(24, 30, "bilinear")
    whole = torch.nn.functional.interpolate(image[None].contiguous(memory_format=torch.channels_last), (30, 480),
                                            mode="bilinear", antialias=True)[0]  # fmt: skip
    assert torch.equal(crop(image), whole[:, 3:27, 228:252])


def saved(kind: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (16, 16)).save(out, kind)
    return out.getvalue()


def with_sides(content: bytes, at: int, form: str) -> bytes:
    """An image file whose header says 60000 x 60000."""
    sides = struct.pack(form, 60000, 60000)
    return content[:at] + sides + content[at + len(sides) :]


ENORMOUS = {
    "png": with_sides(saved("PNG"), 16, ">II"),
    "gray png of 16 bits": with_sides(saved("PNG", "I;16"), 16, ">II"),
    "gif": with_sides(saved("GIF", "P"), 6, "<HH"),
    "bmp": with_sides(saved("BMP"), 18, "<ii"),
    "tga": with_sides(saved("TGA"), 12, "<HH"),
    "pcx": with_sides(saved("PCX"), 8, "<HH"),
    "sgi": with_sides(saved("SGI"), 6, ">HH"),
    "qoi": with_sides(b"qoif" + bytes(8) + b"\x03\0" + b"\xc0" * 9, 4, ">II"),
    "ppm": b"P6 60000 60000 255\n" + b"x" * 99,
    "gray ppm of 16 bits": b"P5 60000 60000 65535\n" + b"x" * 99,
}


@pytest.mark.parametrize("kind", ENORMOUS)
def test_an_enormous_image_is_refused_by_its_header(kind: str) -> None:
    """In a few bytes of a file stand gigabytes of pixels, for each process that reads it."""
    content = ENORMOUS[kind]
    if content.startswith(b"\x89PNG"):  # a header with a checksum
        content = content[:29] + struct.pack(">I", zlib.crc32(content[12:29])) + content[33:]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenImageError, match="pixels"):
        decoding.decode_pixels(content, 3, "x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
