"""Image files in folders: listed once by one rank, whatever their number, then read, decoded and cut."""

from __future__ import annotations

import io
import json
import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, TypeVar

from trainkit import fileio
from trainkit.data import base
from trainkit.data.base import DataInfo, ModelInput, Samples, Splits, Transform, stratified_split
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    Pixels = numpy.ndarray[Any, Any]


SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""What others call the splits, and what they are here."""
_SPLIT = re.compile(rf"(?:^|[/_-])({'|'.join(SPLIT_NAMES)})(?=[-./_\d])")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
MOST_PIXELS = 2 * 89_478_485
"""Pillow takes a larger image for an attack."""
_LONGEST = 1 << 30


class BrokenImageError(UserError):
    """A file that holds no image, or a damaged one: it will be so the next time as well."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", key: str | None = None, file: str = "") -> None:
        super().__init__(what, why=why, fix=fix, key=key)
        self.file = file


def read_image(path: Path, in_chans: int, *, exif: bool = False) -> Tensor:
    """Read an image as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    Args:
        exif: turn it upright, as the orientation in its EXIF data says.

    Raises:
        UserError: the file cannot be read, or is no regular file.
        BrokenImageError: it cannot be decoded.
    """
    return decode_image(read_content(path), in_chans, str(path), exif=exif)


def decode_image(data: bytes | memoryview, in_chans: int, name: str, *, exif: bool = False) -> Tensor:
    """Decode the bytes of an image file as `read_image` does. Raises BrokenImageError naming the file."""
    import torch

    # In memory the channels stay side by side, as the decoder writes them and resizing likes them.
    return torch.from_numpy(decode_pixels(data, in_chans, name, exif=exif)).permute(2, 0, 1)


def decode_pixels(data: bytes | memoryview, in_chans: int, name: str, *, exif: bool = False) -> Pixels:
    """Decode the bytes of an image file to uint8 [H, W, in_chans], without torch.

    JPEG goes to libjpeg-turbo itself, whose pixels are Pillow's to the last bit, in half of the time; everything else,
    and what it does not read (CMYK, damaged ones), to Pillow. Not to torchvision's decoders: a damaged PNG ends its
    libpng with SIGSEGV, and the whole process.
    """
    if data[:3] == b"\xff\xd8\xff":
        import simplejpeg

        with suppress(ValueError):  # Pillow says what is wrong with it, or makes what it can of it
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            # With two bytes changed, a thumbnail claims 60000 x 60000, and a decoder fills 11 GB with gray.
            if height * width <= MOST_PIXELS:
                pixels: Pixels = simplejpeg.decode_jpeg(data, "GRAY" if in_chans == 1 else "RGB")
                return _upright(pixels, data) if exif else pixels
    return _decode_with_pillow(data, name, in_chans, exif=exif)


