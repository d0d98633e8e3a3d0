"""The image files of a data set: listed once by one rank, whatever their number, and read from folders."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainkit import fileio
from trainkit.data.base import ModelInput, Transform, require
from trainkit.errors import RunFailedError, UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    from trainkit.data.base import Samples


# Image files: reading and decoding.

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")

_LONGEST = 1 << 30
MOST_PIXELS = 2 * 89_478_485
"""Beyond that Pillow takes an image for an attack."""


class BrokenImageError(UserError):
    """A file that holds no image, or a damaged one: a matter of the data, which will be so the next time."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", key: str | None = None, file: str = "") -> None:
        super().__init__(what, why=why, fix=fix, key=key)
        self.file = file


def read_image(path: Path, in_chans: int) -> Tensor:
    """The image in ``path`` as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    Raises:
        UserError: naming the file, for what cannot be read or is no file.
        BrokenImageError: for what cannot be decoded.
    """
    return decode_image(read_content(path), in_chans, str(path))


def decode_image(data: numpy.ndarray[Any, Any], in_chans: int, name: str) -> Tensor:
    """The image whose file holds the bytes ``data``, as `read_image` gives it.

    JPEG goes to libjpeg-turbo itself, whose pixels are Pillow's to the last bit, in half of its time; everything else,
    and what it does not read (CMYK, damaged ones), to Pillow. Not to torchvision's decoders: a damaged PNG ends its
    libpng with SIGSEGV, and the whole process.

    Raises BrokenImageError naming the file.
    """
    import torch

    # In memory the channels stay side by side, as the decoder writes them and resizing likes them.
    return torch.from_numpy(decode_pixels(data, in_chans, name)).permute(2, 0, 1)


def decode_pixels(data: numpy.ndarray[Any, Any], in_chans: int, name: str) -> numpy.ndarray[Any, Any]:
    """The same as uint8 [H, W, in_chans], without torch."""
    if data[:3].tobytes() == b"\xff\xd8\xff" and _is_of_sane_size(data):
        import simplejpeg

        with suppress(ValueError):  # Pillow says what is wrong with it, or makes what it can of it
            return simplejpeg.decode_jpeg(data, "GRAY" if in_chans == 1 else "RGB")  # type: ignore[no-any-return]
    return _decode_with_pillow(data, name, in_chans)


def read_content(path: Path) -> numpy.ndarray[Any, Any]:
    """A file's bytes. A FIFO called x.jpg would be waited for without end."""
    import numpy

    try:
        with fileio.open_regular(path, buffering=0, follow=True) as file:
            fileio.require_size(file, _LONGEST)
            data = numpy.empty(os.fstat(file.fileno()).st_size, numpy.uint8)
            done = 0
            while done < data.size and (
                count := file.readinto(data.data[done:])  # type: ignore[attr-defined]
            ):  # network file systems give less at a time
                done += count
            return data[:done]
    except OSError as error:
        fix = "Check the file, its permissions and the disk that it is on."
        if isinstance(error, FileNotFoundError):
            fix = "Put it back: it was there when the data's folder was listed."
            if os.path.islink(path):
                fix = f"It is a link to {os.readlink(path)}, where nothing is: bring that, or remove the link."
        raise UserError(f"Cannot read {path}.", why=str(error), fix=fix) from None


def _is_of_sane_size(data: numpy.ndarray[Any, Any]) -> bool:
    """Whether a JPEG says at its beginning that it is no larger than what Pillow lets pass: with two bytes changed, a
    thumbnail claims 60000 x 60000 pixels, and a decoder fills 11 GB with gray."""
    view, at = data.data, 2
    while at + 9 < len(view) and view[at] == 0xFF:
        kind, length = view[at + 1], view[at + 2] << 8 | view[at + 3]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the start of a frame, in any of its kinds
            height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
            return height * width <= MOST_PIXELS
        at += 2 + length if kind != 0xFF else 1  # markers may be padded
    return False  # let Pillow make what it can of it


def _decode_with_pillow(data: numpy.ndarray[Any, Any], name: str, in_chans: int) -> numpy.ndarray[Any, Any]:
    import io

    import numpy
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data.tobytes())) as file:
            picture: Image.Image = file
            if picture.mode.startswith("I"):  # 16 bits gray, which Pillow would clip instead of scale
                picture = Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
            pixels = numpy.array(picture.convert("L" if in_chans == 1 else "RGB"))
    except Exception as error:  # Pillow's plugins raise anything on a damaged file
        unknown = isinstance(error, UnidentifiedImageError)  # whose words name an address in memory
        raise BrokenImageError(
            f"Cannot decode the image {name}.",
            why="It is no image in any known format." if unknown else f"{type(error).__name__}: {error}",
            fix="Replace the file, or delete it: a damaged image helps nobody. Or skip some with data.max_broken=10.",
            file=name,
        ) from None
    return pixels[:, :, None] if in_chans == 1 else pixels


Place = tuple[Path, tuple[str, ...]]
"""A data set's folder, and the folders in it that hold one for each class."""


