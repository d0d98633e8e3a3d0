import math
import os
import random
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from tests.data.samples import build, fill, write_images
from tests.fork_server import server
from tests.rank_functions import run_ranks
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.common.image_input import ModelInput
from trainkit.config.schema import DataConfig
from trainkit.data import decoding, folders, image_files, photo_transforms
from trainkit.data.base import Samples, Splits
from trainkit.data.decoding import BrokenImageError
from trainkit.data.image_files import Files
from trainkit.data.loader import Loading, train_batches
from trainkit.data.losses import BrokenImages
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import distributed


def test_a_held_out_split_has_some_of_the_classes_and_no_other(tmp_path: Path) -> None:
    write_images(tmp_path / "some", {"dog": 2})
    write_images(tmp_path / "others", {"cat": 1, "dgo": 1})
    write_images(tmp_path / "none", {"cat": 0})
    files = Files.walk(tmp_path, ("some", "others", "none"))
    assert list(folders.read_split(files, "some", ["cat", "dog"], 3).labels) == [1, 1]
    with pytest.raises(UserError, match=r"dgo is a class that the training data does not have[\s\S]*cat, dog"):
        folders.read_split(files, "others", ["cat", "dog"], 3)
    with pytest.raises(UserError, match="holds no images"):
        folders.read_split(files, "none", ["cat", "dog"], 3)


def test_visible_classes_and_the_images_below_them_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b", ".ipynb_checkpoints", "images-256.pack", "images-256.pack.partial"):
        (tmp_path / name).mkdir()
    fill(tmp_path, *(f"a/{name}" for name in ("2.JPEG", "1.png", "deep/0.jpg", ".hidden.jpg", "x.txt", ".trash/9.jpg")))
    (tmp_path / "notes.txt").touch()
    assert image_files.class_folders(tmp_path) == ["a", "b"]
    assert image_files.class_folders(tmp_path / "no") == []
    assert image_files.list_images(tmp_path / "a") == ["1.png", "2.JPEG", "deep/0.jpg"]
    assert image_files.counted(tmp_path) == [3, 0]
    assert image_files.counted(tmp_path, most=4) is None, "files of other kinds count too: a million are not counted"


def test_a_list_is_the_same_after_its_way_to_another_rank(tmp_path: Path) -> None:
    fill(tmp_path, "train/b/1.jpg", "train/b/0.jpg", "train/a/x/Grüße.png", "train/d/7.gif", "val/a/9.jpg")
    (tmp_path / "train" / "c").mkdir()
    walked = Files.walk(tmp_path, ("train", "val", "test"))
    told = Files.from_bytes(tmp_path, walked.to_bytes())
    assert told.splits == walked.splits == {
        "train": {"a": range(1), "b": range(1, 3), "c": range(3, 3), "d": range(3, 4)}, "val": {"a": range(4, 5)},
        "test": {},
    }  # fmt: skip
    files = ["train/a/x/Grüße.png", "train/b/0.jpg", "train/b/1.jpg", "train/d/7.gif", "val/a/9.jpg"]
    assert [told.path(position) for position in range(len(told))] == files
    assert [told.name(position) for position in (0, 4)] == ["x/Grüße.png", "9.jpg"]


def build_and_count(env: RankEnv, *roots: str) -> list[tuple[int, list[int], str]]:
    """For each root: number of walks by this rank, the sizes of its splits, and the error, if it gets one."""
    found, walks, walk = [], list[Path](), Files.walk

    def counting(folder: Path, splits: tuple[str, ...], *, all_kinds: bool) -> Files:
        walks.append(folder)
        return walk(folder, splits, all_kinds=all_kinds)

    with pytest.MonkeyPatch.context() as patch, distributed(env, use_gpu=False) as dist:
        patch.setattr(Files, "walk", counting)
        for root in roots:
            before, sizes, problem = len(walks), list[int](), ""
            try:
                made = build_data(DataConfig(name="image_folder", root=root if env.rank == 0 else root + "/."), dist)
                sizes = [len(split) for split in (made.train, made.val, made.test)]
            except UserError as error:
                problem = error.what
            found.append((len(walks) - before, sizes, problem))
    return found


