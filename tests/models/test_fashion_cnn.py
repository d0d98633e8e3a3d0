from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainkit.data.base import DataInfo, normalize
from trainkit.data.datasets import digits
from trainkit.data.loader import eval_batches, train_batches
from trainkit.errors import UserError
from trainkit.models import fashion_cnn


def info(image_size: int = 8, in_chans: int = 1, num_classes: int = 10) -> DataInfo:
    names = tuple(map(str, range(num_classes)))
    return DataInfo("x", num_classes, in_chans, image_size, names, (0.5,) * in_chans, (0.5,) * in_chans)


@pytest.mark.parametrize(
    ("image_size", "in_chans", "num_classes"),
    [(4, 1, 2), (8, 1, 10), (9, 1, 10), (28, 1, 10), (32, 3, 100), (224, 3, 2)],
)
def test_images_of_any_size_become_scores(image_size: int, in_chans: int, num_classes: int) -> None:
    model = fashion_cnn.build(info(image_size, in_chans, num_classes), width=8)
    assert tuple(model(torch.zeros(2, in_chans, image_size, image_size)).shape) == (2, num_classes)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_an_image_is_scored_alike_in_any_company_but_for_batch_norm(norm: str) -> None:
    model = fashion_cnn.build(info(), norm=norm)  # type: ignore[arg-type]
    images = torch.randn(8, 1, 8, 8)
    assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-5) == (norm == "group")


@pytest.mark.parametrize("options", [{"width": 12}, {"width": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"model.{name}="):
        fashion_cnn.build(info(), **options)


def test_it_learns_digits_within_five_epochs() -> None:
    data = digits.build(Path())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = fashion_cnn.build(data.info)
    alone: dict[str, Any] = {"rank": 0, "world_size": 1, "workers": 0}
    steps = 5 * (len(data.train) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    sizes: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 64}
    for images, labels, _ in train_batches(data, seed=0, start_step=0, stop_step=steps, **sizes, **alone):
        optimizer.zero_grad()
        F.cross_entropy(model(normalize(images, data.info)), labels).backward()
        optimizer.step()
        schedule.step()
    correct = 0
    for images, labels, mask in eval_batches(data.val, data.eval_transform, batch_size=64, **alone):
        with torch.no_grad():
            correct += int(((model(normalize(images, data.info)).argmax(1) == labels) & mask).sum())
    assert correct / len(data.val) > 0.95
