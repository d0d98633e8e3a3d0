from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch

from trainkit.data.base import DataInfo, normalize, size_left, stratified_split


def info(mean: tuple[float, ...], std: tuple[float, ...]) -> DataInfo:
    return DataInfo("x", 2, len(mean), 4, ("a", "b"), mean, std)


def test_bytes_become_floats_of_zero_mean_and_unit_variance() -> None:
    images = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    normal = normalize(images, info(tuple(mean.tolist()), tuple(std.tolist())))
    assert normal.dtype == torch.float32
    assert torch.allclose(normal.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(normal.std((0, 2, 3)), torch.ones(3), atol=1e-5)


def test_normalising_leaves_the_batch_as_it_was() -> None:
    images = torch.full((1, 1, 4, 4), 200, dtype=torch.uint8)
    normalize(images, info((0.5,), (0.5,)))
    assert bool((images == 200).all())


def test_parts_cover_everything_once() -> None:
    labels = [index % 7 for index in range(500)]
    parts = stratified_split(labels, (0.2, 0.1))
    assert sorted(index for part in parts for index in part) == list(range(500))
    assert all(part == sorted(part) for part in parts)


def test_each_class_is_split_in_the_same_proportion() -> None:
    labels = [0] * 100 + [1] * 300
    _, val = stratified_split(labels, (0.1,))
    assert [sum(labels[i] == label for i in val) for label in (0, 1)] == [10, 30]


@pytest.mark.parametrize(
    ("labels", "fractions", "parts"),
    [([0, 0, 0], (0.1, 0.1), [1, 1, 1]), ([0], (0.5,), [1, 0]), ([0, 1], (0.5,), [2, 0])],
)
def test_a_class_gives_each_part_a_sample_and_keeps_one(
    labels: list[int], fractions: tuple[float, ...], parts: list[int]
) -> None:
    assert [len(part) for part in stratified_split(labels, fractions)] == parts
    assert size_left(Counter(labels).values(), fractions) == parts[0]


def test_a_new_file_moves_no_other_file_to_another_part() -> None:
    names = [f"{number}.jpg" for number in range(100)]
    _, before = stratified_split([0] * 100, (0.2,), keys=names)
    _, after = stratified_split([0] * 101, (0.2,), keys=[*names, "new.jpg"])
    moved = {names[i] for i in before} - {[*names, "new.jpg"][i] for i in after}
    assert len(moved) <= 1


def test_the_split_never_changes() -> None:
    # Results of two versions of the kit are comparable only if this number stays.
    parts = stratified_split([index % 10 for index in range(1797)], (0.15, 0.15))
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:12] == "84b73f7ea22e"
