from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.rank_functions import run_ranks
from tests.training.parts import Formats, Linear, parts_of
from trainkit.data.base import normalize
from trainkit.distributed.process_group import distributed
from trainkit.ranks.env import RankEnv
from trainkit.training.build import TrainState
from trainkit.training.measurement import evaluate, sync_buffers


def by_hand(parts: TrainState) -> dict[str, float]:
    """Metrics of the validation split in one batch."""
    samples = [parts.splits.val[index] for index in range(len(parts.splits.val))]
    images = torch.stack([parts.splits.eval_transform(image) for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    logits = Linear()(normalize(images, parts.splits.info))
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    return {
        "loss": functional.cross_entropy(logits, labels).item(),
        "acc1": 100 * (ranks < 1).float().mean().item(),
        "acc5": 100 * (ranks < 5).float().mean().item(),
        "samples": len(samples),
    }


@pytest.mark.parametrize("batch_size", [10, 4, 3, 1, 16])
def test_each_sample_counts_once_whatever_pads_the_last_batch(batch_size: int) -> None:
    parts = parts_of()
    assert evaluate(parts, parts.splits.val, batch_size=batch_size) == pytest.approx(by_hand(parts), rel=1e-5)


def test_evaluation_makes_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", None)
    parts = parts_of()
    assert evaluate(parts, parts.splits.val) is not None


def _evaluated(env: RankEnv) -> dict[str, float] | None:
    with distributed(env, use_gpu=False) as dist:
        parts = parts_of("train.global_batch_size=12", "train.micro_batch_size=2", dist=dist)
        return evaluate(parts, parts.splits.val)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_finds_the_same(world_size: int) -> None:
    assert run_ranks(world_size, _evaluated) == [pytest.approx(by_hand(parts_of()), rel=1e-5)] * world_size


def test_batches_are_as_large_as_in_training_and_each_is_a_sign_of_life() -> None:
    model, beats = Linear(), list[int]()
    parts = parts_of(model=model)
    evaluate(parts, parts.splits.val, beat=lambda: beats.append(1))
    evaluate(parts, parts.splits.val, batch_size=6)
    assert [size for size, _, _ in model.calls] == [4, 4, 4, 6, 6]
    assert len(beats) == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_without_gradients_and_left_as_it_was(training: bool) -> None:
    model = Linear().train(training)
    parts = parts_of(model=model)
    evaluate(parts, parts.splits.val)
    assert {call[1:] for call in model.calls} == {(False, False)}
    assert model.training is training
    assert torch.is_grad_enabled()


def test_a_stop_request_ends_it_before_the_next_batch_without_a_result() -> None:
    model = Linear()
    parts = parts_of(model=model)
    answers = iter([False, True])
    assert evaluate(parts, parts.splits.val, should_stop=lambda: next(answers)) is None
    assert len(model.calls) == 1
    assert model.training


def test_it_multiplies_in_the_formats_of_training_and_takes_the_loss_in_fp32() -> None:
    model = Formats()
    parts = parts_of("train.precision=bf16", model=model)
    result = evaluate(parts, parts.splits.val, batch_size=10)
    assert model.formats == {torch.bfloat16}
    assert result is not None
    assert result["loss"] == pytest.approx(by_hand(parts)["loss"], rel=0.02)
    with torch.no_grad(), parts.precision.autocast():
        samples = [parts.splits.val[index] for index in range(10)]
        images = normalize(torch.stack([image for image, _ in samples]), parts.splits.info)
        labels = torch.tensor([label for _, label in samples])
        exact = functional.cross_entropy(model(images).float(), labels)
    assert result["loss"] == pytest.approx(exact.item(), rel=1e-6)


def _buffers(env: RankEnv) -> list[Any]:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(1))
        for buffer in model.buffers():
            buffer.fill_(dist.rank + 5)
        sync_buffers(model, dist)
        return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_evaluates_with_the_running_statistics_of_rank_0(world_size: int) -> None:
    assert run_ranks(world_size, _buffers) == [[[5.0, 5.0], [5.0, 5.0], 5, [5.0], [5.0], 5]] * world_size
