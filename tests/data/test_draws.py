from statistics import NormalDist

import pytest
import torch

from trainkit.data import draws


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
    drawn = [int(draws.bits(torch.tensor([key]), number)) for number in range(3)]
    first, *others = [number >> 32 for number in splitmix64(key % (1 << 64))]
    assert drawn == [first, *others] == draws.bits(torch.tensor([key] * 3), torch.arange(3)).tolist()
    assert draws.uniform(torch.tensor([key]), 0).item() == (first + 0.5) / 2**32
    normal = draws.normal(torch.tensor([key]), 0).item()
    assert normal == pytest.approx(NormalDist().inv_cdf(((first >> 9) + 0.5) / 2**23), rel=1e-4)


def test_a_key_is_a_function_of_seed_epoch_and_index_in_every_version() -> None:
    assert draws.keys(1, 2, torch.tensor([3])).tolist() == [7165454640083935283]
    assert (draws.SHIFT, draws.POLICY, draws.MIXING, draws.ERASING) == (0, 16, 64, 96)
