"""The data sets that torchvision knows by name, in the files that it fetches and reads."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.common import terminal
from trainkit.common.errors import UserError, unknown
from trainkit.common.image_input import DataInfo
from trainkit.config import plugins
from trainkit.data.base import Splits
from trainkit.data.decoding import pixels_of
from trainkit.data.download import Say
from trainkit.data.order import stratified_split
from trainkit.data.photo_transforms import Photos, photo_splits

if TYPE_CHECKING:
    from torch import Tensor

_OF_SPLIT = {"train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",)}
"""Split -> its names in the classes of torchvision, the first that one has."""
_LABELS = ("targets", "_labels", "labels", "y")
"""Attributes of these classes with the labels of all images."""
_SIGNS = ("MNIST", "KMNIST", "QMNIST", "USPS", "SVHN", "SEMEION", "Omniglot", "GTSRB", "RenderedSST2")
"""Classes of digits, letters and signs, which mean something else, or nothing, in a mirror."""
_MOST_BYTES = 1 << 30


def build(
    root: Path, *, dataset: str, image_size: int | None = None, in_chans: Literal[1, 3] = 3, augment: bool = True,
    val_fraction: float = 0.15, test_fraction: float = 0.15,
) -> Splits:  # fmt: skip
    """Use its own splits. Without val, some training images are held out; without test, val is also the test split; a
    data set without splits is split three ways. Small images are shifted by an eighth and, but for digits and signs,
    mirrored; photos cut out.

    ``dataset``: a class of torchvision.datasets, such as CIFAR100. ``image_size``: side of the images in pixels; null:
    that of the images if all have one size, else 224.
    """
    import torch

    from trainkit.data.tensors import TensorSamples, tensor_splits

    found: dict[str, _Pictures] = {}
    for split in _OF_SPLIT:
        source = _opened(dataset, root, split)
        if source is not None:
            found[split] = _Pictures(dataset, source, in_chans, range(len(source)))
    train = found["train"]
    if "val" not in found:
        fractions = (val_fraction,) if "test" in found else (val_fraction, test_fraction)
        cut = map(train.part, stratified_split(train.labels, fractions))
        found |= zip(_OF_SPLIT, cut, strict=False)
    parts = [found["train"], found["val"], found.get("test", found["val"])]
    named = getattr(train.source, "classes", None) or [f"class {label}" for label in range(max(train.labels) + 1)]
    classes = [" ".join(name) if isinstance(name, tuple) else str(name) for name in named]
    channels, height, width = parts[0][0][0].shape
    title = f"torchvision {dataset}"
    is_small = hasattr(train.source, "data") and height == width  # it holds all of them as arrays
    if not is_small or sum(map(len, parts)) * channels * height * width > _MOST_BYTES:
        photos = Photos(image_size=image_size or 224, in_chans=in_chans, augment=augment)
        return photo_splits(title, classes, parts, photos)
    in_memory: list[TensorSamples] = []
    for part in parts:
        images = torch.stack([part[index][0] for index in range(len(part))])
        in_memory.append(TensorSamples(images, torch.tensor(part.labels)))
    levels = in_memory[0].images.transpose(0, 1).flatten(1).float() / 255
    mean = tuple(levels.mean(1).tolist())
    std = tuple(levels.std(1).clamp_min(0.01).tolist())
    info = DataInfo(title, len(classes), in_chans, image_size or width, tuple(classes), mean, std)
    return tensor_splits(info, in_memory, augment=augment, shift=width // 8, flip=dataset not in _SIGNS)


def locate(root: Path, *, dataset: str, **options: Any) -> None:
    """Check the name. Whether its files are there, only torchvision can tell."""
    known = names()
    if dataset not in known:
        raise unknown("class of torchvision.datasets", dataset, known, key="data.dataset")


def prepare(root: Path, archives: list[Path], say: Say, *, dataset: str, **options: Any) -> None:
    """Have torchvision download, verify and unpack all splits."""
    locate(root, dataset=dataset)
    for split in _OF_SPLIT:
        say(f"torchvision looks for {dataset} ({split}) in {root}")
        _opened(dataset, root, split, download=True)


def names() -> list[str]:
    """The classes of torchvision.datasets, without importing it."""
    (folder,) = importlib.util.find_spec("torchvision").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = plugins.parse(Path(folder, "datasets", "__init__.py"), None)
    listed: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    return sorted(name for name in listed if name[0].isupper())


def _opened(dataset: str, root: Path, split: str, *, download: bool = False) -> Any:
    """The data set of a split; None where it has no such split.

    Raises UserError where it is not there, cannot be had, or is asked for more than a folder.
    """
    import torchvision

    kind = getattr(torchvision.datasets, dataset)
    takes = inspect.signature(kind).parameters
    own = [name for name, it in takes.items() if it.default is it.empty and it.kind is it.POSITIONAL_OR_KEYWORD]
    if own != ["root"]:
        why = f"torchvision's {dataset} takes {', '.join(own)}."
        fix = "Choose one that needs only a folder, or write your own function around it: docs/own.md."
        raise UserError(f"data.dataset={dataset} is not possible.", why=why, fix=fix, key="data.dataset")
    given = {"download": download} if "download" in takes else {}
    choices: list[dict[str, Any]] = [{}] if split == "train" else []
    if "train" in takes:
        choices = [] if split == "val" else [{"train": split == "train"}]
    elif "split" in takes:
        choices = [{"split": name} for name in _OF_SPLIT[split]]
    for choice in choices:
        try:
            return kind(str(root), **choice, **given)
        except ValueError:  # it has no split of that name
            continue
        except (RuntimeError, OSError) as error:
            what = f"The data set '{dataset}' is not in {root}."
            fix = terminal.command("prepare", "torchvision", f"data.dataset={dataset}", "--root", root)
            if download:
                what = f"torchvision could not fetch {dataset}."
                fix = f"Run the same command on a machine with internet, and copy {root}."
            raise UserError(what, why=terminal.one_line(error, 300), fix=fix, key="data.dataset") from None
    return None


def _labels_of(dataset: str, source: Any) -> list[int]:
    """The label of each image of a data set. Raises UserError where an image has no class, or several."""
    labels: Any = [pair[1] for pair in getattr(source, "_samples", None) or getattr(source, "samples", None) or ()]
    for name in reversed(_LABELS):
        labels = getattr(source, name, labels)
    if hasattr(labels, "tolist"):
        labels = labels.tolist()
    if not labels or not isinstance(labels, list) or not all(type(label) is int and label >= 0 for label in labels):
        why = "torchvision does not give one class for each of its images."
        fix = "Choose one for classification, or write your own function around it: docs/own.md."
        raise UserError(f"data.dataset={dataset} cannot be used for training.", why=why, fix=fix, key="data.dataset")
    return labels


class _Pictures:
    """Some images of a data set of torchvision's. Sample -> uint8 [in_chans, H, W], class."""

    def __init__(self, dataset: str, source: Any, in_chans: int, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.source = source
        self.in_chans = in_chans
        self.indices = indices
        known = _labels_of(dataset, source)
        self.labels = [known[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        import torch

        picture, _ = self.source[self.indices[index]]
        return torch.from_numpy(pixels_of(picture, self.in_chans)).permute(2, 0, 1), self.labels[index]

    def part(self, indices: Sequence[int]) -> _Pictures:
        """Select some of them."""
        return _Pictures(self.dataset, self.source, self.in_chans, indices)