def _upright(pixels: Pixels, data: bytes | memoryview) -> Pixels:
    """Pixels [H, W, C] turned as the EXIF data of their JPEG file says; as they are where it has none, or broken one.

    As Pillow's `ImageOps.exif_transpose` does, which takes no arrays.
    """
    import numpy
    from PIL import ExifTags, Image

    turn = 1
    with suppress(Exception), Image.open(io.BytesIO(data)) as file:  # it reads the header alone
        turn = file.getexif().get(ExifTags.Base.Orientation, 1)
    if turn in (5, 6, 7, 8):  # rows and columns are exchanged
        pixels = pixels.swapaxes(0, 1)
    down, right = (-1 if turn in which else 1 for which in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return numpy.ascontiguousarray(pixels[::down, ::right])


def read_content(path: Path) -> bytes:
    """Read a file's bytes. A FIFO called x.jpg is refused and not waited for."""
    fix = "Check the file, its permissions and the disk that it is on; of a link, what it points to."
    with fileio.disk_errors_as(f"Cannot read {path}.", fix=fix):
        return fileio.read_bytes(path, _LONGEST, follow=True)


def _decode_with_pillow(data: bytes | memoryview, name: str, in_chans: int, *, exif: bool) -> Pixels:
    import numpy
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as file:
            turned = ImageOps.exif_transpose(file) if exif else None  # Pillow 11 declares that it may be None
            picture: Image.Image = turned or file
            if picture.mode.startswith("I"):  # 16 bits gray, which Pillow would clip instead of scale
                picture = Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
            pixels = numpy.array(picture.convert("L" if in_chans == 1 else "RGB"))
    except Exception as error:  # Pillow's plugins raise anything on a damaged file
        unknown = isinstance(error, UnidentifiedImageError)  # its own words name an address in memory
        what = f"Cannot decode the image {name}."
        why = "It is no image in any known format." if unknown else f"{type(error).__name__}: {error}"
        fix = "Replace the file, or delete it: a damaged image helps nobody. Or skip some with data.max_broken=10."
        raise BrokenImageError(what, why=why, fix=fix, file=name) from None
    return pixels[:, :, None] if in_chans == 1 else pixels


def split_of(name: str) -> str | None:
    """The split that a file of several splits' images belongs to, by its name: ``data/train-00000-of-00002.parquet``,
    ``val/000000.tar``. The last word counts."""
    found = _SPLIT.findall(name)
    return SPLIT_NAMES[found[-1]] if found else None


Layout = tuple[Path, tuple[str, ...]]
"""A data set's folder, and its splits: folders in it that hold one folder for each class."""


class Files:
    """Image files by position: those of a class lie side by side, in the same order on every machine.

    Their names are one block of bytes: a list of a million strings would be copied into every worker, page by page, as
    soon as Python counts the references to them.
    """

    exif = False
    """Images are turned upright, as their EXIF data says."""

    def __init__(self, folder: Path, counts: Mapping[str, Mapping[str, int]], names: bytes) -> None:
        """Split -> class -> number of files, and the files' names, each with a zero byte behind it."""
        import numpy

        self.folder = folder
        self.splits: dict[str, dict[str, range]] = {}
        """Split -> class -> positions; both as their folders are called."""
        start = 0
        for split, classes in counts.items():
            self.splits[split] = {}
            for name, count in classes.items():
                self.splits[split][name] = range(start, start + count)
                start += count
        self._names = names
        ends = numpy.flatnonzero(numpy.frombuffer(names, numpy.uint8) == 0)
        self._starts = numpy.concatenate([[0], ends + 1])
        if len(ends) != start:
            raise ValueError(f"{len(ends)} names for {start} files")
        if re.search(rb"(?:^|[\0/])\.\.(?:[\0/])|(?:^|\0)/", names):  # it may have come from elsewhere
            raise ValueError("a name leads out of its folder")
        self._classes = [(found.start, split, name)
                         for split, of in self.splits.items() for name, found in of.items() if found]  # fmt: skip

    @classmethod
    def walk(cls, folder: Path, splits: Sequence[str]) -> Files:
        """List what is on the disk."""
        found = {
            split: {name: image_files(folder / split / name) for name in class_folders(folder / split)}
            for split in splits
        }
        counts = {split: {name: len(files) for name, files in of.items()} for split, of in found.items()}
        names = (os.fsencode(name) + b"\0" for of in found.values() for files in of.values() for name in files)
        return cls(folder, counts, b"".join(names))

    def to_bytes(self) -> bytes:
        """The list, for other ranks and for a pack."""
        counts = {split: {name: len(found) for name, found in of.items()} for split, of in self.splits.items()}
        return json.dumps(counts).encode() + b"\n" + self._names

    @classmethod
    def from_bytes(cls, folder: Path, content: bytes) -> Files:
        """Read what `to_bytes` gave."""
        return cls(folder, *parse_list(content))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, position: int) -> str:
        """The file's path below its class's folder."""
        return os.fsdecode(self._names[self._starts[position] : self._starts[position + 1] - 1])

    def path(self, position: int) -> str:
        """SPLIT/CLASS/NAME."""
        _, split, name = self._classes[bisect_right(self._classes, position, key=lambda known: known[0]) - 1]
        return os.path.join(split, name, self.name(position))

    def read(self, position: int, in_chans: int) -> Tensor:
        """The image, as `read_image` gives it."""
        return read_image(self.folder / self.path(position), in_chans, exif=self.exif)


def parse_list(content: bytes) -> tuple[Any, bytes]:
    """Counts and names out of `Files.to_bytes`."""
    head, _, names = content.partition(b"\n")
    return fileio.parse(head), names


MEASURED = 200
"""Images whose size is looked at, to guess a size to train at."""
LARGEST_GUESS = 224