class Files(Protocol):
    """Image files by position: those of a class lie side by side, in the same order on every machine."""

    @property
    def folder(self) -> Path:
        """For messages."""
        ...

    @property
    def splits(self) -> Mapping[str, Mapping[str, range]]:
        """Split -> class -> positions; both as their folders are called."""
        ...

    def name(self, position: int) -> str:
        """Below its class's folder."""
        ...

    def read(self, position: int, in_chans: int) -> Tensor:
        """As `read_image` gives it."""
        ...


class Listing:
    """Names of image files by split and class.

    They lie in one block of bytes: a list of a million strings would be copied into every worker, page by page, as soon
    as Python counts the references to them.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]], names: bytes) -> None:
        import numpy

        self.splits: dict[str, dict[str, range]] = {}
        start = 0
        for split, classes in counts.items():
            self.splits[split] = {}
            for name, count in classes.items():
                self.splits[split][name] = range(start, start + count)
                start += count
        self._names = names  # each ends with a zero byte, which no name has
        ends = numpy.flatnonzero(numpy.frombuffer(names, numpy.uint8) == 0)
        self._starts = numpy.concatenate([[0], ends + 1])
        if len(ends) != start:
            raise ValueError(f"{len(ends)} names for {start} files")
        if re.search(rb"(?:^|[\0/])\.\.(?:[\0/])|(?:^|\0)/", names):  # it may have come from elsewhere
            raise ValueError("a name leads out of its folder")
        self._classes = [(found, split, name) for split, of in self.splits.items() for name, found in of.items()]
        self._firsts = [found.start for found, _, _ in self._classes]

    @classmethod
    def walk(cls, folder: Path, splits: Sequence[str]) -> Listing:
        """Of what is on the disk."""
        found = {
            split: {name: image_files(folder / split / name) for name in class_folders(folder / split)}
            for split in splits
        }
        counts = {split: {name: len(files) for name, files in classes.items()} for split, classes in found.items()}
        names = [os.fsencode(file) for classes in found.values() for files in classes.values() for file in files]
        return cls(counts, b"".join(name + b"\0" for name in names))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, position: int) -> str:
        """Below its class's folder."""
        return os.fsdecode(self._names[self._starts[position] : self._starts[position + 1] - 1])

    def path(self, position: int) -> str:
        """SPLIT/CLASS/NAME."""
        place = bisect_right(self._firsts, position) - 1
        while not self._classes[place][0]:  # a class without images begins where the one before it does
            place -= 1
        _, split, name = self._classes[place]
        return os.path.join(split, name, self.name(position))

    def to_bytes(self) -> bytes:
        """For other ranks, and for a file."""
        counts = {split: {name: len(found) for name, found in of.items()} for split, of in self.splits.items()}
        return json.dumps(counts).encode() + b"\n" + self._names

    @classmethod
    def from_bytes(cls, content: bytes) -> Listing:
        """What `to_bytes` gave. Raises RunFailedError for anything else."""
        head, _, names = content.partition(b"\n")
        try:
            counts: Any = fileio.parse(head)
            return cls(counts, names)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunFailedError(
                "The list of the data's files is damaged.",
                why=f"{type(error).__name__}: {error}.",
                fix="Start again; if it was read from a pack, prepare that anew.",
            ) from None


class Tree:
    """The files of a listing, below a folder on this machine."""

    def __init__(self, folder: Path, listing: Listing) -> None:
        self.folder, self._listing = folder, listing
        self.splits = listing.splits

    def name(self, position: int) -> str:
        """Below its class's folder."""
        return self._listing.name(position)

    def path(self, position: int) -> Path:
        """The file."""
        return self.folder / self._listing.path(position)

    def read(self, position: int, in_chans: int) -> Tensor:
        """As `read_image`."""
        return read_image(self.path(position), in_chans)


def listed(root: Path, where: Callable[[Path], Place]) -> Tree:
    """The files that lie below ``root``."""
    folder, splits = where(root)
    return Tree(folder, Listing.walk(folder, splits))


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted. Hidden ones, such as .ipynb_checkpoints, are no classes; nor are packs."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
    return sorted(name for name in names if not name.startswith(".") and not name.endswith((".pack", ".pack.partial")))


COUNTED = 20_000
"""So many files are counted within a moment, also on a file system that is far away."""


def counted(folder: Path, most: int = COUNTED) -> list[int] | None:
    """How many images each class has that lies in ``folder``; None where there are more than ``most`` files."""
    counts: list[int] = []
    for name in class_folders(folder):
        counts.append(0)
        for _, _, files in _below(folder / name):
            most -= len(files)
            if most < 0:
                return None
            counts[-1] += sum(map(_is_image, files))
    return counts


def image_files(folder: Path) -> list[str]:
    """Images in ``folder`` and below, as paths relative to it, sorted: the same order on every machine."""
    found: list[str] = []
    for parent, _, files in _below(folder):
        below = os.path.relpath(parent, folder)
        found += [file if below == "." else os.path.join(below, file) for file in files if _is_image(file)]
    return sorted(found)