def test_one_rank_walks_the_folders_for_all_and_all_hear_what_is_wrong(tmp_path: Path) -> None:
    for number in range(3):
        fill(tmp_path / "good", f"train/a/{number}.jpg", f"train/b/{number}.jpg", f"val/a/{number}.jpg")
    fill(tmp_path / "bad", "train/a/0.jpg", "train/b/x.txt")
    one, other = run_ranks(2, build_and_count, str(tmp_path / "good"), str(tmp_path / "bad"))
    assert (one[0], other[0]) == ((1, [6, 3, 3], ""), (0, [6, 3, 3], ""))
    assert one[1][2] == other[1][2]
    assert one[1][2].endswith("train/b holds no images.")


RED = (200, 30, 40)


def red(folder: Path, name: str, mode: str = "RGB") -> Path:
    path = folder / name
    Image.new("RGB", (12, 8), RED).convert(mode).save(path)
    return path


@pytest.mark.parametrize(
    ("name", "mode"),
    [("photo.jpg", "RGB"), ("photo.png", "RGB"), ("palette.png", "P"), ("alpha.png", "RGBA"), ("cmyk.jpg", "CMYK"),
     ("photo.webp", "RGB"), ("photo.bmp", "RGB"), ("photo.tif", "RGB"), ("palette.gif", "P"), ("jpg.png", "RGB")],
)  # fmt: skip
def test_every_kind_of_file_becomes_bytes_in_colours_or_gray(tmp_path: Path, name: str, mode: str) -> None:
    path = red(tmp_path, name, mode)
    if name == "jpg.png":  # it is read by what it is
        path = path.rename(tmp_path / "n01.JPEG")
    image, gray = decoding.read_image(path, in_chans=3), decoding.read_image(path, in_chans=1)
    assert (image.dtype, tuple(image.shape), tuple(gray.shape)) == (torch.uint8, (3, 8, 12), (1, 8, 12))
    assert (image.float().mean((1, 2)) - torch.tensor(RED)).abs().max() < 12
    assert abs(float(gray.float().mean()) - (0.299 * 200 + 0.587 * 30 + 0.114 * 40)) < 5


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    Image.fromarray(numpy.full((8, 12), 0x8000, dtype=numpy.uint16)).save(tmp_path / name)
    assert bool((decoding.read_image(tmp_path / name, in_chans=1) == 128).all())


def test_colours_of_sixteen_bits_keep_their_upper_half(tmp_path: Path) -> None:
    rows = b"".join(b"\0" + numpy.full((12, 3), (0x8000, 0x10FF, 0xFFFF), ">u2").tobytes() for _ in range(8))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 12, 8, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"".join(struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
                   for name, body in chunks)  # fmt: skip
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + png)
    assert decoding.read_image(tmp_path / "deep.png", in_chans=3)[:, 3, 5].tolist() == [0x80, 0x10, 0xFF]


def test_of_a_tiff_of_several_pages_the_first_counts(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (12, 8), RED), Image.new("RGB", (30, 30))
    first.save(tmp_path / "pages.tif", save_all=True, append_images=[second])
    assert decoding.read_image(tmp_path / "pages.tif", in_chans=3)[:, 0, 0].tolist() == list(RED)


def photo_turned(path: Path, orientation: int) -> Path:
    """A photo of 24 x 16 with a red, a green and a blue corner, and how a camera was held."""
    pixels = numpy.zeros((16, 24, 3), numpy.uint8)
    pixels[:8, :8, 0] = pixels[:8, 16:, 1] = pixels[8:, :8, 2] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(path, exif=exif)
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
def test_photos_are_turned_upright_only_where_that_is_asked(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = photo_turned(tmp_path / f"photo.{suffix}", orientation)
    with Image.open(path) as picture:
        expected = numpy.asarray(ImageOps.exif_transpose(picture))
    assert numpy.array_equal(decoding.read_image(path, 3, exif=True).permute(1, 2, 0), expected)
    if suffix != "tif":  # which Pillow turns in any case
        assert tuple(decoding.read_image(path, 3).shape) == (3, 16, 24)


def test_exif_data_that_is_broken_leaves_a_photo_as_it_lies(tmp_path: Path) -> None:
    path = photo_turned(tmp_path / "photo.jpg", 6)
    content = bytearray(path.read_bytes())
    start = content.index(b"Exif\0\0") + 6
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)
    assert tuple(decoding.read_image(path, 3, exif=True).shape) == (3, 16, 24)


