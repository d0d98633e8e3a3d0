"""Your own images: folders named after their classes."""

from pathlib import Path
from typing import Any, Literal

from trainkit.data import folders
from trainkit.data.base import Splits, size_left
from trainkit.data.download import Say
from trainkit.data.folders import Files, Layout
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
    fractions, options = (val_fraction, test_fraction), {"augment": augment, "exif": exif}
    return folders.folder_splits("image_folder", files, image_size, in_chans, fractions, **options)


def layout(root: Path, **options: Any) -> Layout:
    """The folder of the images, and its splits; "" is the folder itself, which is to be split."""
    return root, ("train", "val", "test") if (root / "train").is_dir() else ("",)


def locate(root: Path, **options: Any) -> None:
    """Check that ``root`` has one of the two layouts."""
    folder = root / layout(root)[1][0]
    if not folder.is_dir():
        why = "data.root of image_folder is the folder of your images."
        fix = f"Put them into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg, or correct data.root."
        raise UserError(f"There is no folder {root}.", why=why, fix=fix, key="data.root")
    folders.require_classes(folder, folders.class_folders(folder))


def train_size(root: Path, *, val_fraction: float, test_fraction: float, **others: Any) -> int | None:
    """Images to train on; None where counting them would take long."""
    if (root / "train").is_dir():
        return folders.train_size(root, val_fraction)
    counts = folders.counted(root)
    return size_left(counts, (val_fraction, test_fraction)) if counts else None


def some_images(root: Path, **options: Any) -> list[Path]:
    """Of those to train on."""
    return folders.some_of(root / layout(root)[1][0])


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images into {root}/train/CLASS/NAME.jpg and {root}/val/CLASS/NAME.jpg.")
    say(f"Or into {root}/CLASS/NAME.jpg: then they are split into train, val and test by themselves.")
