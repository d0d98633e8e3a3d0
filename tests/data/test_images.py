from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from trainkit.data.folders import BrokenImageError, read_image
from trainkit.errors import UserError

RED = (200, 30, 40)


def red(folder: Path, name: str, mode: str = "RGB") -> Path:
    path = folder / name
    Image.new("RGB", (12, 8), RED).convert(mode).save(path)
    return path


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("photo.jpg", "RGB"),
        ("photo.png", "RGB"),
        ("palette.png", "P"),
        ("alpha.png", "RGBA"),
        ("cmyk.jpg", "CMYK"),
        ("photo.webp", "RGB"),
        ("photo.bmp", "RGB"),
        ("photo.tif", "RGB"),
        ("palette.gif", "P"),
        ("png_inside.jpg.png", "RGB"),
    ],
)
def test_every_kind_of_file_becomes_rgb_bytes(tmp_path: Path, name: str, mode: str) -> None:
    image = read_image(red(tmp_path, name, mode), in_chans=3)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 8, 12))
    assert (image.float().mean((1, 2)) - torch.tensor(RED)).abs().max() < 12


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.bmp"])
def test_one_channel_is_gray(tmp_path: Path, name: str) -> None:
    image = read_image(red(tmp_path, name), in_chans=1)
    assert tuple(image.shape) == (1, 8, 12)
    assert abs(float(image.float().mean()) - (0.299 * 200 + 0.587 * 30 + 0.114 * 40)) < 3


def test_a_png_named_jpeg_is_read_by_what_it_is(tmp_path: Path) -> None:
    path = red(tmp_path, "photo.png").rename(tmp_path / "n01.JPEG")
    assert tuple(read_image(path, in_chans=3).shape) == (3, 8, 12)


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    Image.fromarray(numpy.full((8, 12), 0x8000, dtype=numpy.uint16)).save(tmp_path / name)
    assert bool((read_image(tmp_path / name, in_chans=1) == 128).all())


@pytest.mark.parametrize("keep", [0, 100, 300])
def test_a_damaged_image_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "photo.jpg"
    Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenImageError, match=r"Cannot decode the image .*photo\.jpg"):
        read_image(path, in_chans=3)


def test_an_image_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*gone\.jpg"):
        read_image(tmp_path / "gone.jpg", in_chans=3)


def test_of_a_link_that_leads_nowhere_it_is_said_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to("/nowhere/y.png")
    with pytest.raises(UserError) as caught:
        read_image(tmp_path / "x.png", 3)
    assert caught.value.fix == "It is a link to /nowhere/y.png, where nothing is: bring that, or remove the link."


def test_a_jpegs_pixels_are_pillows(tmp_path: Path) -> None:
    grid = numpy.kron(numpy.random.default_rng(0).integers(0, 256, (9, 7, 3)), numpy.ones((9, 9, 1)))
    kinds: list[dict[str, Any]] = [{"quality": 90}, {"progressive": True}, {"subsampling": 0, "quality": 60}]
    for number, options in enumerate(kinds):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(grid.astype(numpy.uint8)).save(path, **options)
        expected = torch.from_numpy(numpy.array(Image.open(path))).permute(2, 0, 1)
        assert torch.equal(read_image(path, in_chans=3), expected)


# Files that a stranger could have made


def damaged(content: bytes, seed: int) -> Iterator[bytes]:
    """The file cut short everywhere, and with one to twenty bytes changed."""
    dice = random.Random(seed)
    yield from (content[:length] for length in range(0, len(content), max(1, len(content) // 40)))
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(dice.choice((1, 1, 2, 20))):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        yield bytes(changed)


def read_damaged(folder: Path) -> None:
    """Ends with 0 if every damaged file is either read, or refused by its name."""
    warnings.simplefilter("ignore")
    for number, whole in enumerate(sorted(folder.iterdir())):
        path = folder / f"damaged{whole.suffix}"
        for content in damaged(whole.read_bytes(), seed=number):
            path.write_bytes(content)
            with suppress(UserError):
                assert read_image(path, in_chans=3).dtype == torch.uint8
        path.unlink()


def test_no_damaged_image_ends_the_process(tmp_path: Path) -> None:
    """torchvision's libpng dies of SIGSEGV on most of these PNGs, and with it the training."""
    pixels = numpy.kron(numpy.random.default_rng(0).integers(0, 256, (6, 5, 3)), numpy.ones((4, 4, 1)))
    image = Image.fromarray(pixels.astype(numpy.uint8))
    for name in ("a.png", "b.jpg", "c.gif", "d.webp"):
        image.save(tmp_path / name)
    image.convert("P").save(tmp_path / "e.png")
    image.save(tmp_path / "f.jpg", progressive=True)
    child = multiprocessing.get_context("forkserver").Process(target=read_damaged, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("name", ["photo.png", "photo.gif", "photo.webp"])
def test_a_truncated_image_of_any_kind_is_named(tmp_path: Path, name: str) -> None:
    path = red(tmp_path, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"Cannot decode the image .*{name}"):
        read_image(path, in_chans=3)


def test_a_thumbnail_that_claims_to_be_enormous_is_refused(tmp_path: Path) -> None:
    """torchvision fills 11 GB, in half a minute."""
    path = red(tmp_path, "photo.jpg")
    content = bytearray(path.read_bytes())
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = (60000).to_bytes(2, "big") * 2
    path.write_bytes(content)
    with pytest.raises(UserError, match="Cannot decode"):
        read_image(path, in_chans=3)


def test_a_pipe_named_like_an_image_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "photo.jpg")
    with pytest.raises(UserError, match=r"Cannot read .*photo\.jpg"):
        read_image(tmp_path / "photo.jpg", in_chans=3)