def test_a_run_that_turns_photos_turns_those_of_every_split(tmp_path: Path) -> None:
    for number in range(9):
        for name in ("cat", "dog"):
            (tmp_path / name).mkdir(exist_ok=True)
            photo_turned(tmp_path / name / f"{number}.jpg", 6)
    data = build("image_folder", tmp_path, exif=True)
    assert {tuple(part[0][0].shape) for part in (data.train, data.val, data.test)} == {(3, 24, 16)}
    assert data.info.exif, "those who predict go by it"
    assert not build("image_folder", tmp_path).info.exif


@pytest.mark.parametrize(
    ("sides", "size"),
    [([8, 8, 8], 8), ([28], 28), ([60, 64, 70], 64), ([100, 100, 44], 104), ([500] * 9, 224), ([1], 4), ([], None)],
)
def test_a_size_to_train_at_is_that_of_all_or_near_the_median(sides: list[int], size: int | None) -> None:
    assert folders.usual_size(sides) == size


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.gif", "photo.webp"])
def test_a_truncated_image_of_any_kind_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)).save(path)
    for share in (0.5, 0.2, 0.0):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        with pytest.raises(BrokenImageError, match=rf"Cannot decode the image .*{name}"):
            decoding.read_image(path, in_chans=3)


def test_what_is_no_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to("/nowhere/y.png")
    for name in ("gone", "pipe", "link"):
        with pytest.raises(UserError, match=rf"Cannot read .*{name}\.jpg") as caught:
            decoding.read_image(tmp_path / f"{name}.jpg", in_chans=3)
        assert caught.value.fix.startswith("Check the file")


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
                assert decoding.read_image(path, in_chans=3).dtype == torch.uint8
        path.unlink()


def test_no_damaged_image_ends_the_process(tmp_path: Path) -> None:
    """torchvision's libpng dies of SIGSEGV on most of these PNGs, and with it the training."""
    pixels = numpy.kron(numpy.random.default_rng(0).integers(0, 256, (6, 5, 3)), numpy.ones((4, 4, 1)))
    image = Image.fromarray(pixels.astype(numpy.uint8))
    for name in ("a.png", "b.jpg", "c.gif", "d.webp", "g.tif", "h.tga", "i.jp2", "j.avif", "k.qoi"):
        image.save(tmp_path / name)
    image.convert("P").save(tmp_path / "e.png")
    image.save(tmp_path / "f.jpg", progressive=True)
    child = server().start(read_damaged, tmp_path)
    child.join()
    assert child.exitcode == 0


def test_a_thumbnail_that_claims_to_be_enormous_is_refused(tmp_path: Path) -> None:
    """torchvision fills 11 GB, in half a minute."""
    path = red(tmp_path, "photo.jpg")
    content = bytearray(path.read_bytes())
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = (60000).to_bytes(2, "big") * 2
    path.write_bytes(content)
    with pytest.raises(UserError, match="Cannot decode"):
        decoding.read_image(path, in_chans=3)


@pytest.fixture
def data(tmp_path: Path) -> Splits:
    """Splits of 2 x 8 images; of train number 3 and 4 are broken, and the last."""
    for split in ("train", "val"):
        write_images(tmp_path / split, {"cat": 8, "dog": 8}, size=(8, 8))
    for name in ("cat/003", "cat/004", "dog/007"):
        (tmp_path / "train" / f"{name}.jpg").write_bytes(b"\xff\xd8\xff no image")
    return build("image_folder", tmp_path, image_size=8, augment=False)


def train_on(data: Splits, *, most: int, workers: int = 0) -> None:
    loading = Loading(workers=workers, broken=BrokenImages(most))
    with train_batches(data, loading, seed=0, steps=range(2), global_batch_size=8, micro_batch_size=8) as found:
        list(found)


