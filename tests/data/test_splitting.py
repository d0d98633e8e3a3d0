from __future__ import annotations

import hashlib

from trainkit.data.base import stratified_split


def test_parts_cover_everything_once() -> None:
    labels = [index % 7 for index in range(500)]
    parts = stratified_split(labels, (0.2, 0.1))
    assert sorted(index for part in parts for index in part) == list(range(500))
    assert all(part == sorted(part) for part in parts)


def test_each_class_is_split_in_the_same_proportion() -> None:
    labels = [0] * 100 + [1] * 300
    _, val = stratified_split(labels, (0.1,))
    assert [sum(labels[i] == label for i in val) for label in (0, 1)] == [10, 30]


def test_a_small_class_gives_each_part_a_sample() -> None:
    parts = stratified_split([0, 0, 0], (0.1, 0.1))
    assert [len(part) for part in parts] == [1, 1, 1]


def test_a_class_of_one_stays_in_training() -> None:
    assert stratified_split([0], (0.5,)) == [[0], []]


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
