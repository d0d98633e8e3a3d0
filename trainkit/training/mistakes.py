"""The images that a model tells wrong and is surest of, small, for people to look at: ``mistakes-<split>.json``."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.data.base import DataInfo
from trainkit.distributed.process_group import Distributed
from trainkit.training.meter import top_classes

MOST, LONGEST_SIDE = 24, 96
"""Images, and pixels: half a megabyte of photos, a few kilobytes of digits."""


class Mistakes:
    """The surest mistakes of one pass over a split, on the device until somebody reads them."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] | None = None  # how sure, class, taken for, image

    @torch.no_grad()
    def add(self, images: Tensor, logits: Tensor, labels: Tensor, mask: Tensor) -> None:
        """Look at a batch: images uint8 [N, C, H, W], logits [N, classes], labels int64 [N]; ``mask`` [N] is False on
        padding."""
        told = top_classes(logits)[:, 0]  # the `Meter`'s top-1, of equal scores too
        has_class = told >= 0
        sure = logits.softmax(dim=1).gather(1, told.clamp(min=0)[:, None])[:, 0]
        found = _surest(sure.where(mask & has_class & (told != labels), -1.0), labels, told, images)
        if self._kept is not None:
            found = _surest(*(torch.cat(pair) for pair in zip(self._kept, found, strict=True)))
        self._kept = found

    def read(self, dist: Distributed, info: DataInfo) -> list[dict[str, Any]]:
        """The surest of all ranks, the surest first: ``label`` and ``told`` (names of classes), ``confidence`` (0 to 1)
        and ``png`` (base64). Every rank must call it."""
        mine: list[dict[str, Any]] = []
        if self._kept is not None:
            sure, labels, told, images = (tensor.cpu() for tensor in self._kept)
            for at in (sure > 0).nonzero().flatten().tolist():
                names = {"label": info.class_names[int(labels[at])], "told": info.class_names[int(told[at])]}
                mine.append({**names, "confidence": round(float(sure[at]), 4), "png": _png(images[at])})
        found = [item for items in dist.gather_json(mine) for item in items]
        return sorted(found, key=lambda item: -item["confidence"])[:MOST]


def _surest(sure: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    order = sure.topk(min(MOST, len(sure))).indices
    return tuple(tensor[order] for tensor in (sure, *others))


def told(images: Sequence[Mapping[str, Any]], split: str, step: int) -> dict[str, Any]:
    """``mistakes-<split>.json``, of `Mistakes.read`."""
    return {"split": split, "step": step, "images": list(images)}


def _png(image: Tensor) -> str:
    """uint8 [C, H, W] as a small PNG, in base64."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()
