"""Your own images: folders named after their classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from trainkit.data.base import DataInfo, Splits, size_left, stratified_split
from trainkit.data.download import Say
from trainkit.data.folders import (
    Files,
    ImageFiles,
    Place,
    class_folders,
    counted,
    listed,
    no_images,
    read_split,
    require_classes,
    require_photo_options,
    scan,
)
from trainkit.errors import UserError


def build(
    root: Path,
    *,
    image_size: int = 224,
    in_chans: int = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
) -> Splits:
    """Either ``root/train/CLASS/*``, ``root/val/...`` and ``root/test/...``: without val it is split off train, without
    test it is val. Or ``root/CLASS/*``, split three ways. Splits are stratified and depend on the files' names only.
    """
    locate(root, image_size=image_size, in_chans=in_chans, val_fraction=val_fraction, test_fraction=test_fraction)
    return build_from(
        listed(root, where),
        image_size=image_size,
        in_chans=in_chans,
        augment=augment,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
    )


def where(root: Path) -> Place:
    """The folder of the images, and its splits; "" is the folder itself, which is to be split."""
    return root, ("train", "val", "test") if (root / "train").is_dir() else ("",)


def build_from(
    files: Files, *, image_size: int, in_chans: int, augment: bool, val_fraction: float, test_fraction: float
) -> Splits:
    """The same, of files that are listed already."""
    from trainkit.data.folders import photo_statistics, photo_transforms

    if "train" in files.splits:
        classes, (train, val, test) = _separate_folders(files, in_chans, val_fraction)
    else:
        classes = require_classes(files.folder, files.splits[""])
        train, val, test = _split(files, "", classes, (val_fraction, test_fraction), in_chans)
    mean, std = photo_statistics(in_chans)
    train_transform, eval_transform = photo_transforms(image_size, augment=augment)
    return Splits(
        info=DataInfo("image_folder", len(classes), in_chans, image_size, tuple(classes), mean, std),
        train=train,
        val=val,
        test=test,
        train_transform=train_transform,
        eval_transform=eval_transform,
        transforms_for=partial(photo_transforms, image_size, augment=augment),
    )


def locate(
    root: Path, *, image_size: int, in_chans: int, val_fraction: float, test_fraction: float, **others: object
) -> None:
    """Check the options, and that ``root`` has one of the two layouts."""
    require_photo_options(image_size, in_chans, val_fraction, test_fraction)
    folder = root / "train" if (root / "train").is_dir() else root
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {root}.",
            why="data.root of image_folder is the folder of your images.",
            fix=f"Put them into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg, or correct data.root.",
            key="data.root",
        )
    require_classes(folder, class_folders(folder))


def train_size(root: Path, *, val_fraction: float, test_fraction: float, **others: object) -> int | None:
    """How many images the training split has; None where counting them would take long."""
    folder, splits = where(root)
    counts = counted(folder / splits[0])
    if counts is None or splits == ("",):
        return size_left(counts, (val_fraction, test_fraction)) if counts else None
    return sum(counts) if class_folders(folder / "val") else size_left(counts, (val_fraction,))


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg.")
    say(f"Or into {root}/CLASS/NAME.jpg: then they are split into train, val and test by themselves.")


def _separate_folders(
    files: Files, in_chans: int, val_fraction: float
) -> tuple[list[str], tuple[ImageFiles, ImageFiles, ImageFiles]]:
    folder = files.folder / "train"
    classes = require_classes(folder, files.splits["train"])
    held_out = {name: read_split(files, name, classes, in_chans) for name in ("val", "test") if files.splits.get(name)}
    if "val" not in held_out:
        train, val = _split(files, "train", classes, (val_fraction,), in_chans)
        return classes, (train, val, held_out.get("test", val))
    train = read_split(files, "train", classes, in_chans)
    _require_each_class(folder, classes, train.labels)
    return classes, (train, held_out["val"], held_out.get("test", held_out["val"]))


def _split(
    files: Files, split: str, classes: list[str], fractions: tuple[float, ...], in_chans: int
) -> list[ImageFiles]:
    positions, labels = scan(files, split, classes)
    folder = files.folder / split
    _require_each_class(folder, classes, labels)
    keys = [f"{classes[label]}/{files.name(at)}" for at, label in zip(positions, labels, strict=True)]
    parts = stratified_split(labels, fractions, keys=keys)
    if not all(parts):
        raise UserError(
            f"{folder} has too few images to split.",
            why=f"It has {len(labels)} images of {len(classes)} classes; a class needs {len(fractions) + 1} or more.",
            fix="Add images, or make the folders train and val yourself.",
        )
    return [ImageFiles(files, [positions[i] for i in part], [labels[i] for i in part], in_chans) for part in parts]


def _require_each_class(folder: Path, classes: list[str], labels: Iterable[int]) -> None:
    for label in sorted(set(range(len(classes))) - set(labels)):
        raise no_images(folder / classes[label])
