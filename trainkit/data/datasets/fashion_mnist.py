"""Fashion-MNIST, in the files that torchvision reads and writes: ROOT/FashionMNIST/raw."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits, damaged, require_files
from trainkit.data.download import Say, given_or_fetched, is_there, require_names
from trainkit.data.order import size_left, stratified_split

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = {"num_classes": 10, "train_size": 54_000}
FOLDER = Path("FashionMNIST", "raw")
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5S = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
FILES = tuple(name.removesuffix(".gz") for name in MD5S)
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_LONGEST = 1 << 28
"""Bytes of a file; the largest has 47 million."""


def build(
    root: Path, *, image_size: int = 28, in_chans: Literal[1, 3] = 1, augment: bool = True, val_fraction: float = 0.1
) -> Splits:
    """60,000 + 10,000 gray pictures of clothes, 28x28. ``val_fraction`` of the training images become val, stratified.

    Augmented by a shift of up to 2 pixels and mirroring, at 28x28; then resized to ``image_size``.
    """
    from trainkit.data.tensors import TensorSamples, tensor_splits

    images, labels = _read(root / FOLDER, "train", in_chans)
    parts = [TensorSamples(images[i], labels[i]) for i in stratified_split(labels.tolist(), (val_fraction,))]
    parts.append(TensorSamples(*_read(root / FOLDER, "t10k", in_chans)))
    info = DataInfo("fashion_mnist", 10, in_chans, image_size, CLASSES, (0.2860,) * in_chans, (0.3530,) * in_chans)
    return tensor_splits(info, parts, augment=augment, shift=2)


def train_size(root: Path, *, val_fraction: float, **others: Any) -> int:
    """Images to train on, by the labels' file."""
    labels = fileio.read_bytes(root / FOLDER / "train-labels-idx1-ubyte", _LONGEST, follow=True)[8:]
    return size_left(Counter(labels).values(), (val_fraction,))


def locate(root: Path, **options: Any) -> None:
    """Check that all files are there."""
    require_files("fashion_mnist", root, (root / FOLDER / file for file in FILES))


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Download (or take from ``archives`` or ROOT), verify and unpack the four official files."""
    folder = root / FOLDER
    if is_there(folder, FILES, say):
        return
    require_names(archives, MD5S)
    for name in MD5S:
        if (folder / name.removesuffix(".gz")).is_file():
            continue
        packed = given_or_fetched(f"{MIRROR}{name}", folder / name, MD5S[name], archives, say)
        fileio.make_folder(folder)
        try:
            with gzip.open(packed) as file:
                content = file.read(_LONGEST + 1)
            if len(content) > _LONGEST:
                raise gzip.BadGzipFile(f"It holds more than {_LONGEST:,} bytes")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{packed} cannot be unpacked.", why=f"{error}.", fix="Fetch it again.") from None
        fileio.write(folder / name.removesuffix(".gz"), content)
    say(f"{folder} is complete.")


def _read(folder: Path, split: str, in_chans: int) -> tuple[Tensor, Tensor]:
    """Read images uint8 [N, in_chans, 28, 28] and labels int64 [N]."""
    import torch

    images = read_idx(folder / f"{split}-images-idx3-ubyte")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte").to(torch.int64)
    if len(images) != len(labels) or images.ndim != 3 or labels.max() >= len(CLASSES):
        what = f"The images and labels of '{split}' in {folder} do not belong together."
        raise damaged("fashion_mnist", what, f"{len(images)} images, {len(labels)} labels up to {int(labels.max())}.")
    return images[:, None].expand(-1, in_chans, -1, -1), labels


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes, which MNIST comes in, in its shape. Raises UserError where it is cut short."""
    import torch

    try:
        data = fileio.read_bytes(path, _LONGEST, follow=True)
        zeros, kind, dims = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
        if zeros == 0 and kind == 8 and dims > 0:
            return torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).reshape(shape)
        why = "Its first four bytes are not those of an IDX file."
    except (OSError, struct.error, RuntimeError, ValueError) as error:
        why = f"{error}."
    raise damaged("fashion_mnist", f"{path} is not an IDX file of bytes.", why)
