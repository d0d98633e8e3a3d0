"""Memory that is freed and needed again."""

from __future__ import annotations

import os
import resource
from unittest import mock

import pytest
import torch

from tests.rank_functions import run_ranks
from trainkit.distributed.allocator import give_freed_back, keep_freed
from trainkit.ranks.env import RankEnv

pytestmark = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


def _faults() -> int:
    """Pages that are new to this process in each round, at least."""
    found = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        del tensors
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


def _found(env: RankEnv) -> tuple[int, int]:
    """Faults where what is freed is kept, and right after it was given back."""
    keep_freed()
    kept = _faults()
    give_freed_back()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 20)
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_is_kept_is_taken_again_without_the_kernel_until_it_is_given_back() -> None:
    ((kept, anew),) = run_ranks(1, _found)
    assert kept < 100
    assert anew > 500  # of the 1,024 pages of one


@pytest.mark.parametrize(("name", "calls"), [("MALLOC_TRIM_THRESHOLD_", 0), ("GLIBC_TUNABLES", 0), ("OTHER", 2)])
def test_what_a_user_has_said_in_the_environment_holds(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    monkeypatch.setenv(name, "0")
    with mock.patch("ctypes.CDLL") as library:
        keep_freed()
    assert library.return_value.mallopt.call_count == calls
