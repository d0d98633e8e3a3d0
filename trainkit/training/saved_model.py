"""A saved model: what its checkpoint says of the images that it takes, and the module that predicts.

Neither training nor its data are needed, but by checkpoints that do not say what images they take: older ones, and
those of data sets with transforms of their own.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.config.schema import Config
from trainkit.data import decoding, image_kinds
from trainkit.data.base import Splits, Transform, normalize
from trainkit.data.decoding import read_image
from trainkit.data.image_kinds import LeftOut
from trainkit.data.loader import Loading, default_workers, eval_batches
from trainkit.data.photo_transforms import CenterCrop
from trainkit.data.registry import build_data
from trainkit.data.tensors import TensorTransform
from trainkit.distributed.process_group import Distributed
from trainkit.models.library import build_model, expected_input
from trainkit.run.folder import RunDir
from trainkit.training.tasks.base import Task, build_task, classes_in, difference, told_classes

WeightKind = Literal["raw", "ema"]
STEMS = {"raw": "model", "ema": "ema"}
"""Kind of weights, the model's own or their average -> the stem of its file in a checkpoint."""

_KEY = "input"
"""Key of a checkpoint's state for the facts below, beside the names of the classes."""
_CPU = torch.device("cpu")
_LARGEST = 1 << 14
"""Pixels of a side, channels: of more a stranger's checkpoint could ask for all memory."""
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


def told_input(splits: Splits) -> dict[str, Any]:
    """For the state of a checkpoint: its classes, and how images are prepared for the model.

    ``resize`` is the length of the shorter side in pixels, ``crop`` that of the square which is then cut out of the
    middle. Only the classes of a data set with transforms of its own, which nobody else can make; nothing of a peer
    that has no data.
    """
    info = splits.info
    transform = _of_any_size(splits)
    told = dict[str, Any](told_classes(splits))
    if isinstance(transform, CenterCrop) and told:
        told[_KEY] = {
            "data": info.name, "outputs": info.num_classes, "in_chans": info.in_chans, "image_size": info.image_size,
            "mean": [*map(float, info.mean)], "std": [*map(float, info.std)],
            "resize": transform.shorter, "crop": transform.image_size, "interpolation": transform.mode,
        }  # fmt: skip
        if info.exif:
            told[_KEY]["exif"] = True
    return told


def input_in(state: Mapping[str, Any]) -> tuple[DataInfo, CenterCrop] | None:
    """Read what a checkpoint says of its input; None where it does not, or says what cannot be: anybody may edit it.

    Older checkpoints name their classes at most.
    """
    told = state.get(_KEY)
    classes = classes_in(state)
    if not isinstance(told, dict) or classes is None:
        return None
    try:
        outputs = told["outputs"]
        in_chans = told["in_chans"]
        size = told["image_size"]
        mean = tuple(map(float, told["mean"]))
        std = tuple(map(float, told["std"]))
        crop = CenterCrop(told["crop"], told["resize"], told["interpolation"])
        sizes = (in_chans, size, crop.image_size, crop.shorter)
        is_sound = all(type(value) is int and 0 < value <= _LARGEST for value in sizes)
        is_sound &= type(outputs) is int and outputs > 0 and len(classes) in (0, outputs) and crop.mode in _MODES
        is_sound &= len(mean) == len(std) == in_chans and all(map(math.isfinite, mean + std)) and min(std) > 0
        info = DataInfo(str(told["data"]), outputs, in_chans, size, classes, mean, std, told.get("exif") is True)
        if is_sound:
            return info, crop
    except (KeyError, TypeError, ValueError):
        pass
    return None


def _of_any_size(splits: Splits) -> Transform:
    """The transform of evaluation. One that is made for images of one size takes the middle of others."""
    size = splits.info.image_size
    transform = splits.eval_transform
    if isinstance(transform, TensorTransform):
        return CenterCrop(size, size, "bilinear")
    return transform


@dataclass(frozen=True)
class Prediction:
    """The model's output for one image."""

    image: Any
    """The image as it was given: a file, or a picture."""
    values: Tensor | None
    """float32 [num_classes] on the CPU: `Task.probabilities`, else the model's outputs. None: the image has none."""
    classes: tuple[str, ...]
    """Names of the values, in order."""
    why: str = ""
    """Why it has none: what is wrong with the image, or with the model's outputs for it."""

    @property
    def label(self) -> str | None:
        """The class with the highest value; None where there is none."""
        if self.values is None or not self.classes:
            return None
        return self.classes[int(self.values.argmax())]

    @property
    def probability(self) -> float | None:
        """Probability of that class."""
        return None if self.values is None else float(self.values.max())

    def __repr__(self) -> str:
        if self.values is None:
            return f"<none: {self.why}>"
        return f"<{self.label}: {self.probability:.4f}>"


