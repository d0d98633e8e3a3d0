from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.training.parts import Formats, Linear, parts_of
from trainkit.data import order
from trainkit.data.base import Batch, normalize
from trainkit.training.update import Updater

PLAIN = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0")
IMAGES = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 7
KEYS = order.keys(0, 0, torch.arange(8))


def micro_batches(size: int = 4) -> Any:
    columns = (torch.split(column, size) for column in (IMAGES, LABELS, KEYS))
    return (Batch(*parts) for parts in zip(*columns, strict=True))


def updated(*overrides: str, lr: float = 0.5, seed: int = 0, model: nn.Module | None = None) -> torch.Tensor:
    """By how much one update of the global batch moves the weights."""
    parts = parts_of(*PLAIN, *overrides, model=model)
    weight = next(parts.model.parameters())
    before = weight.detach().clone()
    Updater(parts)(micro_batches(parts.micro_batch_size), lr=lr, seed=seed)
    return weight.detach() - before


def by_hand(label_smoothing: float = 0.0) -> torch.Tensor:
    """The gradient of the loss's mean over the global batch."""
    model = Linear()
    logits = model(normalize(IMAGES, parts_of().splits.info))
    functional.cross_entropy(logits, LABELS, label_smoothing=label_smoothing).backward()
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
def test_an_update_follows_the_gradient_of_the_global_batch(micro_batch_size: int) -> None:
    moved = updated(f"train.micro_batch_size={micro_batch_size}", lr=0.5)
    assert torch.allclose(moved, -0.5 * by_hand(), atol=1e-6)


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
def test_an_update_gives_the_loss_of_the_global_batch_and_how_the_step_went(micro_batch_size: int) -> None:
    parts = parts_of(*PLAIN, f"train.micro_batch_size={micro_batch_size}", "train.grad_clip_norm=1e9")
    update = Updater(parts)(micro_batches(micro_batch_size), lr=0.5, seed=0)
    logits = Linear()(normalize(IMAGES, parts.splits.info))
    assert update.loss.item() == pytest.approx(functional.cross_entropy(logits, LABELS).item(), rel=1e-5)
    assert update.stepped.norm is not None
    assert update.stepped.nonfinite.item() == 0.0


def test_labels_are_smoothed_on_request() -> None:
    assert torch.allclose(updated("train.label_smoothing=0.3"), -0.5 * by_hand(0.3), atol=1e-6)


def test_gradients_are_clipped_on_request() -> None:
    parts = parts_of(*PLAIN, "train.grad_clip_norm=0.25")
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    Updater(parts)(micro_batches(), lr=1.0, seed=0)
    moved = [parameter.detach() - old for parameter, old in zip(parts.model.parameters(), before, strict=True)]
    assert torch.cat([part.flatten() for part in moved]).norm().item() == pytest.approx(0.25, rel=1e-4)


def test_nothing_of_an_update_is_left_for_the_next() -> None:
    parts = parts_of(*PLAIN)
    update = Updater(parts)
    weight = next(parts.model.parameters())
    update(micro_batches(), lr=0.5, seed=0)
    once = weight.detach().clone()
    update(micro_batches(), lr=0.0, seed=0)
    assert torch.equal(weight, once)


def test_the_meter_has_every_sample_of_the_batch() -> None:
    update = Updater(parts_of(*PLAIN))
    update(micro_batches(), lr=0.5, seed=0)
    logits = Linear()(normalize(IMAGES, parts_of().splits.info))
    measured = update.meter.read()
    assert measured["samples"] == 8
    assert measured["loss"] == pytest.approx(functional.cross_entropy(logits, LABELS).item(), rel=1e-5)
    assert measured["acc1"] == 100 * (logits.argmax(1) == LABELS).float().mean().item()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), Linear().layer)


class _Weights(nn.Module):
    """`dropping`, with the weights before everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dropping()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(images)
        return scores


def test_dropout_is_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    first = updated(model=_Weights(), seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, updated(model=_Weights(), seed=3))
    assert not torch.equal(first, updated(model=_Weights(), seed=4))


class Exchanges:
    """A strategy that notes when gradients would be exchanged."""

    def __init__(self) -> None:
        self.asked: list[tuple[nn.Module, bool]] = []

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        self.asked.append((model, enabled))
        return nullcontext()


def test_gradients_are_exchanged_once_with_the_last_micro_batch() -> None:
    strategy = Exchanges()
    parts = replace(parts_of("train.micro_batch_size=2"), strategy=strategy)
    Updater(parts)(micro_batches(2), lr=0.5, seed=0)
    assert strategy.asked == [(parts.model, False)] * 3 + [(parts.model, True)]


def test_every_micro_batch_is_a_sign_of_life() -> None:
    beats: list[int] = []
    Updater(parts_of(), beat=lambda: beats.append(1))(micro_batches(), lr=0.5, seed=0)
    assert len(beats) >= 4


def test_it_multiplies_in_the_asked_format_and_takes_the_loss_in_fp32() -> None:
    model = Formats()
    parts = parts_of("train.precision=bf16", model=model)
    update = Updater(parts)
    update(micro_batches(), lr=0.0, seed=0)
    assert model.formats == {torch.bfloat16}
    with torch.no_grad(), parts.precision.autocast():
        exact = functional.cross_entropy(model(normalize(IMAGES, parts.splits.info)).float(), LABELS)
    assert update.meter.read()["loss"] == pytest.approx(exact.item(), rel=1e-6)
