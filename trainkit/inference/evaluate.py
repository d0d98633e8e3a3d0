"""Evaluate a checkpoint in one process."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.common.fileio import write
from trainkit.common.image_input import DataInfo
from trainkit.common.terminal import one_line, warn
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.image_files import Files, images_of
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import distributed
from trainkit.inference.probes import probed
from trainkit.run.folder import RunDir
from trainkit.training.evaluation import EvaluationPass, Measured, measure_saved
from trainkit.training.placement import wants_gpu
from trainkit.training.recorder import too_many
from trainkit.training.saved_model import STEMS, SavedModel, input_in, open_saved, require_kind, without_class_weights
from trainkit.training.tasks.base import build_task, require_same_classes
from trainkit.training.tasks.meter import MOST_CLASSES
from trainkit.training.train_state import alone, build


@dataclass(frozen=True)
class Evaluation:
    """Measurements of one step's weights, and the data that they were made on."""

    step: int
    found: Measured
    info: DataInfo
    which: str
    """The checkpoint that was asked for: ``best``, ``latest`` or a step; ``newest`` where that one took its place."""


def evaluate_checkpoint(
    config: Config, run_dir: RunDir, which: str, split: str, weights: Literal["raw", "ema", "both"] | None = None,
    folder: Path | None = None, probes: Sequence[str] = (),
) -> Evaluation:  # fmt: skip
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
            why = "Each image would be its own nearest neighbour."
            raise UserError("Features are not tested on the training split.", why=why, fix="Give --split val or test.")
        # Not compiled, for hooks look into the model.
        config = config.model_copy(update={"train": config.train.model_copy(update={"compile": "off"})})
    batch_size = min(config.train.global_batch_size, 256)
    step = format.resolve(run_dir.checkpoints, which)
    module = None
    if folder is None:
        splits = build_data(config.data)
    else:
        saved = open_saved(config, run_dir, which)
        module = saved.module
        splits = _labelled(saved, folder)
        config = without_class_weights(config)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
        require_same_classes(checkpoints.manifest_of(step).state, splits, config.data.root)
        if folder is not None and probes:
            known = build_data(config.data)
            require_same_classes(checkpoints.manifest_of(step).state, known, config.data.root)
            splits = replace(splits, train=known.train)
        has_average = require_kind(step, checkpoints, weights)
        parts = build(alone(config), dist, splits, model=module)
        kinds = [kind for kind in STEMS if weights in (None, "both", kind) and (kind == "raw" or has_average)]
        samples = getattr(parts.splits, split)
        or_newest = which in ("best", "latest")
        told = dict[str, float]()
        for kind in kinds if probes else ():
            step = checkpoints.load_weights(parts.model, step, or_newest=or_newest, stem=STEMS[kind])
            for name, value in probed(parts, samples, probes, batch_size).items():
                told[f"ema_{name}" if kind == "ema" else name] = value
        one_pass = EvaluationPass(samples, batch_size, confusion=True)
        step, found = measure_saved(parts, checkpoints, step, one_pass, kinds=kinds, or_newest=or_newest)
        found.metrics.update(told)
        if or_newest and format.pointed(run_dir.checkpoints, which) != step:
            which = "newest"
        is_shown = folder is None and which == "best" and split != "train" and "raw" in found.mistakes
        if is_shown and not run_dir.mistakes(split).exists():
            shown = json.dumps({"split": split, "step": step, "images": found.mistakes["raw"].read()})
            with suppress(OSError):  # it may be another user's run
                write(run_dir.mistakes(split), shown + "\n", run_dir.path)
    left_out = sorted(parts.broken.met)
    if len(left_out) > parts.broken.most:
        raise too_many(left_out, parts.broken.most)
    if left_out:
        warn(f"Left out because they cannot be decoded: {', '.join(left_out)}")
    return Evaluation(step, found, parts.splits.info, which)


def require_confusion(config: Config, run_dir: RunDir, which: str) -> None:
    """Refuse a checkpoint of which no confusion matrix can be made, as far as it says what it was trained on."""
    told = None
    with suppress(format.BrokenCheckpointError):  # another may be taken in its place
        told = input_in(format.manifest_of(run_dir.checkpoints, format.resolve(run_dir.checkpoints, which)).state)
    if told is None:
        return
    task = build_task(config, Splits(told[0], (), (), (), told[1], told[1]))
    if not task.has("taken_for") or told[0].num_classes > MOST_CLASSES:
        raise no_confusion()


def no_confusion() -> UserError:
    """The error where no image is taken for a class, or where a matrix would be too large."""
    why = f"The task does not assign one class per image, or there are more than {MOST_CLASSES:,} classes."
    return UserError("There is no confusion matrix.", why=why, fix="Omit --confusion.")


def _labelled(saved: SavedModel, folder: Path) -> Splits:
    """The images of a folder, each split alike, with the labels that its folders' names are in training.

    Raises UserError where these are no classes of the model, and where there are no images.
    """
    classes = saved.info.class_names
    files = Files.walk(folder, ("",))
    unknown = sorted(files.splits[""].keys() - set(classes))
    files.exif = saved.info.exif
    samples = images_of(files, "", classes, saved.info.in_chans)
    why = ""
    if not saved.task.has("taken_for"):
        why = f"The task {saved.config.task.name} does not assign one class per image"
    elif unknown:
        why = f"'{one_line(unknown[0])}' is not one of them"
    elif not len(samples):
        why = "It contains no class folder with images"
    if why:
        known = ", ".join(map(one_line, classes[:8]))
        if len(classes) > 8:
            known += " ..."
        fix = "Put the images into FOLDER/CLASS/NAME.jpg, and name the folders like the training classes."
        raise UserError(f"{folder} cannot be used for evaluation.", why=f"{why}: {known}.", fix=fix)
    return replace(saved.splits, train=samples, val=samples, test=samples, in_memory=False)