@dataclass(frozen=True)
class SavedModel:
    """The weights of a checkpoint in a module that is ready to predict."""

    module: nn.Module
    """Plain, as its library makes it, in eval mode: normalised images, float32 [N, C, H, W] -> scores [N, outputs]."""
    splits: Splits
    """Without samples where the data was not asked; its classes are those of training."""
    config: Config
    step: int
    kind: WeightKind
    renamed: str = ""
    """Difference of the data's classes from those of training; empty if there is none, or nobody looked."""
    device: torch.device = _CPU
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @cached_property
    def task(self) -> Task:
        """The task of training, but for the weights of classes, which only data can tell."""
        return build_task(without_class_weights(self.config), self.splits)

    @property
    def info(self) -> DataInfo:
        """Facts on the images that the module takes, and its classes."""
        return self.splits.info

    @property
    def crop(self) -> Transform:
        """A whole image, uint8 [C, H, W] -> uint8 [C, image_size, image_size]."""
        return self.splits.eval_transform

    @property
    def tells_classes(self) -> bool:
        """Return whether its outputs are probabilities of classes."""
        return self.task.has("probabilities")

    def transform(self, image: Any) -> Tensor:
        """An image as the module takes it: float32 [C, image_size, image_size], normalised.

        Args:
            image: a file, a picture of Pillow's, or an array or tensor, uint8 [H, W, C] or [H, W].
        """
        return normalize(self.crop(_pixels(image, self.info))[None], self.info)[0]

    def predict(self, images: Sequence[Any], batch_size: int = 64) -> Iterator[Prediction]:
        """Predictions in the given order. A broken image does not stop the others.

        Args:
            images: as `transform` takes them.
        """
        if not images:
            return
        samples = _Unlabelled(images, self.info)
        workers = default_workers() if len(images) > batch_size else 0
        loading = Loading(workers=workers, device=self.device)
        loader = eval_batches(samples, self.crop, loading, batch_size=min(batch_size, len(images)))
        given = iter(images)
        with loader as batches, torch.inference_mode():
            for pixels, is_whole, mask in batches:
                told = self.values(pixels).cpu()[mask.cpu()]
                for values, whole, image in zip(told, is_whole[mask].tolist(), given, strict=False):
                    why = ""
                    if not whole:
                        why = samples.why(image)
                    elif not bool(values.isfinite().all()):
                        why = "The model's scores for it are not finite (NaN)."
                    yield Prediction(image, None if why else values, self.info.class_names, why)

    def values(self, pixels: Tensor) -> Tensor:
        """Return probabilities, else outputs, float32, of uint8 [N, C, image_size, image_size] on its device."""
        with self.autocast():
            images = normalize(pixels, self.info, channels_last=self.config.train.channels_last)
            output: Tensor = self.module(images)
        if self.tells_classes:
            return self.task.probabilities(output.float())
        return output.float()


def open_saved(
    config: Config, run_dir: RunDir, which: str = "best", kind: WeightKind | None = None, *, by_data: bool = False
) -> SavedModel:
    """The weights of a checkpoint (``best``, ``latest`` or a step) in their model, on the CPU.

    If ``best`` or ``latest`` is broken, the newest whole one is used, with a message.

    Args:
        kind: the model's own weights, or the averaged ones; None: the averaged ones, if there are any.
        by_data: ask the data of ``config`` for the images, whatever the checkpoint says of them.

    Raises:
        UserError: no such checkpoint; it is broken; it lacks the averaged weights that ``kind`` asks for; it does not
            say what images it takes, and the data is not there to be asked.
    """
    step = format.resolve(run_dir.checkpoints, which)
    checkpoints = Checkpoints(run_dir.checkpoints, keep=1, dist=Distributed(RankEnv.single(), _CPU))
    has_average = require_kind(step, checkpoints, kind)
    taken: WeightKind = kind or "raw"
    if kind is None and has_average:
        taken = "ema"
    found = None
    if not by_data:
        for at in (step, *reversed(format.steps(run_dir.checkpoints))):  # one that is broken says nothing
            found = found or input_in(checkpoints.manifest_of(at).state)
    renamed = ""
    if found is not None:
        splits = Splits(found[0], (), (), (), found[1], found[1])
        module = build_model(config.model, splits.info, config.seed, pretrained=False)
    else:
        splits = build_data(config.data)
        module = build_model(config.model, splits.info, config.seed)
        splits = splits.prepared_for(expected_input(config.model, module, splits.info))
        here = tuple(map(str, splits.info.class_names))
        trained = classes_in(checkpoints.manifest_of(step).state)
        renamed = difference(trained, here)
        info = replace(splits.info, class_names=trained or here)
        splits = replace(splits, info=info, eval_transform=_of_any_size(splits))
    step = checkpoints.load_weights(module, step, or_newest=which in ("best", "latest"), stem=STEMS[taken])
    return SavedModel(module.eval(), splits, config, step, taken, renamed)


