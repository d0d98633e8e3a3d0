"""Evaluate a checkpoint, or predict with it, in one process."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import DataInfo, Splits
from trainkit.data.folders import Files, images_of, read_image
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.features import probed
from trainkit.fileio import write
from trainkit.ranks import RankEnv
from trainkit.run.folder import RunDir
from trainkit.saved_model import STEMS, Kind, SavedModel, open_saved, require_kind, without_class_weights
from trainkit.tasks.base import require_same_classes
from trainkit.terminal import one_line
from trainkit.training.build import alone, build, to_device, use_process, wants_gpu
from trainkit.training.precision import Precision, choose_precision
from trainkit.training.recorder import Measured, measure_saved, too_many

_SPEED_SECONDS, _SPEED_PASSES = 0.5, 3
"""Duration and number of timings of a batch size."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of which step's weights, on what data."""

    step: int
    found: Measured
    info: DataInfo
    which: str
    """What was asked for: ``best``, ``latest`` or a step; ``newest`` where that one was taken in its place."""


def evaluate_checkpoint(
    config: Config,
    run_dir: RunDir,
    which: str,
    split: str,
    weights: Literal["raw", "ema", "both"] | None = None,
    folder: Path | None = None,
    probes: Sequence[str] = (),
) -> Evaluation:
    """Measure a checkpoint (``best``, ``latest`` or a step) of a run on ``split``, in this process.

    A checkpoint is the same whatever trained it: one process evaluates a model that many nodes trained with FSDP.
    If ``best`` or ``latest`` is broken, the newest whole one is used, with a message. The worst mistakes of ``best``
    are stored for the report (``mistakes-<split>.json``) unless training has stored some.

    Args:
        weights: the model's own, the averaged ones or both; None: all that there are.
        folder: measure on images in folders that are called as the classes, in place of the run's data.
        probes: names of `probed`: classify by the features of the run's training split, too.

    Raises:
        UserError: no such checkpoint; it is broken; it lacks the averaged weights that ``weights`` asks for; the data
            has other classes than in training; the features cannot be probed.
    """
    if probes:
        if split == "train":
            why = "Each of its images would be its own nearest neighbour."
            raise UserError("Features are not tested on the training split.", why=why, fix="Give --split val or test.")
        # Not compiled, for hooks look into the model.
        config = config.model_copy(update={"train": config.train.model_copy(update={"compile": "off"})})
    batch_size = min(config.train.global_batch_size, 256)
    step = format.resolve(run_dir.checkpoints, which)
    saved = None if folder is None else open_saved(config, run_dir, which)
    splits = build_data(config.data) if folder is None or saved is None else _labelled(saved, folder)
    if saved is not None:
        config = without_class_weights(config)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
        require_same_classes(checkpoints.described(step).state, splits, config.data.root)
        if saved is not None and probes:
            known = build_data(config.data)
            require_same_classes(checkpoints.described(step).state, known, config.data.root)
            splits = replace(splits, train=known.train)
        has_average = require_kind(step, checkpoints, weights)
        parts = build(alone(config), dist, splits, model=None if saved is None else saved.module)
        kinds = [kind for kind in STEMS if weights in (None, "both", kind) and (kind == "raw" or has_average)]
        samples, or_newest = getattr(parts.splits, split), which in ("best", "latest")
        told = dict[str, float]()
        for kind in kinds if probes else ():
            step = checkpoints.load_weights(parts.model, step, or_newest=or_newest, stem=STEMS[kind])
            values = probed(parts, samples, probes, batch_size)
            told |= {f"{'ema_' if kind == 'ema' else ''}{name}": value for name, value in values.items()}
        step, found = measure_saved(
            parts, checkpoints, step, samples, kinds=kinds, batch_size=batch_size, or_newest=or_newest, confusion=True
        )
        found.metrics.update(told)
        if or_newest and format.pointed(run_dir.checkpoints, which) != step:
            which = "newest"
        is_shown = folder is None and which == "best" and split != "train" and "raw" in found.mistakes
        if is_shown and not run_dir.mistakes(split).exists():
            shown = json.dumps({"split": split, "step": step, "images": found.mistakes["raw"].read()})
            with suppress(OSError):  # it may be another user's run
                write(run_dir.mistakes(split), shown + "\n", run_dir.path)
    if len(left_out := sorted(parts.broken.met)) > parts.broken.most:
        raise too_many(left_out, parts.broken.most)
    if left_out:
        print(f"Left out, for they cannot be decoded: {', '.join(left_out)}", file=sys.stderr)
    return Evaluation(step, found, parts.splits.info, which)


def _labelled(saved: SavedModel, folder: Path) -> Splits:
    """The images of a folder, each split alike, with the labels that its folders' names are in training.

    Raises UserError where these are no classes of the model, and where there are no images.
    """
    classes, files = saved.info.class_names, Files.walk(folder, ("",))
    unknown = sorted(files.splits[""].keys() - set(classes))
    files.exif = saved.info.exif
    samples = images_of(files, "", classes, saved.info.in_chans)
    if not saved.task.has("taken_for") or unknown or not len(samples):
        why = f"'{one_line(unknown[0])}' is none of them" if unknown else "It holds no folder of a class with images"
        if not saved.task.has("taken_for"):
            why = f"The task {saved.config.task.name} does not take an image for one class"
        known = ", ".join(map(one_line, classes[:8])) + (" ..." if len(classes) > 8 else "")
        fix = "Put the images into FOLDER/CLASS/NAME.jpg, and call the folders as the classes of training."
        raise UserError(f"{folder} cannot be evaluated on.", why=f"{why}: {known}.", fix=fix)
    return replace(saved.splits, train=samples, val=samples, test=samples, in_memory=False)


@contextmanager
def predicting(
    config: Config, run_dir: RunDir, which: str, kind: Kind | None = None, *, by_data: bool = False
) -> Iterator[SavedModel]:
    """The weights of a checkpoint (``best``, ``latest`` or a step) on this process's device, in the precision that
    training would choose there.

    Takes and raises what `open_saved` does.
    """
    saved = open_saved(config, run_dir, which, kind, by_data=by_data)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        use_process(config, dist.device)
        name = choose_precision(config.train.precision, dist.device)
        precision = Precision("fp16" if name == "o2" else name, dist)
        module = to_device(saved.module, config, dist.device)
        yield replace(saved, module=module, device=dist.device, autocast=precision.autocast)


def images_per_sec(saved: SavedModel, image: Path, batch_size: int) -> float:
    """Speed of the model alone on data that is on its device: the median of three half seconds.

    Raises torch.OutOfMemoryError if the batch does not fit.
    """
    pixels = saved.crop(read_image(image, saved.info.in_chans, exif=saved.info.exif))
    batch = pixels[None].expand(batch_size, -1, -1, -1).contiguous().to(saved.device)
    speeds = []
    with torch.inference_mode():
        for _ in range(2):  # warm-up
            saved.values(batch).cpu()  # which waits for a GPU
        for _ in range(_SPEED_PASSES):
            began, done = time.perf_counter(), 0
            while (seconds := time.perf_counter() - began) < _SPEED_SECONDS:
                saved.values(batch).cpu()
                done += batch_size
            speeds.append(done / seconds)
    return median(speeds)
