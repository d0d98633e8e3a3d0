"""CINIC-10: CIFAR-10's classes with 90,000 images a split, PNG files in ROOT/cinic10/{train,valid,test}/CLASS."""

from pathlib import Path
from typing import Any

from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.data import download
from trainkit.data.base import Splits
from trainkit.data.download import Say
from trainkit.data.folders import Layout, read_splits, require_splits
from trainkit.data.image_files import Files, list_images

ARCHIVE = "CINIC-10.tar.gz"
PAGE = "https://datashare.ed.ac.uk/handle/10283/3192"
MD5 = "6ee4d0c996905fe93221de577967a372"
SHAPE = {"num_classes": 10, "train_size": 90_000}
SPLITS = ("train", "valid", "test")


def build(files: Files, *, image_size: int = 32, augment: bool = True) -> Splits:
    """Augmented by a shift of up to 4 pixels and mirroring, at 32x32; then resized to ``image_size``."""
    from trainkit.data.tensors import tensor_splits

    classes, parts = read_splits(files, SPLITS)
    mean = (0.4789, 0.4723, 0.4305)
    std = (0.2421, 0.2383, 0.2587)
    info = DataInfo("cinic10", len(classes), 3, image_size, tuple(classes), mean, std)
    return tensor_splits(info, parts, augment=augment, shift=4, in_memory=False)


def layout(root: Path, **options: Any) -> Layout:
    """The folder of the images, and its splits."""
    for folder in (root / "cinic10", root / "CINIC-10", root):
        if (folder / "train").is_dir() and (folder / "valid").is_dir():
            return folder, SPLITS
    return root / "cinic10", SPLITS


def locate(root: Path, **options: Any) -> None:
    """Check that the three splits are there."""
    require_splits("cinic10", root, layout(root), "CLASS", f"Fetch {ARCHIVE} from {PAGE} into {root}, then")


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Unpack the archive into its layout, and count."""
    final = root / "cinic10"
    if download.is_there(final, SPLITS, say):
        return
    named = [file for file in archives if file.name == ARCHIVE]
    archive = next(iter([*named, *archives]), None) or download.given_or_in(root, ARCHIVE, [])  # what is given wins
    if archive is None:
        why = f"CINIC-10 (688 MB) must be downloaded by hand; neither --archive nor {root} has it."
        fix = f"Fetch it from {PAGE}, copy it to {root / ARCHIVE}, and repeat this command."
        raise UserError(f"There is no {ARCHIVE} to unpack.", why=why, fix=fix)

    def name_of(member: Path) -> str | None:
        """Below whatever folder the archive wraps around its splits."""
        inside = member.parts[-3:]
        return str(Path(*inside)) if len(inside) == 3 and inside[0] in SPLITS else None

    download.note_other(archive, MD5, say)
    with download.unpacked(archive, final, name_of, 10 << 30, say) as folder:
        counts = {split: len(list_images(folder / split)) for split in SPLITS}
        if not all(counts.values()):
            why = "It does not have images in train/CLASS, valid/CLASS and test/CLASS."
            raise download.other_archive(archive, "archive of CINIC-10", why, f"{ARCHIVE} from {PAGE}")
        say("It has " + ", ".join(f"{count} {split}" for split, count in counts.items()) + ".")
