"""A model that another run has trained, whose outputs this one learns to give (Hinton et al., arXiv 1503.02531)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.run.teacher import teacher_of
from trainkit.training.saved_model import open_saved
from trainkit.training.tasks.base import Losses, Task, difference

if TYPE_CHECKING:
    from trainkit.config.schema import Config


class Teacher:
    """The best weights of a run, whole on each rank's device. It sees the very images that the model sees, prepared as
    it has learned them."""

    def __init__(self, config: Config, info: DataInfo, task: Task, device: torch.device) -> None:
        """Raises UserError where its classes or channels are others, and for a task that cannot compare outputs."""
        found = teacher_of(config)
        train = config.train
        assert found is not None
        saved = open_saved(found[1], found[0], "best")
        why = difference(saved.info.class_names, info.class_names)
        if saved.info.in_chans != info.in_chans:
            why = f"it takes images of {saved.info.in_chans} channels, and the data has {info.in_chans}"
        if not task.has("distillation_loss"):
            why = f"task {config.task.name} has no distillation_loss"
        if why:
            what = f"train.distill_from={train.distill_from} cannot teach this model."
            fix = "Give a run with the same classes and channels, or omit train.distill_from."
            raise UserError(what, why=f"{why[0].upper()}{why[1:]}.", fix=fix, key="train.distill_from")
        self._task = task
        self._size = saved.info.image_size
        self._alpha = train.distill_alpha
        self._temperature = train.distill_temperature
        self._model = saved.module.requires_grad_(False).to(device)
        (mean, std), (own_mean, own_std) = (torch.tensor([each.mean, each.std]) for each in (saved.info, info))
        constants = torch.stack([own_std / std, (own_mean - mean) / std]).view(2, 1, -1, 1, 1)
        self._scale, self._shift = constants.to(device)

    def taught(self, losses: Losses, images: Tensor, output: Tensor) -> Losses:
        """``losses`` of ``output``, float32 [N, classes], for normalised ``images``, with what the teacher says."""
        with torch.no_grad():
            images = images * self._scale + self._shift
            if images.shape[-2:] != (self._size, self._size):
                images = functional.interpolate(images, (self._size, self._size), mode="bilinear", antialias=True)
            told = self._model(images).float()
        loss = self._task.distillation_loss(output, told, self._temperature)
        return losses._replace(weighted=(1 - self._alpha) * losses.weighted + self._alpha * loss)