def usual_size(sides: Sequence[int]) -> int | None:
    """A size to train at, for images whose shorter sides are ``sides``: that of all, else the median to the next
    multiple of 8; 4 to `LARGEST_GUESS`. None without any."""
    if not sides:
        return None
    middle = median_low(sides)
    return min(max(middle if len(set(sides)) == 1 else (middle + 4) // 8 * 8, 4), LARGEST_GUESS)


def shorter_sides(files: Iterable[Path | bytes]) -> list[int]:
    """Of images, or of what is in their files; only their headers are read, and what is none is left out."""
    from PIL import Image

    sides: list[int] = []
    for file in files:
        with suppress(Exception):
            opened = io.BytesIO(file) if isinstance(file, bytes) else fileio.open_regular(file, follow=True)
            with opened as content, Image.open(content) as image:
                sides.append(min(image.size))
    return sides


def some_of(folder: Path, most: int = MEASURED) -> list[Path]:
    """At most ``most`` images of the class folders in ``folder``, from all over it, the same on every machine."""
    names = evenly(class_folders(folder), 20)  # a million files are not listed
    share = -(-most // max(len(names), 1))
    return [folder / name / file for name in names for file in evenly(image_files(folder / name), share)][:most]


ItemT = TypeVar("ItemT")


def evenly(items: Sequence[ItemT], most: int) -> Sequence[ItemT]:
    """At most ``most`` of the items, the same distance apart."""
    return items[:: max(-(-len(items) // most), 1)]


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted. Hidden ones, such as .ipynb_checkpoints, are no classes; nor are packs."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
        return sorted(
            each for each in names if not each.startswith(".") and not each.endswith((".pack", ".pack.partial"))
        )
    return []


def require_splits(name: str, root: Path, layout: Layout, of_class: str, fix: str) -> None:
    """Refuse a data set whose splits have no folder of a class.

    Args:
        of_class: stands in the message for the name of such a folder.
        fix: what to fetch; the command that unpacks it is added.

    Raises UserError.
    """
    folder, splits = layout
    for split in splits:
        if not class_folders(folder / split):
            raise base.missing(name, root, folder / split / of_class, fix=fix)


COUNTED = 20_000
"""This many files are counted within a moment, also on a file system that is far away."""


def counted(folder: Path, most: int = COUNTED) -> list[int] | None:
    """The number of images of each class in ``folder``; None where there are more than ``most`` files."""
    counts: list[int] = []
    for name in class_folders(folder):
        counts.append(0)
        for _, files in _walk(folder / name):
            most -= len(files)
            if most < 0:
                return None
            counts[-1] += sum(map(_is_image, files))
    return counts


def train_size(folder: Path, val_fraction: float) -> int | None:
    """Images to train on of those in ``folder``/train, from which val is split off unless it has a folder; None where
    counting them would take long."""
    if (counts := counted(folder / "train")) is None:
        return None
    return sum(counts) if class_folders(folder / "val") else base.size_left(counts, (val_fraction,))


def image_files(folder: Path) -> list[str]:
    """Images in ``folder`` and below, as paths relative to it, sorted: the same order on every machine."""
    found: list[str] = []
    for parent, files in _walk(folder):
        below = f"{os.path.relpath(parent, folder)}/".removeprefix("./")
        found += [below + file for file in files if _is_image(file)]
    return sorted(found)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A folder and those below it that are not hidden, each with its files."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent, files


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


class ImageFiles:
    """Some image files, and their labels. Sample -> uint8 [in_chans, H, W], label."""

    def __init__(self, files: Files, positions: Iterable[int], labels: Iterable[int], in_chans: int) -> None:
        self.files, self.in_chans = files, in_chans
        self.positions, self.labels = array("q", positions), array("i", labels)
        assert len(self.labels) == len(self.positions)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.files.read(self.positions[index], self.in_chans), self.labels[index]

    def part(self, indices: Sequence[int]) -> ImageFiles:
        """Some of them."""
        return ImageFiles(
            self.files, (self.positions[at] for at in indices), (self.labels[at] for at in indices), self.in_chans
        )


def images_of(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of ``classes`` in a split; a class may have none."""
    found = [(label, position) for label, name in enumerate(classes)
             for position in files.splits.get(split, {}).get(name, ())]  # fmt: skip
    return ImageFiles(files, (position for _, position in found), (label for label, _ in found), in_chans)


def read_split(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of a split. Raises UserError for a class that training does not have, and where there are none."""
    folder = files.folder / split
    if unknown := sorted(set(files.splits.get(split, {})) - set(classes)):
        more = f" and {len(classes) - 8} more" if len(classes) > 8 else ""
        raise UserError(
            f"{folder / unknown[0]} is a class that the training data does not have.",
            why=f"The training data has: {', '.join(classes[:8])}{more}.",
            fix="Rename or remove that folder, or add training images of its class.",
        )
    if not len(images := images_of(files, split, classes, in_chans)):
        raise no_images(folder)
    return images


def read_splits(files: Files, splits: Sequence[str]) -> tuple[list[str], list[ImageFiles]]:
    """The classes of the first split, which is trained on; and all images of each split, in colours."""
    classes = require_classes(files.folder / splits[0], files.splits[splits[0]])
    return classes, [read_split(files, split, classes, in_chans=3) for split in splits]


def folder_splits(
    name: str,
    files: Files,
    image_size: int,
    in_chans: int,
    fractions: tuple[float, float],
    *,
    augment: bool,
    exif: bool,
) -> Splits:
    """The data set ``name`` of photos in folders: ``train``, ``val`` and ``test``, or none of these.

    Without val it is split off train, without test it is val; of no such folders all is split three ways, by
    ``fractions`` for val and test.
    """
    first = "train" if "train" in files.splits else ""
    folder = files.folder / first
    classes = require_classes(folder, files.splits[first])
    held_out = {
        split: read_split(files, split, classes, in_chans) for split in ("val", "test") if files.splits.get(split)
    }
    train = images_of(files, first, classes, in_chans)
    for label in sorted(set(range(len(classes))) - set(train.labels)):
        raise no_images(folder / classes[label])
    if not first:
        train, val, test = _split(train, folder, classes, fractions)
    else:
        if "val" not in held_out:
            train, held_out["val"] = _split(train, folder, classes, fractions[:1])
        val = held_out["val"]
        test = held_out.get("test", val)
    return photo_splits(name, classes, (train, val, test), image_size, in_chans, augment=augment, exif=exif)


def _split(images: ImageFiles, folder: Path, classes: list[str], fractions: tuple[float, ...]) -> list[ImageFiles]:
    names = [images.files.name(position) for position in images.positions]
    keys = [f"{classes[label]}/{name}" for label, name in zip(images.labels, names, strict=True)]
    if not all(parts := stratified_split(images.labels, fractions, keys=keys)):
        why = f"It has {len(images)} images of {len(classes)} classes; a class needs {len(fractions) + 1} or more."
        fix = "Add images, or make the folders train and val yourself."
        raise UserError(f"{folder} has too few images to split.", why=why, fix=fix)
    return [images.part(indices) for indices in parts]


def require_classes(folder: Path, classes: Iterable[str]) -> list[str]:
    """The classes of a folder to train on. Raises UserError where these are less than two."""
    classes = list(classes)
    if len(classes) < 2:
        why = f"It has {'no folder' if not classes else f'one folder, {classes[0]}'}; two or more are needed."
        fix = f"Put the images into {folder}/CLASS/NAME.jpg."
        raise UserError(f"{folder} does not hold a folder for each class.", why=why, fix=fix)
    return classes


def no_images(folder: Path) -> UserError:
    """The error for a folder that should hold images."""
    why = f"Image files end in {', '.join(SUFFIXES[:6])}, ..."
    fix = f"Put the images into {folder}/CLASS/NAME.jpg, or remove the empty folder."
    return UserError(f"{folder} holds no images.", why=why, fix=fix)


# Broken images. In training the next whole image in the data's own order stands in, with its label: a function of the
# data alone, so that every rank, worker and attempt takes the same. Evaluation leaves a broken image out of its counts.


class BrokenImages:
    """How many images may be broken, and those that this rank has met and not told the others: file -> why."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.met: dict[str, str] = {}
        self.waited: dict[str, float] = {}
        """Files far away that it has waited for, and for how many seconds."""

    def take(self) -> tuple[dict[str, str], dict[str, float]]:
        """Those met and those waited for since the last call."""
        taken, self.met, self.waited = (self.met, self.waited), {}, {}
        return taken


def read_whole(samples: Samples, index: int, most: int, met: dict[str, str]) -> tuple[Any, Any, bool]:
    """Read image and label of sample ``index``, or of the next whole one; and whether it is that sample itself.

    Args:
        most: how many broken ones may be skipped; one more raises its BrokenImageError.
        met: broken ones are added here.
    """
    for skipped in range(most + 1):
        try:
            image, label = samples[(index + skipped) % len(samples)]
            return image, label, skipped == 0
        except BrokenImageError as error:
            met[error.file] = error.why
            last = error
    raise last


PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, which pretrained models expect."""

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of the random part: its share of the photo, its width over its height. As in Szegedy et al., "Going Deeper with
Convolutions", and in torchvision since."""


def photo_splits(
    name: str,
    classes: Sequence[str],
    parts: Iterable[Samples],
    image_size: int,
    in_chans: int = 3,
    *,
    augment: bool,
    exif: bool = False,
) -> Splits:
    """A data set of photographs of any size; ``parts`` are train, val and test.

    Args:
        exif: ``parts`` turn photos upright; so does who predicts.
    """
    mean, std = (base.of_channels(values, in_chans) for values in (PHOTO_MEAN, PHOTO_STD))
    info = DataInfo(name, len(classes), in_chans, image_size, tuple(classes), mean, std, exif)
    transforms_for = partial(photo_transforms, image_size, augment=augment)
    train, val, test = parts
    return Splits(info, train, val, test, *transforms_for(), transforms_for=transforms_for)


def photo_transforms(
    image_size: int, expected: ModelInput | None = None, *, augment: bool
) -> tuple[Transform, Transform]:
    """Train and eval transform of photographs of any size: random part and mirror image; centre of the shorter side.

    Pretrained weights, ``expected``, have their own way of resizing and cropping.
    """
    mode = expected.interpolation if expected else "bilinear"
    evaluate = CenterCrop(image_size, round(image_size / (expected.crop if expected else 224 / 256)), mode)
    return (RandomResizedCrop(image_size, mode) if augment else evaluate), evaluate


class RandomResizedCrop:
    """A random part of the photo, resized, and mirrored every second time.

    The pixels of torchvision's RandomResizedCrop and RandomHorizontalFlip for the same draw, at two thirds of the cost
    and without torchvision's import: numbers are drawn as numbers, and a photo is resized as it lies in memory.
    """

    def __init__(self, image_size: int, mode: str) -> None:
        self.image_size, self.mode = image_size, mode

    def __call__(self, image: Tensor) -> Tensor:
        import torch

        height, width = image.shape[-2:]
        top, left, tall, wide = random_part(height, width)
        part = _resized(image[:, top : top + tall, left : left + wide], (self.image_size, self.image_size), self.mode)
        # As they are collated, which is quicker image by image.
        return (part.flip(-1) if torch.rand(()).item() < 0.5 else part).contiguous()


class CenterCrop:
    """The shorter side resized to ``shorter``, then the square in the middle."""

    def __init__(self, image_size: int, shorter: int, mode: str) -> None:
        self.image_size, self.shorter, self.mode = image_size, shorter, mode

    def __call__(self, image: Tensor) -> Tensor:
        size, (height, width) = self.image_size, image.shape[-2:]
        least = min(height, width)
        # Rounded down, as torchvision does.
        image = _resized(image, (self.shorter * height // least, self.shorter * width // least), self.mode)
        top, left = (round((length - size) / 2) for length in image.shape[-2:])
        return image[:, top : top + size, left : left + size]


def random_part(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, drawn as torchvision's RandomResizedCrop does."""
    import torch

    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        share, ratio, down, right = torch.rand(4).tolist()
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = math.exp(low + (high - low) * ratio)
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    # Too long or too high for any of these: the middle, as wide and as high as the ratios allow.
    aspect = min(max(width / height, RATIO[0]), RATIO[1])
    wide, tall = min(width, round(height * aspect)), min(height, round(width / aspect))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _resized(image: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    if image.shape[-2:] == size:
        return image
    import torch
    import torch.nn.functional as F

    if mode not in ("bilinear", "bicubic"):  # of few weights; torchvision knows them
        from torchvision.transforms import InterpolationMode, v2

        return v2.functional.resize(image, list(size), InterpolationMode(mode), antialias=True)  # type: ignore[no-any-return]
    # uint8 in, uint8 out: the kernel for bytes is the fast one, and rounds as an image viewer does. It takes half
    # of the time for channels that lie side by side, and does not see it of a part that was cut out.
    image = image[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(image, size=size, mode=mode, align_corners=False, antialias=True)[0]
