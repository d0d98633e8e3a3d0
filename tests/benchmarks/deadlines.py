"""How good the odds of `submit --by` are: a recorded log of jobs, replayed through them.

    TRACES=wagap-2013.swf:hpc2n.swf python -m tests.benchmarks --only deadlines --write

TRACES are logs in the Standard Workload Format of the Parallel Workloads Archive. A thousand jobs from the fifth week
on are asked, when they are submitted, whether they start within 10 minutes, 1, 4, 12, 24 and 72 hours. Known then is
what the accounts of `DAYS` days would say at that moment: which jobs have started, and how long the others have waited.
The control tells the share of all these jobs that has started in time, whatever their sizes and limits. The logs do not
have what the queue itself expected.
"""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

from tests.benchmarks.measuring import Figure, Table
from trainkit.cluster.waits import DAYS, PastJob, chance

HOURS = (1 / 6, 1, 4, 12, 24, 72)
MOST = 1000
"""Jobs of a log that are asked, evenly over it."""
BANDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def jobs_of(log: Path) -> list[PastJob]:
    """Read a log, as the accounts have it after its end. A job that has never started was cancelled while it waited."""
    found = []
    for line in log.read_text().splitlines():
        fields = line.split()
        if not fields or line.startswith(";") or float(fields[2]) < 0:
            continue
        submitted, wait, seconds, processors = map(float, fields[1:5])
        size = max(float(fields[7]), processors, 1.0)
        limit = float(fields[8]) if float(fields[8]) > 0 else math.inf
        found.append(PastJob(submitted, wait, seconds >= 0, size, limit=limit, user=fields[11]))
    return sorted(found)


def as_seen(jobs: Sequence[PastJob], now: float) -> list[PastJob]:
    """What the accounts have of them at a moment: of those that wait, that they have waited until then."""
    seen = []
    for job in jobs:
        if now - DAYS * 86400 <= job.eligible < now:
            if job.eligible + job.wait >= now:
                job = job._replace(wait=now - job.eligible, has_started=False)
            seen.append(job)
    return seen


def answers(jobs: Sequence[PastJob]) -> Iterator[tuple[float, float, bool]]:
    """What was told of each job and number of hours, what the control told, and whether it came true."""
    since = jobs[0].eligible + DAYS * 86400
    asked = [job for job in jobs if job.eligible >= since and job.has_started]
    for job in islice(asked, 0, None, max(len(asked) // MOST, 1)):
        seen = as_seen(jobs, job.eligible)
        for hours in HOURS:
            seconds = hours * 3600
            told, _ = chance(seen, job, seconds, job.eligible)
            if told is None:
                break
            started = [other for other in seen if other.has_started or other.wait > seconds]
            base = sum(other.wait <= seconds for other in started) / max(len(started), 1)
            yield told, base, job.wait <= seconds


def measure(rounds: int = 1) -> list[Table]:
    """The table: what was told, and how often it came true."""
    rows = []
    figures = []
    for log in map(Path, os.environ["TRACES"].split(os.pathsep)):
        found = list(answers(jobs_of(log)))
        for low, high in pairwise(BANDS):
            of_band = [(told, true) for told, _, true in found if low <= told < high or told == high == 1]
            if of_band:
                means = [f"{100 * sum(column) / len(of_band):.0f} %" for column in zip(*of_band, strict=True)]
                rows.append((log.stem, f"{100 * low:.0f} to {100 * high:.0f} %", str(len(of_band)), *means))
        own = sum((told - true) ** 2 for told, _, true in found) / len(found)
        control = sum((base - true) ** 2 for _, base, true in found) / len(found)
        goal = f"below {control:.3f}, that of the share of all jobs"
        figures.append(Figure(f"Brier score on {log.stem}", f"{own:.3f}", goal=goal, met=own < control))
    return [Table(("log", "told", "answers", "mean of them", "came true"), rows, figures)]
