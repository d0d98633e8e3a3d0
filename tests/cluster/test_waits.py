"""Odds from the waits of earlier jobs, and how the accounts tell these."""

import math

import pytest

from trainkit.cluster.slurm_commands import read_waits
from trainkit.cluster.waits import FEW, PastJob, chance, odds, similar

NOW = 1_000_000.0


def waited(*seconds: float, has_started: bool = True) -> list[PastJob]:
    """Jobs of the same moment that have waited so long."""
    return [PastJob(NOW - 5000, wait, has_started, 1) for wait in seconds]


@pytest.mark.parametrize(
    ("jobs", "seconds", "share"),
    [
        (waited(0, 10, 20, 30), 20, 0.75),
        (waited(0, 10, 20, 30), 0, 0.25),
        (waited(0, 10, 20, 30), -1, 0.0),
        (waited(0, 10, 20, 30), math.inf, 1.0),
        # One of four was cancelled after 15 s: the half that was left then is shared by the other two.
        (waited(0, 20, 30) + waited(15, has_started=False), 10, 0.25),
        (waited(0, 20, 30) + waited(15, has_started=False), 20, 0.625),
        (waited(5, 5, has_started=False), 100, 0.0),
    ],
)
def test_the_odds_are_the_share_that_started_in_time(jobs: list[PastJob], seconds: float, share: float) -> None:
    assert odds(jobs, seconds, NOW) == pytest.approx(share)


def test_newer_jobs_count_more() -> None:
    old = PastJob(NOW - 6 * 86400, 1000, True, 1)
    new = PastJob(NOW, 0, True, 1)
    assert odds([old, new], 10, NOW) == pytest.approx(0.8)


@pytest.mark.parametrize(("waits", "share"), [(1, 1.0), (2, 0.75), (3, 0.5), (4, 5 / 16)])
def test_each_part_waits_again(waits: int, share: float) -> None:
    """Of waits of 0 or 100 s, at most one of 100 s has room in 150 s."""
    assert odds(waited(0, 100), 150, NOW, waits) == pytest.approx(share)


def test_a_fifth_of_the_odds_is_what_all_jobs_tell() -> None:
    like = PastJob(NOW - 5000, 10, True, 1)
    slow = [like._replace(size=100, wait=1000)] * FEW
    told, jobs = chance([like] * FEW + slow, like, 20, NOW)
    assert (round(told or 0.0, 6), jobs) == (0.9, FEW)
    assert chance([like] * (FEW - 1) + slow, like, 20, NOW) == (None, FEW - 1)


def test_similar_jobs_are_of_about_that_size_kind_and_limit() -> None:
    like = PastJob(0, 0, True, 4, limit=3600)
    near = [like._replace(size=8), like._replace(limit=1800)]
    further = [like._replace(size=16), like._replace(limit=4 * 3600)]
    others = [like._replace(size=17), like._replace(on_gpus=True), like._replace(limit=math.inf)]
    jobs = [*near, *further, *others]
    assert similar(jobs, like) == [*near, *further]
    assert similar(near * FEW + further, like) == near * FEW


def test_the_accounts_tell_who_waited_how_long() -> None:
    rows = """
7|ann|2|billing=4,cpu=4,node=2|60|1000|1100|1200
8|bob|1|cpu=8,gres/gpu:a100=4,gres/gpu=4,node=1|UNLIMITED|1000|1000|Unknown
9|bob|1|cpu=1,node=1|5|1500|Unknown|Unknown
10|bob|1|cpu=1,node=1|5|1000|None|1300
11_1|ann|1|cpu=1,node=1|5|1000|1400|1500
11_2|ann|1|cpu=1,node=1|5|1000|1200|1300
11_[3-9%2]|ann|1|cpu=1,node=1|5|1000|Unknown|Unknown
12|ann|1|cpu=1,node=1|5|Unknown|Unknown|Unknown
sacct: error: of a wrapper
"""
    assert read_waits(rows, now=2000) == [
        PastJob(1000, 100, True, 2, limit=3600, user="ann"),
        PastJob(1000, 0, True, 4, on_gpus=True, user="bob"),
        PastJob(1500, 500, False, 1, limit=300, user="bob"),
        PastJob(1000, 300, False, 1, limit=300, user="bob"),
        PastJob(1000, 200, True, 1, limit=300, user="ann"),
    ]
