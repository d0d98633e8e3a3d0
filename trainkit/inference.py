"""Evaluate a checkpoint, or predict with it, in one process."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import DataInfo, Transform
from trainkit.data.folders import SUFFIXES, CenterCrop, read_image
from trainkit.data.loader import TensorTransform, default_workers, eval_batches
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.fileio import write
from trainkit.ranks import RankEnv
from trainkit.run.folder import RunDir
from trainkit.tasks.base import classes_in, difference, require_same_classes
from trainkit.training.build import TrainState, alone, build, wants_gpu
from trainkit.training.recorder import STEMS, Measured, measure_saved, too_many

Kind = Literal["raw", "ema"]
_SPEED_SECONDS, _SPEED_PASSES = 0.5, 3
"""Duration and number of timings of a batch size."""


@contextmanager
def _opened(
    config: Config, run_dir: RunDir, which: str, kind: str | None, *, same_classes: bool
) -> Iterator[tuple[int, Checkpoints, bool, TrainState]]:
    """Find a checkpoint and build the model and data for it in this process.

    Gives its step, the run's checkpoints, whether it has averaged weights, and what was built.

    Raises UserError: no such checkpoint; it lacks the averaged weights that ``kind`` asks for; with ``same_classes``,
    the data has other classes than in training.
    """
    step = format.resolve(run_dir.checkpoints, which)
    splits = build_data(config.data)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
        record = checkpoints.described(step)
        if same_classes:
            require_same_classes(record.state, splits, config.data.root)
        has_average = STEMS["ema"] in record.stems
        if kind in ("ema", "both") and not has_average:
            raise UserError(
                f"The checkpoint of step {step} has no averaged weights.",
                why="The run, or this part of it, was trained with train.ema_decay=null.",
                fix="Leave --weights out.",
            )
        yield step, checkpoints, has_average, build(alone(config), dist, splits)


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of which step's weights, on what data."""

    step: int
    found: Measured
    info: DataInfo
    which: str
    """What was asked for: ``best``, ``latest`` or a step; ``newest`` where that one was taken in its place."""


def evaluate_checkpoint(
    config: Config, run_dir: RunDir, which: str, split: str, weights: Literal["raw", "ema", "both"] | None = None
) -> Evaluation:
    """Measure a checkpoint (``best``, ``latest`` or a step) of a run on ``split``, in this process.

    A checkpoint is the same whatever trained it: one process evaluates a model that many nodes trained with FSDP.
    If ``best`` or ``latest`` is broken, the newest whole one is used, with a message. The worst mistakes of ``best``
    are stored for the report (``mistakes-<split>.json``) unless training has stored some.

    Args:
        weights: the model's own, the averaged ones or both; None: all that there are.

    Raises:
        UserError: as `_opened`, or the checkpoint is broken.
    """
    batch_size = min(config.train.global_batch_size, 256)
    with _opened(config, run_dir, which, weights, same_classes=True) as (step, checkpoints, has_average, parts):
        kinds = [kind for kind in STEMS if weights in (None, "both", kind) and (kind == "raw" or has_average)]
        samples, or_newest = getattr(parts.splits, split), which in ("best", "latest")
        step, found = measure_saved(
            parts, checkpoints, step, samples, kinds=kinds, batch_size=batch_size, or_newest=or_newest, confusion=True
        )
        if or_newest and format.pointed(run_dir.checkpoints, which) != step:
            which = "newest"
        is_shown = which == "best" and split != "train" and "raw" in found.mistakes
        if is_shown and not run_dir.mistakes(split).exists():
            images = found.mistakes["raw"].read()
            shown = json.dumps({"split": split, "step": step, "images": images})
            with suppress(OSError):  # it may be another user's run
                write(run_dir.mistakes(split), shown + "\n", run_dir.path)
    left_out = sorted(parts.broken.met)
    if len(left_out) > parts.broken.most:
        raise too_many(left_out, parts.broken.most)
    if left_out:
        print(f"Left out, for they cannot be decoded: {', '.join(left_out)}", file=sys.stderr)
    return Evaluation(step, found, parts.splits.info, which)


@dataclass(frozen=True)
class Prediction:
    """The model's output for one image."""

    file: Path
    values: Tensor | None
    """float32 [num_classes] on the CPU: `Task.probabilities`, else the model's outputs. None: the image has none."""
    why: str = ""
    """Why not: what is wrong with the image, or with the model's outputs for it."""


