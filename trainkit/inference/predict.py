"""Load the model of a checkpoint for predictions, and measure its speed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from trainkit.cluster.ranks import RankEnv
from trainkit.config.schema import Config
from trainkit.data.decoding import read_image
from trainkit.distributed.process_group import distributed
from trainkit.run.folder import RunDir
from trainkit.training.placement import to_device, use_process, wants_gpu
from trainkit.training.precision import Precision, choose_precision
from trainkit.training.saved_model import SavedModel, WeightKind, open_saved

_SPEED_SECONDS = 0.5
"""Duration of one timing of a batch size."""
_SPEED_PASSES = 3
"""Timings of a batch size."""


@contextmanager
def predicting(
    config: Config, run_dir: RunDir, which: str, kind: WeightKind | None = None, *, by_data: bool = False
) -> Iterator[SavedModel]:
    """The weights of a checkpoint (``best``, ``latest`` or a step) on this process's device, in the precision that
    training would choose there.

    Takes and raises what `open_saved` does.
    """
    saved = open_saved(config, run_dir, which, kind, by_data=by_data)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        use_process(config)
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
            began = time.perf_counter()
            done = 0
            seconds = 0.0
            while seconds < _SPEED_SECONDS:
                saved.values(batch).cpu()
                done += batch_size
                seconds = time.perf_counter() - began
            speeds.append(done / seconds)
    return median(speeds)
