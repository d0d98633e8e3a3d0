"""CIFAR-10, in the files that torchvision reads and writes: ROOT/cifar-10-batches-py."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import fileio
from trainkit.data.base import DataInfo, Splits, missing, require, size_left, stratified_split
from trainkit.data.download import Say, complete_folder, extract, opened_tar, regular, require_names, verified
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor


# Pickled arrays without the danger of pickles.
#
# CIFAR-10 comes as pickle files, and unpickling a file that a stranger wrote runs the stranger's code. This reader
# knows dicts, lists, text, bytes, numbers and numpy arrays of numbers; it rebuilds the arrays itself from their
# bytes, and anything else in the file is an error. So a data set of one's own in CIFAR's format is as safe to read as
# the official.


def load(path: Path) -> Any:
    """What ``path`` holds, with numpy arrays in place of pickled arrays; keys that are bytes become text.

    Raises UserError where the file is missing, broken, or holds anything but plain values.
    """
    try:
        value = _PlainUnpickler(io.BytesIO(fileio.read_bytes(path, 1 << 30, follow=True)), encoding="bytes").load()
        return _plain(value)
    except OSError as error:
        raise UserError(f"Cannot read {path}.", why=str(error), fix="Check the path and its permissions.") from None
    except Exception as error:  # a broken pickle may raise anything
        raise UserError(
            f"{path} is no file of plain arrays.",
            why=f"{error}" if isinstance(error, pickle.UnpicklingError) else f"It is damaged ({type(error).__name__}).",
            fix="Delete it and fetch the data set again.",
        ) from None


class _Dtype:
    """Stands in for numpy.dtype while a pickle is read."""

    def __init__(self, code: Any, align: object = False, copy: object = False) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else str(code)
        if self.code[:1] not in "uifb" or not re.fullmatch("[0-9]{1,2}", self.code[1:]):
            raise pickle.UnpicklingError(f"It holds an array of '{self.code}', which is not a number.")
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.order = order.decode("ascii") if isinstance(order, bytes) else str(order)


class _Array:
    """Stands in for numpy.ndarray while a pickle is read."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def rebuild(self) -> numpy.ndarray[Any, Any]:
        import numpy

        _, shape, dtype, fortran, data = self.state
        if isinstance(data, str):
            data = data.encode("latin1")  # how Python 3 keeps bytes in the old protocols
        kind = numpy.dtype(dtype.code).newbyteorder(dtype.order if dtype.order in "<>" else "=")
        flat = numpy.frombuffer(bytearray(data), dtype=kind)
        array: numpy.ndarray[Any, Any] = flat.reshape(shape, order="F" if fortran else "C")
        return array


def _reconstruct(subtype: object, shape: object, kind: object) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"It holds text in the encoding {encoding!r}.")
    return text if isinstance(text, bytes) else str(text).encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    _known = {  # noqa: RUF012  never changed
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"It wants to run '{module}.{name}', which plain data does not.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.rebuild()
    if isinstance(value, dict):
        return {key.decode() if isinstance(key, bytes) else key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


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
    from trainkit.data.loader import TensorSamples, tensor_transforms

    locate(root, image_size=image_size, val_fraction=val_fraction)
    folder = root / FOLDER
    names = load(folder / "batches.meta").get("label_names", [])
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
        batch = load(folder / file)
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
