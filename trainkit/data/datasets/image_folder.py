"""Your own images: folders named after their classes."""

from pathlib import Path
from typing import Any, Literal

from trainkit.data import folders
from trainkit.data.base import Splits, size_left, stratified_split
from trainkit.data.download import Say
from trainkit.data.folders import Files, ImageFiles, Layout
from trainkit.errors import UserError


def build(
    files: Files,
    *,
    image_size: int = 224,
    in_chans: Literal[1, 3] = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
    exif: bool = False,
) -> Splits:
    """Either ``root/train/CLASS/*``, ``root/val/...`` and ``root/test/...``: without val it is split off train, without
    test it is val. Or ``root/CLASS/*``, split three ways. Splits are stratified and depend on the files' names only.

    ``image_size``: pixels of a side; a new run without it takes the median of the shorter sides, up to 224. ``exif``:
    turn photos upright, as their EXIF data says.
    """
    first = "train" if "train" in files.splits else ""
    folder = files.folder / first
    classes = folders.require_classes(folder, files.splits[first])
    held_out = {
        name: folders.read_split(files, name, classes, in_chans) for name in ("val", "test") if files.splits.get(name)
    }
    train = folders.images_of(files, first, classes, in_chans)
    for label in sorted(set(range(len(classes))) - set(train.labels)):
        raise folders.no_images(folder / classes[label])
    if not first:
        train, val, test = _split(train, folder, classes, (val_fraction, test_fraction))
    else:
        if "val" not in held_out:
            train, held_out["val"] = _split(train, folder, classes, (val_fraction,))
        val = held_out["val"]
        test = held_out.get("test", val)
    return folders.photo_splits(
        "image_folder", classes, (train, val, test), image_size, in_chans, augment=augment, exif=exif
    )


def layout(root: Path) -> Layout:
    """The folder of the images, and its splits; "" is the folder itself, which is to be split."""
    return root, ("train", "val", "test") if (root / "train").is_dir() else ("",)


def locate(root: Path, **options: Any) -> None:
    """Check that ``root`` has one of the two layouts."""
    folder = root / layout(root)[1][0]
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {root}.",
            why="data.root of image_folder is the folder of your images.",
            fix=f"Put them into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg, or correct data.root.",
            key="data.root",
        )
    folders.require_classes(folder, folders.class_folders(folder))


def train_size(root: Path, *, val_fraction: float, test_fraction: float, **others: Any) -> int | None:
    """Images to train on; None where counting them would take long."""
    folder, splits = layout(root)
    counts = folders.counted(folder / splits[0])
    if counts is None or splits == ("",):
        return size_left(counts, (val_fraction, test_fraction)) if counts else None
    return sum(counts) if folders.class_folders(folder / "val") else size_left(counts, (val_fraction,))


def some_images(root: Path, **options: Any) -> list[Path]:
    """Of those to train on."""
    return folders.some_of(root / layout(root)[1][0])


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg.")
    say(f"Or into {root}/CLASS/NAME.jpg: then they are split into train, val and test by themselves.")


def _split(images: ImageFiles, folder: Path, classes: list[str], fractions: tuple[float, ...]) -> list[ImageFiles]:
    names = [images.files.name(position) for position in images.positions]
    keys = [f"{classes[label]}/{name}" for label, name in zip(images.labels, names, strict=True)]
    parts = stratified_split(images.labels, fractions, keys=keys)
    if not all(parts):
        raise UserError(
            f"{folder} has too few images to split.",
            why=f"It has {len(images)} images of {len(classes)} classes; a class needs {len(fractions) + 1} or more.",
            fix="Add images, or make the folders train and val yourself.",
        )
    return [images.part(indices) for indices in parts]
