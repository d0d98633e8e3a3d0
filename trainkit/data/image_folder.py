"""Your own images: folders named after their classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from trainkit.data.archives import Say
from trainkit.data.base import DataInfo, Splits, require
from trainkit.data.folders import ImageFiles, class_folders, no_images, read_split, require_classes, scan
from trainkit.data.splitting import stratified_split
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
    from trainkit.data.photos import photo_statistics, photo_transforms

    locate(root, image_size=image_size, in_chans=in_chans, val_fraction=val_fraction, test_fraction=test_fraction)
    if (root / "train").is_dir():
        classes, (train, val, test) = _separate_folders(root, in_chans, val_fraction)
    else:
        classes = require_classes(root)
        train, val, test = _split(root, classes, (val_fraction, test_fraction), in_chans)
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
    require(image_size >= 8, "image_size", image_size, "8 or more")
    require(in_chans in (1, 3), "in_chans", in_chans, "3, or 1 for gray images")
    require(0.0 < val_fraction < 1.0, "val_fraction", val_fraction, "between 0 and 1")
    require(0.0 < test_fraction < 1.0, "test_fraction", test_fraction, "between 0 and 1")
    require(val_fraction + test_fraction < 1.0, "val_fraction", val_fraction, "less than 1 with data.test_fraction")
    folder = root / "train" if (root / "train").is_dir() else root
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {root}.",
            why="data.root of image_folder is the folder of your images.",
            fix=f"Put them into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg, or correct data.root.",
            key="data.root",
        )
    require_classes(folder)


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg.")
    say(f"Or into {root}/CLASS/NAME.jpg: then they are split into train, val and test by themselves.")


def _separate_folders(
    root: Path, in_chans: int, val_fraction: float
) -> tuple[list[str], tuple[ImageFiles, ImageFiles, ImageFiles]]:
    classes = require_classes(root / "train")
    held_out = {
        name: read_split(root / name, classes, in_chans) for name in ("val", "test") if class_folders(root / name)
    }
    if "val" not in held_out:
        train, val = _split(root / "train", classes, (val_fraction,), in_chans)
        return classes, (train, val, held_out.get("test", val))
    train = read_split(root / "train", classes, in_chans)
    _require_each_class(root / "train", classes, train.labels)
    return classes, (train, held_out["val"], held_out.get("test", held_out["val"]))


def _split(folder: Path, classes: list[str], fractions: tuple[float, ...], in_chans: int) -> list[ImageFiles]:
    files, labels = scan(folder, classes)
    _require_each_class(folder, classes, labels)
    parts = stratified_split(labels, fractions, keys=[file.replace("\\", "/") for file in files])
    if not all(parts):
        raise UserError(
            f"{folder} has too few images to split.",
            why=f"It has {len(files)} images of {len(classes)} classes; a class needs {len(fractions) + 1} or more.",
            fix="Add images, or make the folders train and val yourself.",
        )
    return [ImageFiles(folder, [files[i] for i in part], [labels[i] for i in part], in_chans) for part in parts]


def _require_each_class(folder: Path, classes: list[str], labels: Iterable[int]) -> None:
    for label in sorted(set(range(len(classes))) - set(labels)):
        raise no_images(folder / classes[label])
