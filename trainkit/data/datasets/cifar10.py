"""CIFAR-10, in the files that torchvision reads and writes: ROOT/cifar-10-batches-py."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.common import fileio
from trainkit.common.errors import require
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits, damaged, require_files
from trainkit.data.download import Say, given_or_fetched, is_there, other_archive, require_names, unpacked
from trainkit.data.order import size_left, stratified_split

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = {"num_classes": 10, "train_size": 45_000}
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
MD5 = "c58f30108f718f92721af3b95e74349a"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
FILES = (*TRAIN_FILES, *TEST_FILES, "batches.meta")
OFFICIAL_BYTES = 10_000 * 3072
"""A batch file of 10,000 images is larger."""


def build(
    root: Path, *, image_size: int = 32, augment: bool = True, val_fraction: float = 0.1, shift: int = 4,
    padding_mode: Literal["constant", "reflect"] = "constant",
) -> Splits:  # fmt: skip
    """50,000 + 10,000 photos of 32x32. ``val_fraction`` of the training images become val, stratified.

    Augmented by a shift of up to ``shift`` pixels and mirroring, at 32x32; then resized to ``image_size``.
    ``padding_mode``: an image continues in black beyond its edge, or with reflect as its mirror image.
    """
    from trainkit.data.tensors import TensorSamples, tensor_splits

    folder = root / FOLDER
    names = load(folder / "batches.meta").get("label_names", [])
    classes = tuple(str(_text(name)) for name in names)
    images, labels = _read(folder, TRAIN_FILES, len(classes))
    parts = [TensorSamples(images[i], labels[i]) for i in stratified_split(labels.tolist(), (val_fraction,))]
    parts.append(TensorSamples(*_read(folder, TEST_FILES, len(classes))))
    info = DataInfo("cifar10", len(classes), 3, image_size, classes, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return tensor_splits(info, parts, augment=augment, shift=shift, reflect=padding_mode == "reflect")


def locate(root: Path, *, shift: int, **options: Any) -> None:
    """Check that all files are there, and the options."""
    require(0 <= shift < 32, "data.shift", shift, "between 0 and 31 pixels")
    require_files("cifar10", root, (root / FOLDER / file for file in FILES))


def train_size(root: Path, *, val_fraction: float, **others: Any) -> int | None:
    """Images to train on, of the official files; None for others, which only reading can count."""
    official = all((root / FOLDER / file).stat().st_size > OFFICIAL_BYTES for file in TRAIN_FILES)
    return size_left([5000] * 10, (val_fraction,)) if official else None


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Download (or take from ``archives`` or ROOT), verify and unpack the official archive."""
    final = root / FOLDER
    if is_there(final, FILES, say):
        return
    require_names(archives, (ARCHIVE,))
    archive = given_or_fetched(URL, root / ARCHIVE, MD5, archives, say)

    def name_of(member: Path) -> str | None:
        return member.name if member.parent == Path(FOLDER) else None

    with unpacked(archive, final, name_of, 1 << 30, say) as folder:
        absent = [file for file in FILES if not (folder / file).is_file()]
        if absent:
            raise other_archive(archive, "archive of CIFAR-10", f"It has no {FOLDER}/{absent[0]}.", URL)


def _read(folder: Path, files: tuple[str, ...], num_classes: int) -> tuple[Tensor, Tensor]:
    """Read images uint8 [N, 3, 32, 32] and labels int64 [N] from batch files."""
    import torch

    images: list[Tensor] = []
    labels: list[Tensor] = []
    for file in files:
        batch = load(folder / file)
        try:
            images.append(torch.from_numpy(batch["data"]).to(torch.uint8).reshape(-1, 3, 32, 32))
            labels.append(torch.tensor(batch["labels"], dtype=torch.int64))
            in_range = (labels[-1] >= 0) & (labels[-1] < num_classes)
            fits = len(images[-1]) == len(labels[-1]) and bool(in_range.all())
        except (KeyError, TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            why = "It needs 'data', 3072 bytes for each image, and 'labels', one class for each."
            raise damaged("cifar10", f"{folder / file} is not a batch of CIFAR-10.", why)
    return torch.cat(images), torch.cat(labels)


# CIFAR-10 comes as pickle files, and unpickling a stranger's file runs the stranger's code. The reader below knows
# dicts, lists, text, bytes, numbers and numpy arrays of numbers. It rebuilds the arrays itself from their bytes, and
# refuses anything else. So a data set of one's own in CIFAR's format is as safe to read as the official one.


def load(file: Path) -> Any:
    """Read plain values from a pickle: arrays as numpy's, and keys that are bytes as text.

    Raises UserError where the file is missing, broken, or holds anything else.
    """
    with fileio.disk_errors_as(f"Cannot read {file}.", fix="Check the path and its permissions."):
        content = fileio.read_bytes(file, 1 << 30, follow=True)
    try:
        return _plain(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except Exception as error:  # a broken pickle may raise anything
        why = f"It is damaged ({type(error).__name__})."
        if isinstance(error, pickle.UnpicklingError):
            why = str(error)
        raise damaged("cifar10", f"{file} is not a file of plain arrays.", why) from None


class _Rebuilt:
    """Keeps what a pickle says of an array or of its dtype, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode(text: Any, encoding: Any) -> bytes:
    if _text(encoding) != "latin1":
        raise pickle.UnpicklingError(f"It holds text in the encoding {encoding!r}.")
    return text if isinstance(text, bytes) else str(text).encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if f"{module}.{name}".replace("numpy._core.", "numpy.core.") in (
            "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
        ):  # fmt: skip
            return _Rebuilt
        raise pickle.UnpicklingError(f"It wants to run '{module}.{name}', which plain data does not.")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, _Rebuilt):
        return value
    import numpy

    _, shape, dtype, is_fortran, data = value.state
    code = _text(dtype.arguments[0])
    order = _text(dtype.state[1])
    if not re.fullmatch("[uifb][0-9]{1,2}", code):
        raise pickle.UnpicklingError(f"It holds an array of '{code}', which is not a number.")
    if isinstance(data, str):
        data = data.encode("latin1")  # how Python 3 keeps bytes in the old protocols
    flat = numpy.frombuffer(bytearray(data), numpy.dtype(code).newbyteorder(order if order in "<>" else "="))
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
