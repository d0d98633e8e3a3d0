import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from trainkit import terminal
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
    [([0, 0, 0], (0.1, 0.1), [1, 1, 1]), ([0], (0.5,), [1, 0]), ([0, 1], (0.5,), [2, 0]),
     ([0] * 4, (0.5, 0.5), [1, 2, 1]), ([0] * 5, (0.0, 0.4), [3, 0, 2])],
)  # fmt: skip
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
    assert base.epoch_order(10, 5, 2).dtype == torch.int32, "half of the memory"
    assert base.global_batch(range(10), 5, 3, 4) == base.epoch_order(10, 5, 1)[4:8].tolist()


@pytest.mark.parametrize(("size", "repeats"), [(12, 3), (16, 2), (10, 4), (4, 1)])
def test_each_image_comes_so_often_in_an_update_beside_others(size: int, repeats: int) -> None:
    order = base.epoch_order(50, 5, 2)
    found = base.repeated(order, repeats, size)
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
    assert base.global_batch(range(50), 5, 2 * epoch + 1, size, repeats) == (updates[1] % 50).tolist()


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


INFO = base.DataInfo("mine", 10, 1, 28, (), mean=(0.1,), std=(0.2,))
KNOWN: dict[str, Any] = {"mean": (0.3, 0.5, 0.7), "std": (0.1, 0.2, 0.6), "interpolation": "bicubic", "crop": 0.9}


def test_of_gray_images_weights_expect_the_average_of_their_channels() -> None:
    assert replace(INFO, in_chans=3).as_input("weights", **KNOWN) == base.ModelInput("weights", **KNOWN)
    gray = INFO.as_input("weights", **KNOWN)
    assert (*gray.mean, *gray.std) == pytest.approx((0.5, 0.3))


def test_images_are_prepared_as_weights_expect_them_where_the_data_set_can() -> None:
    mine, theirs = (torch.zeros, torch.ones), (torch.empty, torch.tensor)
    samples = [(0, 0)], [(0, 1)], [(0, 2)]
    splits, expected = base.Splits(INFO, *samples, *mine), INFO.as_input("weights", **KNOWN)
    assert splits.prepared_for(None) == splits
    info = replace(INFO, mean=expected.mean, std=expected.std)
    assert splits.prepared_for(expected) == base.Splits(info, *samples, *mine, expected=expected)
    able = replace(splits, transforms_for={expected: theirs}.__getitem__).prepared_for(expected)
    assert (able.train_transform, able.eval_transform) == theirs


@pytest.mark.parametrize(
    ("options", "key", "must_be"),
    [({"image_size": 3}, "image_size", "4 or more"), ({"val_fraction": 0.0}, "val_fraction", "between 0 and 1"),
     ({"test_fraction": 1.0}, "test_fraction", "between 0 and 1"),
     ({"val_fraction": 0.5, "test_fraction": 0.5}, "val_fraction", "less than 1 with data.test_fraction")],
)  # fmt: skip
def test_impossible_options_are_refused_with_what_would_do(options: dict[str, float], key: str, must_be: str) -> None:
    base.require_options({"image_size": 4, "val_fraction": 0.5, "test_fraction": 0.49, "other": -1})
    with pytest.raises(UserError) as error:
        base.require_options(options)
    said = f"data.{key}={options[key]} is not possible.", f"data.{key} must be {must_be}."
    assert (error.value.what, error.value.why, error.value.key) == (*said, f"data.{key}")


def test_the_error_for_absent_data_names_the_command_that_fetches_them() -> None:
    command = terminal.command("prepare", "mine", "--root", Path("data"))
    said = base.missing("mine", Path("data"), Path("data/a"))
    why = "data/a does not exist. To rehearse without it: data.fake=true."
    assert (said.what, said.why, said.fix) == ("The data set 'mine' is not in data.", why, command)
    assert base.missing("mine", Path("data"), Path("data/a"), fix="Or so").fix == f"Or so: {command}"


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
    first, *others = [number >> 32 for number in splitmix64(key % (1 << 64))]
    assert drawn == [first, *others] == base.bits(torch.tensor([key] * 3), torch.arange(3)).tolist()
    assert base.uniform(torch.tensor([key]), 0).item() == (first + 0.5) / 2**32
    normal = base.normal(torch.tensor([key]), 0).item()
    assert normal == pytest.approx(NormalDist().inv_cdf(((first >> 9) + 0.5) / 2**23), rel=1e-4)


def test_a_key_is_a_function_of_seed_epoch_and_index_in_every_version() -> None:
    assert base.keys(1, 2, torch.tensor([3])).tolist() == [7165454640083935283]
    assert (base.SHIFT, base.POLICY, base.MIXING, base.ERASING) == (0, 16, 64, 96)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (0, 2**33)])
def test_another_seed_or_epoch_is_another_key_for_every_sample(other: tuple[int, int]) -> None:
    assert len({*KEYS.tolist(), *base.keys(*other, torch.arange(100_000)).tolist()}) == 200_000


def test_images_keep_the_layout_of_bytes_or_get_that_of_tensor_cores() -> None:
    info = replace(INFO, in_chans=3, mean=(0.1, 0.2, 0.3), std=(0.2, 0.2, 0.1))
    images = torch.full((2, 3, 4, 4), 51, dtype=torch.uint8)
    for layout, how in ((torch.contiguous_format, {}), (torch.channels_last, {"channels_last": True})):
        normal = base.normalize(images, info, **how)
        assert normal.is_contiguous(memory_format=layout)
        assert normal[1, :, 2, 3].tolist() == pytest.approx([0.5, 0.0, -1.0], abs=1e-6)