@pytest.mark.parametrize(("most", "workers"), [(0, 1), (1, 0)])
def test_more_broken_images_in_a_row_than_may_be_end_the_run(data: Splits, most: int, workers: int) -> None:
    with pytest.raises(BrokenImageError, match=r"Cannot decode the image .*\.jpg"):
        train_on(data, most=most, workers=workers)
    train_on(data, most=3, workers=workers)  # the last one too, which the first stands in for


def test_an_image_that_cannot_be_read_ends_the_run_for_that_may_pass(data: Splits, tmp_path: Path) -> None:
    (tmp_path / "train/cat/000.jpg").unlink()
    with pytest.raises(UserError, match=r"Cannot read .*000\.jpg"):
        train_on(data, most=9)


@pytest.fixture(scope="module")
def photo() -> Tensor:
    """uint8 [3, 427, 640]."""
    from sklearn.datasets import load_sample_images

    return torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)


@pytest.mark.parametrize(("interpolation", "crop"), [("bicubic", 0.96), ("bilinear", 1.15), ("nearest", 0.9)])
def test_photos_are_resized_and_cropped_as_the_weights_expect(interpolation: str, crop: float, photo: Tensor) -> None:
    from timm.data import create_transform  # type: ignore[attr-defined]

    expected = ModelInput("some", (0.5,) * 3, (0.5,) * 3, interpolation, crop)
    train, evaluate = photo_transforms.photo_transforms(38, expected, augment=True)
    mode = v2.InterpolationMode(interpolation)
    as_timm: Any = create_transform(38, interpolation=interpolation, crop_pct=crop)
    resized = v2.functional.resize(photo, [as_timm.transforms[0].size], interpolation=mode, antialias=True)
    assert torch.equal(evaluate(photo), v2.functional.center_crop(resized, [38, 38]))
    torch.manual_seed(3)
    made = train(photo)
    torch.manual_seed(3)
    part = v2.functional.resized_crop(photo, *photo_transforms.random_part(427, 640), [38, 38], mode, antialias=True)
    assert torch.equal(made, part.flip(-1) if torch.rand(()).item() < 0.5 else part)


class Wholes:
    """Samples of which no part can be read."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        return self._samples[index]


@pytest.mark.parametrize(("image_size", "most"), [(224, 0), (24, 4)])
def test_training_decodes_no_more_of_a_photo_than_it_shows(
    image_size: int, most: float, photo: Tensor, tmp_path: Path
) -> None:
    write_images(tmp_path, {"cat": 8, "dog": 8}, size=(8, 8))
    for file in tmp_path.rglob("*.jpg"):
        Image.fromarray(photo.permute(1, 2, 0).numpy()).save(file, quality=95)
    data = build("image_folder", tmp_path, image_size=image_size)
    found: list[Tensor] = []
    for train in (data.train, Wholes(data.train)):
        sizes = {"global_batch_size": 8, "micro_batch_size": 8}
        with train_batches(replace(data, train=train), Loading(), seed=3, steps=range(1), **sizes) as batches:
            found.append(next(batches).images)
    error = (found[0].float() - found[1].float()).abs().mean().item()
    assert error <= most, "a pixel aside would make 12"
    assert (error > 0) == (most > 0), "large parts are decoded at a part of their size"
    assert found[0].is_contiguous(memory_format=torch.channels_last), "as it was decoded"


def test_random_parts_are_drawn_as_torchvision_draws_them() -> None:
    """Mean and deviation of their area, ratio and place, within three standard errors."""
    torch.manual_seed(0)
    photo, count = torch.empty(3, 375, 500), 3000
    ours = [photo_transforms.random_part(375, 500) for _ in range(count)]
    theirs = [v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(224), [photo]) for _ in range(count)]
    boxes = [(made["top"], made["left"], made["height"], made["width"]) for made in theirs]

    def measures(parts: list[tuple[int, int, int, int]]) -> Tensor:
        return torch.tensor([[y, x, h * w / 187500, math.log(w / h), h, w] for y, x, h, w in parts], dtype=torch.double)

    one, other = measures(ours), measures(boxes)
    error = (one.var(0) + other.var(0)).div(count).sqrt()
    assert bool(((one.mean(0) - other.mean(0)).abs() < 3 * error).all())
    assert bool((one.std(0) / other.std(0) - 1).abs().max() < 0.06)
