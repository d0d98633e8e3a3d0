"""Waits in a queue: what a site's accounts tell of earlier jobs, and the odds that they give the next one.

A job that still waits, or was cancelled while it did, has waited at least so long: it counts until then, as Kaplan and
Meier have it. Newer jobs count more, for a queue of today is like that of yesterday (tests/benchmarks/deadlines.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

DAYS = 28
"""Days of the past that are asked for."""
FEW = 20
"""From fewer similar jobs no odds are told."""
_ALIKE = (2.0, 4.0)
"""Factors within which sizes and time limits are similar; the second where the first finds few."""
_HALF_LIFE = 3 * 86400.0
"""Seconds after which a job counts half."""
_DOUBT = 0.2
_PIECES = 200
"""Steps into which the time for several waits is cut."""


class PastJob(NamedTuple):
    """A job that had to wait. Times in seconds."""

    eligible: float
    """When it began to wait, since 1970."""
    wait: float
    has_started: bool
    """False: it still waits, or was cancelled after that long."""
    size: float
    """Its GPUs, or its nodes if it has none."""
    on_gpus: bool = False
    limit: float = math.inf
    user: str = ""


def chance(
    jobs: Sequence[PastJob], like: PastJob, seconds: float, now: float, waits: int = 1
) -> tuple[float | None, int]:
    """Return the odds that so many waits of such a job take at most ``seconds``, and the number of similar jobs.

    A fifth of the odds is what all jobs tell: similar ones are often of one user and hour, and then too sure.
    """
    alike = similar(jobs, like)
    if len(alike) < FEW:
        return None, len(alike)
    own = odds(alike, seconds, now, waits)
    return own + _DOUBT * (odds(jobs, seconds, now, waits) - own), len(alike)


def similar(jobs: Sequence[PastJob], like: PastJob) -> list[PastJob]:
    """Select the jobs of about the same size and time limit."""
    found: list[PastJob] = []
    for factor in _ALIKE:
        found = []
        for job in jobs:
            is_alike = job.on_gpus == like.on_gpus and _is_near(job.size, like.size, factor)
            if is_alike and _is_near(job.limit, like.limit, factor):
                found.append(job)
        if len(found) >= FEW:
            break
    return found


def _is_near(one: float, other: float, factor: float) -> bool:
    return one == other or (one <= factor * other and other <= factor * one and max(one, other) < math.inf)


def odds(jobs: Sequence[PastJob], seconds: float, now: float, waits: int = 1) -> float:
    """Return the share of jobs like these whose wait, or so many waits together, takes at most ``seconds``.

    Several waits of one run are taken as independent of one another.
    """
    if seconds < 0:
        return 0.0
    pieces = [0.0] * (_PIECES + 1)
    for wait, share in _shares(jobs, now):
        if wait <= seconds:
            pieces[math.ceil(wait / seconds * _PIECES) if wait else 0] += share
    if waits == 1:
        return min(sum(pieces), 1.0)
    together = [1.0] + [0.0] * _PIECES
    for _ in range(waits):
        sums = []
        for at in range(_PIECES + 1):
            sums.append(sum(together[before] * pieces[at - before] for before in range(at + 1)))
        together = sums
    return min(sum(together), 1.0)


def _shares(jobs: Sequence[PastJob], now: float) -> list[tuple[float, float]]:
    """Return each wait that has ended in a start, and the share of all jobs whose wait ends so."""
    weighed = []
    for job in sorted(jobs, key=lambda job: (job.wait, not job.has_started)):
        weighed.append((job, 0.5 ** ((now - job.eligible) / _HALF_LIFE)))
    found = []
    waiting = sum(weight for _, weight in weighed)
    left = 1.0
    for job, weight in weighed:
        if job.has_started:
            share = left * min(weight / waiting, 1.0)
            found.append((job.wait, share))
            left -= share
        waiting = max(waiting - weight, 1e-12)
    return found
