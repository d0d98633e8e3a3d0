import hashlib
from collections import Counter

import pytest
import torch

from trainkit.common.errors import UserError
from trainkit.data.order import (
    derive_seed,
    epoch_order,
    global_batch,
    repeated,
    size_left,
    steps_per_epoch,
    stratified_split,
)


def test_parts_cover_everything_once_and_each_class_in_the_same_proportion() -> None:
    labels = [0] * 100 + [1] * 300
    parts = stratified_split(labels, (0.1,))
    assert sorted(index for part in parts for index in part) == list(range(400))
    assert all(part == sorted(part) for part in parts)
    assert [sum(labels[i] == label for i in parts[1]) for label in (0, 1)] == [10, 30]


@pytest.mark.parametrize(
    ("labels", "fractions", "parts"),
    [([0, 0, 0], (0.1, 0.1), [1, 1, 1]), ([0], (0.5,), [1, 0]), ([0, 1], (0.5,), [2, 0]),
     ([0] * 4, (0.5, 0.5), [1, 2, 1]), ([0] * 5, (0.0, 0.4), [3, 0, 2])],
)  # fmt: skip
def test_a_class_gives_each_part_a_sample_and_keeps_one(
    labels: list[int], fractions: tuple[float, ...], parts: list[int]
) -> None:
    assert [len(part) for part in stratified_split(labels, fractions)] == parts
    assert size_left(Counter(labels).values(), fractions) == parts[0]


def test_a_new_file_moves_no_other_file_to_another_part() -> None:
    names = [f"{number}.jpg" for number in range(100)]
    _, before = stratified_split([0] * 100, (0.2,), keys=names)
    _, after = stratified_split([0] * 101, (0.2,), keys=["new.jpg", *names])
    moved = {names[i] for i in before} - {["new.jpg", *names][i] for i in after}
    assert len(moved) <= 1


def test_the_split_never_changes() -> None:
    # Results of two versions of the kit are comparable only if this number stays.
    parts = stratified_split([index % 10 for index in range(1797)], (0.15, 0.15))
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:12] == "84b73f7ea22e"


def test_the_order_is_torchs_permutation_and_leaves_the_global_numbers_alone() -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(derive_seed(5, 2))
    assert torch.equal(epoch_order(70_000, 5, 2), torch.randperm(70_000, generator=generator))
    assert torch.equal(before, torch.get_rng_state())
    assert epoch_order(10, 5, 2).dtype == torch.int32, "half of the memory"
    assert global_batch(range(10), 5, 3, 4) == epoch_order(10, 5, 1)[4:8].tolist()


class Shifted(list[int]):
    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return (torch.arange(10) + seed + 2 * epoch) % 10


def test_samples_may_have_an_order_of_their_own() -> None:
    assert global_batch(Shifted(range(10)), 5, 3, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize(("size", "repeats"), [(12, 3), (16, 2), (10, 4), (4, 1)])
def test_each_image_comes_so_often_in_an_update_beside_others(size: int, repeats: int) -> None:
    order = epoch_order(50, 5, 2)
    found = repeated(order, repeats, size)
    if repeats == 1:
        assert found is order
        return
    assert len(found) == 50 // size * size, "an epoch is as long as without"
    updates, images = found.view(-1, size), -(-size // repeats)
    assert updates[:, :images].flatten().tolist() == order[: len(updates) * images].tolist()
    for update in updates % 50:
        counts = update.unique(return_counts=True)[1]
        assert counts.sum() == size
        assert repeats - 1 <= counts.min() <= counts.max() == repeats
        assert (update[::2] != update[1::2]).all(), "none is mixed with itself"
    assert len(found.unique()) == len(found), "each copy has random numbers of its own"
    epoch = 50 // size
    assert global_batch(range(50), 5, 2 * epoch + 1, size, repeats) == (updates[1] % 50).tolist()


def test_seeds_have_32_bits_and_are_the_same_in_every_version() -> None:
    assert max(derive_seed(0, index) for index in range(1000)) in range(2**31, 2**32)
    assert derive_seed(1) != derive_seed(1 + 2**32)
    # Or a run that a newer version goes on with would see another
    assert derive_seed(1, 2, 3) == 3_922_471_037


@pytest.mark.parametrize(("samples", "fits"), [(1, 1), (50, 32), (63, 32)])
def test_an_epoch_drops_its_remainder_and_data_for_no_step_is_refused(samples: int, fits: int) -> None:
    assert [steps_per_epoch(whole, 64) for whole in (64, 1257)] == [1, 19]
    with pytest.raises(UserError, match=rf"train.global_batch_size=64 is larger[\s\S]*global_batch_size={fits},"):
        steps_per_epoch(samples, 64)
