"""Metrics of a checkpoint, by one process: whatever trained it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from trainkit import lifetime
from trainkit.checkpoint import files
from trainkit.checkpoint.saving import Checkpoints
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import DataInfo
from trainkit.distributed.process_group import distributed
from trainkit.ranks.env import RankEnv
from trainkit.records.files import write
from trainkit.records.rundir import RunDir
from trainkit.training.broken import too_many
from trainkit.training.building import alone, build, wants_gpu
from trainkit.training.classes import require_same_classes
from trainkit.training.mistakes import told
from trainkit.training.testing import STEMS, Measured, measure_saved, no_average


@dataclass(frozen=True)
class Evaluated:
    """What was measured, of which step's weights, on what data."""

    step: int
    found: Measured
    info: DataInfo
    which: str
    """What was asked for: ``best``, ``latest`` or a step; ``newest`` where that one was taken in its place."""


def evaluate_checkpoint(
    config: Config, run_dir: RunDir, which: str, split: str, weights: Literal["raw", "ema", "both"] | None = None
) -> Evaluated:
    """Measure a checkpoint (``best``, ``latest`` or a step) of a run on ``split``, in this process.

    A checkpoint is the same whatever trained it, so a model trained with FSDP on many nodes is evaluated by one.

    Of ``best`` the images that were told wrong most surely are kept, for the report (``mistakes-<split>.json``), where
    training has kept none.

    Where ``best`` or ``latest`` is broken, the newest whole one is taken, and said so.

    Args:
        weights: the model's own, the averaged ones or both; None: all that there are.

    Raises:
        UserError: no such checkpoint, it is broken, or it has no averaged weights and these were asked for;
            the data has other classes than it was trained on.
    """
    step = files.resolve(run_dir.checkpoints, which)
    splits = build_data(config.data)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
        require_same_classes(checkpoints.state_of(step), splits, config.data.root)
        averaged = checkpoints.holds(step, STEMS["ema"])
        if weights in ("ema", "both") and not averaged:
            raise no_average(step)
        parts = build(alone(config), dist, splits)
        kinds = [kind for kind in STEMS if weights in (None, "both", kind) and (kind == "raw" or averaged)]
        samples = {"train": splits.train, "val": splits.val, "test": splits.test}[split]
        lifetime.settled()
        step, found = measure_saved(
            parts,
            checkpoints,
            step,
            samples,
            kinds=kinds,
            batch_size=min(config.train.global_batch_size, 256),
            or_newest=which in ("best", "latest"),
        )
        if which in ("best", "latest") and files.pointed(run_dir.checkpoints, which) != step:
            which = "newest"
        is_shown = which == "best" and split != "train" and "raw" in found.mistakes
        if is_shown and not run_dir.mistakes(split).exists():
            images = found.mistakes["raw"].read(dist, parts.splits.info)
            with suppress(OSError):  # it may be somebody else's run
                write(run_dir.mistakes(split), json.dumps(told(images, split, step)) + "\n", run_dir.path)
    left_out = sorted(parts.broken.met)
    if len(left_out) > parts.broken.most:
        raise too_many(left_out, parts.broken.most)
    if left_out:
        print(f"Left out, for they cannot be decoded: {', '.join(left_out)}", file=sys.stderr)
    return Evaluated(step, found, parts.splits.info, which)