def _below(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """A folder and those below it, but for hidden ones, as `os.walk` gives them."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent, folders, files


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


# Splits of image files: one folder, or part of a pack, for each class.


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


def scan(files: Files, split: str, classes: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions and labels of all images of ``classes``; a class may have none here."""
    positions: list[int] = []
    labels: list[int] = []
    of_class = files.splits.get(split, {})
    for label, name in enumerate(classes):
        found = of_class.get(name, range(0))
        positions += found
        labels += [label] * len(found)
    return positions, labels


def read_split(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of a split. Raises UserError for a class that training does not have, and where there are none."""
    folder = files.folder / split
    unknown = sorted(set(files.splits.get(split, {})) - set(classes))
    if unknown:
        raise UserError(
            f"{folder / unknown[0]} is a class that the training data does not have.",
            why=f"The training data has: {_some(classes)}.",
            fix="Rename or remove that folder, or add training images of its class.",
        )
    positions, labels = scan(files, split, classes)
    if not positions:
        raise no_images(folder)
    return ImageFiles(files, positions, labels, in_chans)


def require_classes(folder: Path, classes: Iterable[str]) -> list[str]:
    """The classes of a folder to train on. Raises UserError where these are less than two."""
    classes = list(classes)
    if len(classes) < 2:
        raise UserError(
            f"{folder} does not hold a folder for each class.",
            why=f"It has {'no folder' if not classes else f'one folder, {classes[0]}'}; two or more are needed.",
            fix=f"Put the images into {folder}/CLASS/NAME.jpg.",
        )
    return classes


def no_images(folder: Path) -> UserError:
    """The error for a folder that should hold images."""
    return UserError(
        f"{folder} holds no images.",
        why=f"Image files end in {', '.join(SUFFIXES[:6])}, ...",
        fix=f"Put the images into {folder}/CLASS/NAME.jpg, or remove the empty folder.",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# Broken images: what is taken in their place, and how a rank gets to know of them.
#
# In training the next whole image in the data's own order stands in, with its label: a function of the data alone, so
# that every rank, every worker and every attempt takes the same. Evaluation leaves a broken image out of its counts.


class BrokenImages:
    """How many images may be broken, and those that this rank has met and not told the others of: file -> why."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.met: dict[str, str] = {}

    def take(self) -> dict[str, str]:
        """What has been met since it was last taken."""
        met, self.met = self.met, {}
        return met


class RepairedBatch(NamedTuple):
    """A batch in which other images stand in for broken ones, as it comes from a worker."""

    batch: Any
    broken: dict[str, str]


def read_whole(samples: Samples, index: int, most: int, met: dict[str, str]) -> tuple[Any, Any, bool]:
    """Image and label of sample ``index``, and whether it is that one: else it is the next whole one.

    Args:
        most: how many broken ones may be passed by.
        met: to which they are added.

    Raises:
        BrokenImageError: there are more of them in a row.
    """
    for passed_by in range(most + 1):
        try:
            image, label = samples[(index + passed_by) % len(samples)]
            return image, label, passed_by == 0
        except BrokenImageError as error:
            met[error.file] = error.why
            last = error
    raise last


def noted(batches: Iterable[Any], broken: BrokenImages) -> Iterator[Any]:
    """The batches themselves; what is broken in them is noted."""
    for batch in batches:
        if isinstance(batch, RepairedBatch):
            broken.met.update(batch.broken)
            batch = batch.batch
        yield batch


# Photographs of any size: the usual augmentation, and how they are cut for evaluation.

PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, which pretrained models expect."""

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of the random part: its share of the photo, its width over its height. As in Szegedy et al., "Going Deeper with
Convolutions", and in torchvision since."""


def photo_statistics(in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of photographs for RGB or, averaged, for gray images."""
    if in_chans == 3:
        return PHOTO_MEAN, PHOTO_STD
    return (sum(PHOTO_MEAN) / 3,) * in_chans, (sum(PHOTO_STD) / 3,) * in_chans


def photo_transforms(
    image_size: int, expected: ModelInput | None = None, *, augment: bool
) -> tuple[Transform, Transform]:
    """Train and eval transform of photographs of any size: random part and mirror image; centre of the shorter side.

    Pretrained weights have their own way of resizing and cropping: ``expected``.
    """
    mode = expected.interpolation if expected else "bilinear"
    evaluate = CenterCrop(image_size, round(image_size / (expected.crop if expected else 224 / 256)), mode)
    return (RandomResizedCrop(image_size, mode) if augment else evaluate), evaluate


def require_photo_options(image_size: int, in_chans: int, val_fraction: float, test_fraction: float) -> None:
    """Refuse options that no data set of photographs can have."""
    require(image_size >= 8, "image_size", image_size, "8 or more")
    require(in_chans in (1, 3), "in_chans", in_chans, "3, or 1 for gray images")
    require(0.0 < val_fraction < 1.0, "val_fraction", val_fraction, "between 0 and 1")
    require(0.0 < test_fraction < 1.0, "test_fraction", test_fraction, "between 0 and 1")
    require(val_fraction + test_fraction < 1.0, "val_fraction", val_fraction, "less than 1 with data.test_fraction")


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
