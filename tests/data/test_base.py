import hashlib
from collections import Counter

import pytest
import torch

from trainkit.data import base
from trainkit.errors import UserError


def test_parts_cover_everything_once_and_each_class_in_the_same_proportion() -> None:
    labels = [0] * 100 + [1] * 300
    parts = base.stratified_split(labels, (0.1,))
    assert sorted(index for part in parts for index in part) == list(range(400))
    assert all(part == sorted(part) for part in parts)
    assert [sum(labels[i] == label for i in parts[1]) for label in (0, 1)] == [10, 30]


@pytest.mark.parametrize(
    ("labels", "fractions", "parts"),
    [([0, 0, 0], (0.1, 0.1), [1, 1, 1]), ([0], (0.5,), [1, 0]), ([0, 1], (0.5,), [2, 0])],
)
def test_a_class_gives_each_part_a_sample_and_keeps_one(
    labels: list[int], fractions: tuple[float, ...], parts: list[int]
) -> None:
    assert [len(part) for part in base.stratified_split(labels, fractions)] == parts
    assert base.size_left(Counter(labels).values(), fractions) == parts[0]


def test_a_new_file_moves_no_other_file_to_another_part() -> None:
    names = [f"{number}.jpg" for number in range(100)]
    _, before = base.stratified_split([0] * 100, (0.2,), keys=names)
    _, after = base.stratified_split([0] * 101, (0.2,), keys=["new.jpg", *names])
    moved = {names[i] for i in before} - {["new.jpg", *names][i] for i in after}
    assert len(moved) <= 1


def test_the_split_never_changes() -> None:
    # Results of two versions of the kit are comparable only if this number stays.
    parts = base.stratified_split([index % 10 for index in range(1797)], (0.15, 0.15))
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:12] == "84b73f7ea22e"


def test_the_order_is_torchs_permutation_and_leaves_the_global_numbers_alone() -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(base.derive_seed(5, 2))
    assert torch.equal(base.epoch_order(70_000, 5, 2), torch.randperm(70_000, generator=generator))
    assert torch.equal(before, torch.get_rng_state())
    assert base.global_batch(10, 5, 3, 4) == base.epoch_order(10, 5, 1)[4:8].tolist()


def test_seeds_have_32_bits_and_are_the_same_in_every_version() -> None:
    assert max(base.derive_seed(0, index) for index in range(1000)) in range(2**31, 2**32)
    assert base.derive_seed(1) != base.derive_seed(1 + 2**32)
    # Or a run that a newer version goes on with would see another order.
    assert base.derive_seed(1, 2, 3) == 3_922_471_037


@pytest.mark.parametrize(("samples", "fits"), [(1, 1), (50, 32), (63, 32)])
def test_an_epoch_drops_its_remainder_and_data_for_no_step_is_refused(samples: int, fits: int) -> None:
    assert [base.steps_per_epoch(whole, 64) for whole in (64, 1257)] == [1, 19]
    with pytest.raises(UserError, match=rf"train.global_batch_size=64 is larger[\s\S]*global_batch_size={fits},"):
        base.steps_per_epoch(samples, 64)


KEYS = base.keys(0, 0, torch.arange(100_000))


def splitmix64(state: int) -> list[int]:
    """The first numbers of Vigna's splitmix64.c, in Python's own integers."""
    numbers = []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        numbers.append(z ^ (z >> 31))
    return numbers


@pytest.mark.parametrize("key", [0, 1234567, 2**63 - 1, -1, -(2**63)])
def test_a_stream_is_splitmix64s(key: int) -> None:
    assert splitmix64(1234567)[:2] == [6457827717110365317, 3203168211198807973]  # what the published program gives
    drawn = [int(base.bits(torch.tensor([key]), number)) for number in range(3)]
    assert drawn == [number >> 32 for number in splitmix64(key % (1 << 64))]


def test_a_key_is_a_function_of_seed_epoch_and_index_in_every_version() -> None:
    assert base.keys(1, 2, torch.tensor([3])).tolist() == [7165454640083935283]


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (0, 2**33)])
def test_another_seed_or_epoch_is_another_key_for_every_sample(other: tuple[int, int]) -> None:
    assert len({*KEYS.tolist(), *base.keys(*other, torch.arange(100_000)).tolist()}) == 200_000
