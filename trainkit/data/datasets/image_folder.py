"""Your own images: folders named after their classes."""

from pathlib import Path
from typing import Any

from trainkit.common.errors import UserError
from trainkit.data import folders, image_files
from trainkit.data.base import Splits
from trainkit.data.download import Say
from trainkit.data.folders import HeldOut, Layout
from trainkit.data.image_files import Files
from trainkit.data.losses import Counts
from trainkit.data.order import size_left
from trainkit.data.photo_transforms import Photos


def build(files: Files, *, photos: Photos, fractions: HeldOut) -> Splits:
    """Read ``root/train/CLASS/*``, ``root/val/...`` and ``root/test/...``, or split ``root/CLASS/*`` three ways.
    Without val, some training images are held out; without test, val is also the test split. ``Training``, ``valid``,
    ``dev`` and the like are understood. Splits are stratified and depend only on the names of the files.
    """
    return folders.folder_splits("image_folder", files, photos, fractions)


def layout(root: Path, *, all_kinds: bool = True, **options: Any) -> Layout:
    """The folder of the images, and its splits; "" is the folder itself, which is to be split.

    Args:
        all_kinds: False is a run of before, which knew no other names than train, val and test.
    """
    if not all_kinds:
        return root, folders.SPLITS if (root / "train").is_dir() else ("",)
    return root, tuple(folders.splits_of(root).values()) or ("",)


def locate(root: Path, **options: Any) -> None:
    """Check that ``root`` has one of the two layouts."""
    folder = root / layout(root)[1][0]
    if not folder.is_dir():
        why = "image_folder reads your images from data.root."
        fix = f"Put them into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg, or correct data.root."
        raise UserError(f"There is no folder {root}.", why=why, fix=fix, key="data.root")
    names = image_files.class_folders(folder)
    if folder == root and len(names) == 1 and image_files.class_folders(root / names[0]):
        why = "Archives often put one folder around their content."
        fix = f"If the classes, or the splits, are in that folder: data.root={root / names[0]}."
        raise UserError(f"{root} contains only one folder, {names[0]}.", why=why, fix=fix, key="data.root")
    folders.require_classes(folder, names)


def look(root: Path, **options: Any) -> list[str]:
    """Refuse classes without images and unknown ones; return sentences about what is left out."""
    found = layout(root)
    return [*folders.look_at_folders(found), *folders.not_read(found)]


def train_size(root: Path, *, val_fraction: float, test_fraction: float, **others: Any) -> int | None:
    """Images to train on; None where counting them would take long."""
    if folders.splits_of(root):
        return folders.train_size(root, val_fraction)
    return size_left(image_files.counted(root) or (), (val_fraction, test_fraction)) or None


def counts(root: Path, *, val_fraction: float, test_fraction: float, **others: Any) -> Counts:
    """Count what is read of each split, and what is not; empty where that would take long."""
    return folders.counts(layout(root), (val_fraction, test_fraction))


def some_images(root: Path, **options: Any) -> list[Path]:
    """List some of the images to train on."""
    return folders.some_of(root / layout(root)[1][0])


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg.")
    say(f"Or put them into {root}/CLASS/NAME.jpg; trainkit then splits them into train, val and test.")
