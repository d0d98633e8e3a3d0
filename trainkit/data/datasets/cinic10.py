"""CINIC-10: CIFAR-10's classes with 90,000 images a split, PNG files in ROOT/cinic10/{train,valid,test}/CLASS."""

from __future__ import annotations

from pathlib import Path

from trainkit import terminal
from trainkit.data.base import DataInfo, Splits, missing, require
from trainkit.data.download import Say, complete_folder, extract, given_or_in, md5_of, opened_tar, regular
from trainkit.data.folders import Files, Place, class_folders, image_files, listed, read_split, require_classes
from trainkit.errors import UserError

ARCHIVE = "CINIC-10.tar.gz"
PAGE = "https://datashare.ed.ac.uk/handle/10283/3192"
MD5 = "6ee4d0c996905fe93221de577967a372"
SPLITS = ("train", "valid", "test")
OFFICIAL_COUNT = 270_000


def build(root: Path, *, image_size: int = 32, augment: bool = True) -> Splits:
    """Augmented by a shift of up to 4 pixels and mirroring, at 32x32; then resized to ``image_size``."""
    locate(root, image_size=image_size)
    return build_from(listed(root, where), image_size=image_size, augment=augment)


def where(root: Path) -> Place:
    """The folder of the images, and its splits."""
    return _folder(root), SPLITS


def build_from(files: Files, *, image_size: int, augment: bool) -> Splits:
    """The same, of files that are listed already."""
    from trainkit.data.loader import tensor_transforms

    classes = require_classes(files.folder / "train", files.splits["train"])
    train, val, test = (read_split(files, split, classes, in_chans=3) for split in SPLITS)
    train_transform, eval_transform = tensor_transforms(image_size, augment=augment, shift=4, flip=True)
    return Splits(
        info=DataInfo(
            name="cinic10",
            num_classes=len(classes),
            in_chans=3,
            image_size=image_size,
            class_names=tuple(classes),
            mean=(0.4789, 0.4723, 0.4305),
            std=(0.2421, 0.2383, 0.2587),
        ),
        train=train,
        val=val,
        test=test,
        train_transform=train_transform,
        eval_transform=eval_transform,
    )


def locate(root: Path, *, image_size: int, **others: object) -> None:
    """Check the options, and that the three splits are there."""
    require(image_size >= 8, "image_size", image_size, "8 or more")
    for split in SPLITS:
        if not class_folders(_folder(root) / split):
            raise missing(
                "cinic10",
                root,
                _folder(root) / split / "CLASS",
                fix=f"Fetch {ARCHIVE} from {PAGE} into {root}, then: "
                f"{terminal.command('prepare', 'cinic10', '--root', root)}",
            )


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Unpack the archive into its layout, and count."""
    final = root / "cinic10"
    if all((final / split).is_dir() for split in SPLITS):
        say(f"{final} is already there.")
        return
    named = [given for given in archives if given.name == ARCHIVE]
    archive = next(iter([*named, *archives]), None) or given_or_in(root, ARCHIVE, [])  # what is given by hand wins
    if archive is None or not archive.is_file():
        raise UserError(
            f"There is no {ARCHIVE} to unpack.",
            why=f"CINIC-10 (688 MB) is downloaded by hand; neither --archive nor {root} has it.",
            fix=f"Fetch it from {PAGE}, copy it to {root / ARCHIVE}, and give this command again.",
        )
    official = md5_of(archive) == MD5
    if not official:
        say(f"Note: {archive} is not the official archive (another MD5). Taking it for a subset.")
    say(f"Unpacking {archive}")
    with complete_folder(final) as partial:
        with opened_tar(archive) as tar:
            for member in regular(tar, 10 << 30):
                parts = Path(member.name).parts
                split = next((i for i, part in enumerate(parts) if part in SPLITS), None)
                if split is not None and len(parts) == split + 3:
                    # below whatever folder the archive wraps around
                    extract(tar, member, partial, str(Path(*parts[split:])))
        counts = {split: len(image_files(partial / split)) for split in SPLITS}
        if official and sum(counts.values()) != OFFICIAL_COUNT:
            raise UserError(
                f"{archive} gave {sum(counts.values())} images instead of {OFFICIAL_COUNT}.",
                why="Unpacking lost some.",
                fix="Check the disk's free space and quota, and give this command again.",
            )
        if not all(counts.values()):
            raise UserError(
                f"{archive} is no archive of CINIC-10.",
                why="It does not have images in train/CLASS, valid/CLASS and test/CLASS.",
                fix=f"Fetch {ARCHIVE} from {PAGE}.",
            )
    say(f"{final} is complete: " + ", ".join(f"{count} {split}" for split, count in counts.items()) + ".")


def _folder(root: Path) -> Path:
    for candidate in (root / "cinic10", root / "CINIC-10", root):
        if (candidate / "train").is_dir() and (candidate / "valid").is_dir():
            return candidate
    return root / "cinic10"
