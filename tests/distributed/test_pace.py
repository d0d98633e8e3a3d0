"""How long a rank may compute when all ranks do: by the pace of its own computations."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainkit.cluster.signals import KEEPER, KeeperLink
from trainkit.distributed.watchdog import FIRST, Pace, compiles

HANG = 600.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test changes."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def computed(pace: Pace, now: list[float], *seconds: float) -> Pace:
    for each in seconds:
        pace.enter()
        now[0] += each
        pace.leave()
    return pace


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [((0.1, 0.2), 60.0), ((1.0, 5.0, 1.0), 100.0), ((100.0,), HANG), ((200.0,), 1000.0)],
    ids=["not below the floor", "20 times the slowest", "not above launch.hang_seconds", "but 5 times what is usual"],
)
def test_the_limit_follows_the_slowest_recent_computation(
    now: list[float], seconds: tuple[float, ...], limit: float
) -> None:
    assert computed(Pace(None, HANG), now, *seconds).limit == limit


def test_a_slow_one_is_forgotten_in_time(now: list[float]) -> None:
    assert computed(Pace(None, HANG), now, 30.0, *[0.1] * 100).limit == 60.0


def test_a_rank_computes_for_its_keeper_once_its_pace_is_known(tmp_path: Path, now: list[float]) -> None:
    link = KeeperLink.make(tmp_path)
    variable = link.variable()[KEEPER].replace(str(os.getpid()), str(os.getppid()), 1)  # as in a child of this process
    there = KeeperLink.named_in({KEEPER: variable})
    assert there is not None
    pace = Pace(there, HANG)
    for _ in range(FIRST):  # the first may compile the model
        pace.enter()
        assert link.phase is None
        pace.leave()
    pace.enter()
    first = link.phase
    assert (first is None, link.limit) == (False, 60.0)
    pace.leave()
    assert link.phase is None
    pace.enter()
    assert link.phase not in (None, first)


def test_a_compiler_at_work_is_seen_and_what_it_has_compiled_is_none() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(compiles(sys._getframe()))

        def run(*values: object) -> object:
            seen.append(compiles(sys._getframe()))
            return graph.forward(*values)

        return run

    def added(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    compiled = torch.compile(added, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2))
    assert seen == [True, False, False]