def without_class_weights(config: Config) -> Config:
    """For other data than it was trained on, or none."""
    return config.model_copy(update={"train": config.train.model_copy(update={"class_weights": None})})


def require_kind(step: int, checkpoints: Checkpoints, kind: str | None) -> bool:
    """Return whether a checkpoint has averaged weights. Raises UserError where ``kind`` asks for missing ones."""
    has_average = STEMS["ema"] in checkpoints.manifest_of(step).stems
    if kind in ("ema", "both") and not has_average:
        what = f"The checkpoint of step {step} has no averaged weights."
        why = "The run, or this part of it, was trained with train.ema_decay=null."
        raise UserError(what, why=why, fix="Omit --weights.")
    return has_average


def images_in(folder: Path) -> tuple[list[Path], LeftOut]:
    """All files below a folder that may be images, by name, and what is none of them by its name; or the file itself.

    A file whose name does not tell is among them, and gets a prediction or the reason why not.

    Raises UserError if there are none.
    """
    if folder.is_file():
        return [folder], {}
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", why="It should contain the images.", fix="Correct the path.")
    found: list[Path] = []
    left_out: dict[str, tuple[int, str]] = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            why = image_kinds.why_not(name)
            if why:
                count, example = left_out.get(why, (0, f"{where}/{name}"))
                left_out[why] = (count + 1, example)
            else:
                found.append(Path(where, name))
    if not found:
        why = "It is empty."
        if left_out:
            why = f"It has: {image_kinds.left_out_in_words(left_out, folder)}."
        raise UserError(f"{folder} holds no images.", why=why, fix="Give a folder with images, at any depth.")
    return sorted(found), left_out


def _pixels(image: Any, info: DataInfo) -> Tensor:
    """uint8 [in_chans, H, W] of a file, a picture or an array. Raises UserError for what is none of these."""
    in_chans = info.in_chans
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), in_chans, exif=info.exif)
    import numpy
    from PIL import Image

    picture = image
    exif = info.exif
    if not isinstance(image, Image.Image):
        array = numpy.asarray(image)
        if array.dtype != numpy.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,), (4,)):
            why = "An image is uint8 [H, W] or [H, W, 1, 3 or 4], as Pillow, OpenCV and imageio have it."
            fix = "Give `tensor.permute(1, 2, 0)` of [C, H, W], and pixels of 0 to 255 as uint8; or a file."
            raise UserError(f"An array of {array.dtype} {list(array.shape)} is not an image.", why=why, fix=fix)
        if array.shape[2:] == (1,):
            array = array[..., 0]
        picture = Image.fromarray(array)
    return torch.from_numpy(decoding.pixels_of(picture, in_chans, exif=exif)).permute(2, 0, 1)


class _Unlabelled:
    """Images as samples with label 1; a broken one is replaced by a black image with label 0."""

    def __init__(self, images: Sequence[Any], info: DataInfo) -> None:
        self.images = images
        self.info = info

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        try:
            return _pixels(self.images[index], self.info), 1
        except UserError:
            return torch.zeros(self.info.in_chans, 8, 8, dtype=torch.uint8), 0

    def why(self, image: Any) -> str:
        """Why an image is broken. It is read again, as a worker process found it."""
        try:
            _pixels(image, self.info)
        except UserError as error:
            return error.why
        return "The first attempt to read it failed."
