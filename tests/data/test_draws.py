from __future__ import annotations

import pytest
import torch

from trainkit.data import order

KEYS = order.keys(0, 0, torch.arange(100_000))


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


def test_the_reference_gives_what_the_published_program_gives() -> None:
    assert splitmix64(1234567)[:2] == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("key", [0, 1234567, 2**63 - 1, -1, -(2**63)])
def test_a_stream_is_splitmix64s(key: int) -> None:
    drawn = [int(order.bits(torch.tensor([key]), number)) for number in range(3)]
    assert drawn == [number >> 32 for number in splitmix64(key % (1 << 64))]


def test_a_key_is_a_function_of_seed_epoch_and_index_in_every_version() -> None:
    assert order.keys(1, 2, torch.tensor([3])).tolist() == [7165454640083935283]


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (0, 2**33)])
def test_another_seed_or_epoch_is_another_key_for_every_sample(other: tuple[int, int]) -> None:
    assert len({*KEYS.tolist(), *order.keys(*other, torch.arange(100_000)).tolist()}) == 200_000


def test_a_sample_draws_the_same_wherever_it_stands_in_a_batch() -> None:
    assert torch.equal(order.bits(KEYS, 1)[77:99], order.bits(KEYS[77:99], 1))


def test_numbers_below_an_end_are_equally_likely() -> None:
    counts = torch.bincount(order.below(KEYS, 0, 9), minlength=9)
    assert len(counts) == 9
    assert ((counts - 100_000 / 9).abs() < 5 * (100_000 / 9) ** 0.5).all()


def test_two_draws_of_a_sample_have_nothing_to_do_with_each_other() -> None:
    one, other = order.uniform(KEYS, 0), order.uniform(KEYS, 1)
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 0.015


def test_uniform_numbers_fill_the_open_interval() -> None:
    numbers = order.uniform(KEYS, 3)
    assert 0 < numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(numbers.var() - 1 / 12) < 0.001
