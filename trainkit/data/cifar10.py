"""CIFAR-10, in the files that torchvision reads and writes: ROOT/cifar-10-batches-py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.data import plain_pickle
from trainkit.data.archives import Say, complete_folder, extract, opened_tar, regular, require_names, verified
from trainkit.data.base import DataInfo, Splits, missing, require
from trainkit.data.splitting import size_left, stratified_split
from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
MD5 = "c58f30108f718f92721af3b95e74349a"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
OFFICIAL_BYTES = 10_000 * 3072
"""A batch file of 10,000 images is larger."""
FILES = (*TRAIN_FILES, *TEST_FILES, "batches.meta")


def build(root: Path, *, image_size: int = 32, augment: bool = True, val_fraction: float = 0.1) -> Splits:
    """50,000 + 10,000 photos of 32x32. ``val_fraction`` of the training images become val, stratified.

    Augmented by a shift of up to 4 pixels and mirroring, at 32x32; then resized to ``image_size``.
    """
    from trainkit.data.tensors import TensorSamples, tensor_transforms

    locate(root, image_size=image_size, val_fraction=val_fraction)
    folder = root / FOLDER
    names = plain_pickle.load(folder / "batches.meta").get("label_names", [])
    class_names = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    images, labels = _read(folder, TRAIN_FILES, len(class_names))
    train, val = (
        TensorSamples(images[part], labels[part]) for part in stratified_split(labels.tolist(), (val_fraction,))
    )
    train_transform, eval_transform = tensor_transforms(image_size, augment=augment, shift=4, flip=True)
    return Splits(
        info=DataInfo(
            name="cifar10",
            num_classes=len(class_names),
            in_chans=3,
            image_size=image_size,
            class_names=class_names,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        ),
        train=train,
        val=val,
        test=TensorSamples(*_read(folder, TEST_FILES, len(class_names))),
        train_transform=train_transform,
        eval_transform=eval_transform,
        in_memory=True,
    )


def train_size(root: Path, *, val_fraction: float, **others: object) -> int | None:
    """How many images the training split has, of the official files; None for others, which only reading can count."""
    official = all((root / FOLDER / file).stat().st_size > OFFICIAL_BYTES for file in TRAIN_FILES)
    return size_left([5000] * 10, (val_fraction,)) if official else None


def locate(root: Path, *, image_size: int, val_fraction: float, **others: object) -> None:
    """Check the options, and that all files are there."""
    require(image_size >= 8, "image_size", image_size, "8 or more")
    require(0.0 < val_fraction < 1.0, "val_fraction", val_fraction, "between 0 and 1")
    for file in FILES:
        if not (root / FOLDER / file).is_file():
            raise missing("cifar10", root, root / FOLDER / file)


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Download (or take from ``archives`` or ROOT), verify and unpack the official archive."""
    final = root / FOLDER
    if all((final / file).is_file() for file in FILES):
        say(f"{final} is already there.")
        return
    require_names(archives, (ARCHIVE,))
    archive = verified(URL, root / ARCHIVE, MD5, archives, say)
    say(f"Unpacking {archive}")
    with complete_folder(final) as partial, opened_tar(archive) as tar:
        for member in regular(tar, 1 << 30):
            if Path(member.name).parent == Path(FOLDER):
                extract(tar, member, partial, Path(member.name).name)
        absent = [file for file in FILES if not (partial / file).is_file()]
        if absent:
            raise UserError(
                f"{archive} is no archive of CIFAR-10.",
                why=f"It has no {FOLDER}/{absent[0]}.",
                fix=f"Use {ARCHIVE} from {URL}.",
            )
    say(f"{final} is complete.")


def _read(folder: Path, files: tuple[str, ...], num_classes: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of some batch files."""
    import torch

    images, labels = [], []
    for file in files:
        batch = plain_pickle.load(folder / file)
        try:
            pixels = torch.from_numpy(batch["data"])
            images.append(pixels.to(torch.uint8).reshape(-1, 3, 32, 32))
            labels.append(torch.tensor(batch["labels"], dtype=torch.int64))
            fits = len(images[-1]) == len(labels[-1]) and all(0 <= label < num_classes for label in batch["labels"])
        except (KeyError, TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            raise UserError(
                f"{folder / file} is no batch of CIFAR-10.",
                why="It needs 'data', 3072 bytes for each image, and 'labels', one class for each.",
                fix="Delete the folder, and fetch it again: python -m jobs.prepare cifar10",
            )
    return torch.cat(images), torch.cat(labels)