@dataclass(frozen=True)
class Predictor:
    """A checkpoint's weights in a model that is ready to predict."""

    step: int
    kind: Kind
    parts: TrainState
    transform: Transform
    class_names: tuple[str, ...]
    """Of the model's outputs, in order: as in training, where the checkpoint says so, else as in the data."""
    renamed: str
    """How the data's classes differ from them; empty if they do not."""

    @property
    def tells_classes(self) -> bool:
        """Whether its outputs are probabilities of classes."""
        return self.parts.task.has("probabilities")

    def predict(self, images: Sequence[Path], batch_size: int) -> Iterator[Prediction]:
        """Predictions in the given order. A broken image does not stop the others."""
        samples = _Unlabelled(images, self.parts.splits.info.in_chans)
        workers = default_workers() if len(images) > batch_size else 0
        batch_size, device = min(batch_size, len(images)), self.parts.dist.device
        loader = eval_batches(
            samples, self.transform, batch_size=batch_size, rank=0, world_size=1, workers=workers, device=device
        )
        files = iter(images)
        with loader as batches, torch.inference_mode():
            for pixels, is_whole, mask in batches:
                told = self._values(pixels).cpu()[mask.cpu()]
                for values, whole, file in zip(told, is_whole[mask].tolist(), files, strict=False):
                    if not whole:
                        yield Prediction(file, None, samples.why(file))
                    elif not bool(values.isfinite().all()):
                        yield Prediction(file, None, "The model's scores of it are not finite (NaN).")
                    else:
                        yield Prediction(file, values)

    def images_per_sec(self, image: Path, batch_size: int) -> float:
        """Speed of the model alone on data that is on its device: the median of three half seconds.

        Raises torch.OutOfMemoryError if the batch does not fit.
        """
        device = self.parts.dist.device
        pixels = self.transform(read_image(image, self.parts.splits.info.in_chans))
        batch = pixels[None].expand(batch_size, -1, -1, -1).contiguous().to(device)
        speeds = []
        with torch.inference_mode():
            for _ in range(2):  # warm-up
                self._values(batch).cpu()  # which waits for a GPU
            for _ in range(_SPEED_PASSES):
                began, done = time.perf_counter(), 0
                while (seconds := time.perf_counter() - began) < _SPEED_SECONDS:
                    self._values(batch).cpu()
                    done += batch_size
                speeds.append(done / seconds)
        return median(speeds)

    def _values(self, pixels: Tensor) -> Tensor:
        with self.parts.precision.autocast():
            output: Tensor = self.parts.model(self.parts.normalized(pixels))
        return self.parts.task.probabilities(output.float()) if self.tells_classes else output.float()


@contextmanager
def predicting(config: Config, run_dir: RunDir, which: str, kind: Kind | None = None) -> Iterator[Predictor]:
    """Load the weights of a checkpoint (``best``, ``latest`` or a step) in this process.

    Args:
        kind: the model's own weights, or the averaged ones; None: the averaged ones, if there are any.

    Raises:
        UserError: as `_opened`, or the checkpoint is broken.
    """
    with _opened(config, run_dir, which, kind, same_classes=False) as (step, checkpoints, has_average, parts):
        taken: Kind = kind or ("ema" if has_average else "raw")
        info, transform = parts.splits.info, parts.splits.eval_transform
        here, trained = tuple(map(str, info.class_names)), classes_in(checkpoints.described(step).state)
        step = checkpoints.load_weights(parts.model, step, or_newest=which in ("best", "latest"), stem=STEMS[taken])
        parts.model.eval()
        if isinstance(transform, TensorTransform):  # made for images of one size: it resizes all of them
            transform = CenterCrop(info.image_size, info.image_size, "bilinear")
        yield Predictor(step, taken, parts, transform, trained or here, difference(trained, here))


def images_in(folder: Path) -> list[Path]:
    """All image files below a folder, by name; or the file itself. Raises UserError if there are none."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", why="It was to hold the images.", fix="Correct its path.")
    found = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    images = sorted(file for file in found if file.suffix.lower() in SUFFIXES)
    if not images:
        why = f"Image files end in {', '.join(SUFFIXES[:6])}, ..."
        raise UserError(f"{folder} holds no images.", why=why, fix="Give a folder that holds some, at any depth.")
    return images


class _Unlabelled:
    """Images as samples with label 1; a broken one is replaced by a black image with label 0."""

    def __init__(self, images: Sequence[Path], in_chans: int) -> None:
        self.images, self.in_chans = images, in_chans

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        try:
            return read_image(self.images[index], self.in_chans), 1
        except UserError:
            return torch.zeros(self.in_chans, 8, 8, dtype=torch.uint8), 0

    def why(self, file: Path) -> str:
        """Why an image is broken. It is read again, as a worker process found it."""
        try:
            read_image(file, self.in_chans)
        except UserError as error:
            return error.why
        return "It could not be read at first."
