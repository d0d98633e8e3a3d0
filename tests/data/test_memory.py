"""Batches of a data set in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.data.base import Batch, DataInfo, Splits
from trainkit.data.loader import Batches, TensorSamples, eval_batches, placed, tensor_transforms, train_batches
from trainkit.data.order import epoch_order

SIZE = 50
INFO = DataInfo("numbers", 2, 1, 6, ("even", "odd"), (0.5,), (0.5,))
PICTURES = TensorSamples(
    torch.arange(SIZE, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 6, 6) * 5
    + torch.arange(36, dtype=torch.uint8).view(6, 6),
    torch.arange(SIZE) % 2,
)


def in_memory(**where: Any) -> Batches[Batch]:
    train, evaluate = tensor_transforms(6, augment=True, shift=2, flip=True)
    data = Splits(INFO, PICTURES, PICTURES, PICTURES, train, evaluate, in_memory=True)
    settings = {"seed": 0, "start_step": 0, "stop_step": 10, "micro_batch_size": 16, "rank": 0, "world_size": 1}
    return train_batches(data, global_batch_size=16, **{**settings, "workers": 0, **where})


@pytest.fixture(scope="module")
def pictures() -> list[Batch]:
    return list(in_memory())


@pytest.mark.parametrize("start", [1, 3, 7])
def test_a_resumed_run_sees_what_the_uninterrupted_one_sees(start: int, pictures: list[Batch]) -> None:
    for batch, expected in zip(in_memory(start_step=start), pictures[start:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


@pytest.mark.parametrize(("world", "micro", "workers"), [(1, 4, 0), (2, 4, 0), (4, 2, 0), (1, 16, 2), (2, 4, 1)])
def test_neither_ranks_nor_accumulation_nor_workers_change_anything(
    world: int, micro: int, workers: int, pictures: list[Batch]
) -> None:
    per_rank = [
        list(in_memory(rank=rank, world_size=world, micro_batch_size=micro, workers=workers)) for rank in range(world)
    ]
    in_order = [batch for micro_step in zip(*per_rank, strict=True) for batch in micro_step]
    for column in range(3):
        assert torch.equal(
            torch.cat([batch[column] for batch in in_order]), torch.cat([batch[column] for batch in pictures])
        )


def test_the_samples_are_those_of_the_order_and_augmented_anew_in_each_epoch(
    pictures: list[Batch],
) -> None:
    order = torch.cat([epoch_order(SIZE, 0, epoch)[:48] for epoch in range(4)])[:160]
    labels, keys = (torch.cat([batch[column] for batch in pictures]) for column in (1, 2))
    assert torch.equal(labels, order % 2)
    assert len(set(keys.tolist())) == len(keys)
    first, second = ({int(index): at for at, index in enumerate(order[part])} for part in (slice(48), slice(48, 96)))
    images = torch.cat([batch.images for batch in pictures])
    both = first.keys() & second.keys()
    again = sum(torch.equal(images[first[index]], images[48 + second[index]]) for index in both)
    assert again < len(both) / 4


def test_a_batch_leaves_the_global_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    next(in_memory())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("world", "size"), [(1, 4), (2, 4), (3, 16)])
def test_evaluation_sees_what_it_sees_sample_by_sample(world: int, size: int) -> None:
    _, transform = tensor_transforms(6, augment=True, shift=2, flip=True)
    for rank in range(world):
        where: Any = {"batch_size": size, "rank": rank, "world_size": world, "workers": 0}
        whole = list(eval_batches(PICTURES, transform, **where))
        single = list(eval_batches(PICTURES, lambda image: transform(image), **where))
        for batch, expected in zip(whole, single, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


class Gpu:
    """Names a GPU where there is none."""

    type = "cuda"


@pytest.mark.parametrize(
    ("free", "where", "workers", "there"),
    [(10, "auto", 0, True), (9, "auto", 0, False), (10, "cpu", 0, False), (10, "auto", 1, False)],
)
def test_data_goes_to_a_gpu_if_it_takes_a_tenth_of_what_is_free_there(
    monkeypatch: pytest.MonkeyPatch, free: int, where: Any, workers: int, there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * PICTURES.nbytes * free, 0))
    monkeypatch.setattr(TensorSamples, "on", lambda self, device: "there")
    train, evaluate = tensor_transforms(6, augment=True, shift=2, flip=True)
    splits = Splits(INFO, PICTURES, PICTURES, PICTURES, train, evaluate, in_memory=True)
    gpu: Any = Gpu()
    found: Any = placed(splits, where, gpu, workers=workers)
    assert [found.train, found.val, found.test] == (["there"] * 3 if there else [PICTURES] * 3)


def test_data_stays_in_memory_where_the_cpu_trains() -> None:
    train, evaluate = tensor_transforms(6, augment=True, shift=2, flip=True)
    splits = Splits(INFO, PICTURES, PICTURES, PICTURES, train, evaluate, in_memory=True)
    assert placed(splits, "auto", torch.device("cpu"), workers=0) is splits
