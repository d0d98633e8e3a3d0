from __future__ import annotations

import pytest
import torch

from tests.rank_functions import run_ranks
from tests.training.parts import parts_of
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.ranks.env import RankEnv
from trainkit.tasks.classification import Classification
from trainkit.tasks.meter import _MOST_PENDING, _MOST_PENDING_SCORES, Meter

# Of 7 classes; the right one is 0. It is first, second, fifth and sixth of the scores.
LOGITS = torch.tensor(
    [
        [9.0, 1, 2, 3, 4, 5, 6],
        [5.5, 1, 2, 3, 4, 5, 6],
        [2.5, 1, 2, 3, 4, 5, 6],
        [1.5, 1, 2, 3, 4, 5, 6],
    ]
)
LABELS = torch.zeros(4, dtype=torch.int64)
LOSSES = torch.tensor([0.5, 1.0, 2.0, 4.5])
ALL = slice(None)
TASK = Classification(parts_of().splits.info, 0.0, None)


def meter() -> Meter:
    return Meter(TASK, Distributed(RankEnv.single(), torch.device("cpu")))


def add(one: Meter, part: slice = ALL) -> None:
    one.add(LOSSES[part].mean(), LOGITS[part], LABELS[part])


def test_loss_and_hits_are_means_over_samples() -> None:
    one = meter()
    add(one)
    assert one.read() == {"loss": 2.0, "acc1": 25.0, "acc5": 75.0, "samples": 4}


def test_batches_of_different_sizes_count_by_their_samples() -> None:
    one = meter()
    add(one, slice(0, 1))
    add(one, slice(1, 4))
    add(one)
    assert one.read() == {"loss": 2.0, "acc1": 25.0, "acc5": 75.0, "samples": 8}


def test_what_is_masked_counts_nowhere_even_if_it_is_nan() -> None:
    one = meter()
    losses = torch.tensor([0.5, 1.0, float("nan"), 4.5])
    one.add_masked(losses, LOGITS, LABELS, torch.tensor([True, True, False, False]))
    assert one.read() == {"loss": 0.75, "acc1": 50.0, "acc5": 100.0, "samples": 2}


def test_the_top_five_of_three_classes_are_three() -> None:
    one = meter()
    one.add(LOSSES[:2].mean(), torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), LABELS[:2])
    assert one.read() == {"loss": 0.75, "acc1": 50.0, "acc5": 100.0, "samples": 2}


def test_reading_starts_again_from_zero() -> None:
    one = meter()
    add(one)
    one.read()
    assert one.read() == {"samples": 0}


def test_small_losses_are_not_lost_beside_a_large_one() -> None:
    one = meter()
    one.add(torch.tensor(1e8), LOGITS[:1], LABELS[:1])
    for _ in range(100):
        one.add(torch.tensor(0.25), LOGITS[:1], LABELS[:1])
    assert one.read()["loss"] * 101 == pytest.approx(1e8 + 25, abs=1e-3)


def test_counts_stay_exact_where_float32_has_no_odd_numbers() -> None:
    one = meter()
    one.go_on([0.0, 0, 2**24, 5 * 2**24])
    add(one, slice(0, 1))
    assert one.sums() == [0.5, 1, 2**24 + 1, 5 * 2**24 + 1]


def test_the_sums_are_on_the_ranks_device() -> None:
    one = Meter(TASK, Distributed(RankEnv.single(), torch.device("meta")))
    assert one._loss.device.type == "meta"


def test_it_keeps_no_graph_of_what_it_adds() -> None:
    one = meter()
    one.add(LOSSES.mean().requires_grad_(), LOGITS.clone().requires_grad_(), LABELS)
    assert not any(tensor.requires_grad for tensor in one._pending[0])
    one.sums()
    assert not one._loss.requires_grad


def _measured(env: RankEnv) -> dict[str, float]:
    with distributed(env, use_gpu=False) as dist:
        one = Meter(TASK, dist)
        part = slice(0, 1) if dist.rank == 0 else slice(1, 4)
        add(one, part)
        return one.read()


def test_every_rank_reads_the_sums_of_all() -> None:
    assert run_ranks(2, _measured) == [{"loss": 2.0, "acc1": 25.0, "acc5": 75.0, "samples": 4}] * 2


def test_a_mean_goes_on_where_it_was_left() -> None:
    whole, first, second = meter(), meter(), meter()
    add(whole)
    add(first, slice(0, 1))
    second.go_on(first.sums())
    add(second, slice(1, 4))
    assert second.read() == whole.read()


def test_what_is_put_off_is_added_before_it_fills_the_memory() -> None:
    one, batches = meter(), 3 * _MOST_PENDING + 1
    for _ in range(batches):
        add(one)
    assert len(one._pending) == 1
    assert one.read() == {"loss": 2.0, "acc1": 25.0, "acc5": 75.0, "samples": 4 * batches}


def test_large_batches_are_put_off_less_often() -> None:
    one, logits = meter(), torch.zeros(1, _MOST_PENDING_SCORES // 2)
    for _ in range(3):
        one.add(LOSSES.mean(), logits, LABELS[:1])
    assert not one._pending


def _told(env: RankEnv) -> tuple[list[float], dict[str, float], list[float]]:
    with distributed(env, use_gpu=False) as dist:
        one = Meter(TASK, dist)
        add(one)
        read = one.read(tell=env.rank + 0.5)
        told = one.told
        one.read()
        return told, read, one.told


def test_each_rank_tells_all_others_a_number_on_the_way() -> None:
    assert (
        run_ranks(2, _told) == [([0.5, 1.5], {"loss": 2.0, "acc1": 25.0, "acc5": 75.0, "samples": 8}, [0.0, 0.0])] * 2
    )
    one = meter()
    add(one)
    one.read(tell=3.0)
    assert one.told == []


@pytest.mark.parametrize("label", range(7))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_score_that_is_not_finite_is_a_miss(bad: float, label: int) -> None:
    logits = torch.full((2, 7), bad)
    logits[1] = torch.tensor([9.0, 8, 7, 6, 5, 4, 3])
    logits[1, label] = bad
    one, masked = meter(), meter()
    labels = torch.full((2,), label)
    one.add(torch.tensor(1.0), logits, labels)
    masked.add_masked(torch.ones(2), logits, labels, torch.tensor([True, True]))
    for found in (one.read(), masked.read()):
        assert found == {"loss": 1.0, "acc1": 0.0, "acc5": 0.0, "samples": 2}


def test_a_class_whose_score_is_minus_infinity_is_never_a_hit() -> None:
    one, logits = meter(), torch.full((1, 7), -float("inf"))
    logits[0, 3] = 1.0
    for label in range(7):
        one.add(torch.tensor(1.0), logits, torch.tensor([label]))
    assert one.sums() == [7.0, 7, 1, 1]
