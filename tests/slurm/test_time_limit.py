"""A training that is longer than its job's time limit, carried through by as many jobs as it takes."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

STEPS = 57
SECONDS = 3.0
"""Duration of a step: all together take longer than three of the attempts, which have a minute each at most."""
SETTINGS = (
    *("train.epochs=3", "train.precision=fp32", "monitor.loggers=[jsonl]", "monitor.log_every=1"),
    *("model.name=own_models:paced", "--nodes", "1", "--gpus-per-node", "0"),
)


def newest_step(run: Path) -> int:
    """Return the newest step of its records."""
    step: int = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return step


@dataclass(frozen=True)
class Limited:
    """A run, its first job, and what `status --json` said of it once its third attempt had come some way."""

    run: Path
    job_id: str
    status: dict[str, Any]
    asked: float


@pytest.fixture(scope="module")
def limited(devcluster: Cluster) -> dict[str, Limited]:
    """Two of the same training, by requeue and by a chain of jobs, side by side and finished."""
    jobs: dict[str, str] = {}
    for name, how in (("requeued", "true"), ("chained", "chain")):
        more = ("--time", "2", "launch.signal_seconds=60", f"launch.requeue={how}")
        jobs[name], run, _ = devcluster.submit(name, *SETTINGS, *more)
        (run / "pace").write_text(str(SECONDS))
    found: dict[str, Limited] = {}
    for name, job_id in jobs.items():
        run = devcluster.home / "runs" / name

        def is_on_its_third(run: Path = run) -> bool:
            begun = devcluster.events(run, "started")
            return len(begun) >= 3 and newest_step(run) >= begun[2]["step"] + 3

        devcluster.wait_for(f"the third attempt of {name}", is_on_its_third, timeout=400)
        (status,) = json.loads(devcluster.job("status", name, "--json").stdout)
        found[name] = Limited(run, job_id, status, time.time())
    for name, one in found.items():

        def has_ended(run: Path = one.run) -> bool:
            return bool(devcluster.events(run, "ended"))

        devcluster.wait_for(f"the end of {name}", has_ended, timeout=600)
    return found


@pytest.mark.parametrize("name", ["requeued", "chained"])
def test_it_takes_four_attempts_or_more_and_none_does_a_step_again(
    devcluster: Cluster, limited: dict[str, Limited], name: str
) -> None:
    one, run = limited[name], limited[name].run
    ended = devcluster.events(run, "ended")[-1]
    assert ended["state"] == "COMPLETED", devcluster.logs()
    begun = [event["step"] for event in devcluster.events(run, "started")]
    assert len(begun) >= 4
    assert begun == sorted(set(begun)), "each has come further than the one before"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "train"] == list(range(1, STEPS + 1))
    # A chain has a job for each attempt, a requeued run has one; `status` and the report show one run.
    jobs = {event["job_id"] for event in devcluster.events(run, "submitted")}
    assert (one.job_id in jobs, len(jobs)) == (True, 1 if name == "requeued" else len(begun))
    assert (one.status["state"], one.status["attempts"], one.status["total_steps"]) == ("RUNNING", 3, STEPS)
    took, estimate = ended["time"] - one.asked, one.status["estimated_end"] - one.asked
    # With the starts to come. On a busy machine, where a start takes as long as an attempt, no two are alike.
    assert took / 2 < estimate < took * 2, (estimate, took, (STEPS - one.status["step"]) * SECONDS)
    listed = devcluster.job("status").stdout.splitlines()
    assert len([line for line in listed if line.startswith(name)]) == 1
    devcluster.job("report", name, "--out", f"report-{name}")
    book = (devcluster.home / f"report-{name}" / "logbook.md").read_text()
    assert f"{len(begun)} ({len(begun) - 1} requeued)" in book


def test_both_end_with_the_same_weights(devcluster: Cluster, limited: dict[str, Limited]) -> None:
    requeued, chained = (devcluster.final_weights(limited[name].run) for name in ("requeued", "chained"))
    assert requeued == chained


def test_a_chain_that_is_cancelled_between_its_jobs_ends(devcluster: Cluster, limited: dict[str, Limited]) -> None:
    first, run, _ = devcluster.submit("broken", *SETTINGS, "--time", "20", "launch.requeue=chain")
    (run / "pace").write_text(str(SECONDS))
    devcluster.wait_for_start(run)
    devcluster.run("scancel", "--signal=USR2", first)
    devcluster.wait_for("the next link", lambda: len(devcluster.events(run, "submitted")) == 2)
    devcluster.job("cancel", "broken")
    second = devcluster.events(run, "submitted")[-1]["job_id"]
    assert devcluster.wait(second) == "CANCELLED"
    why = devcluster.job("why", "broken").stdout
    assert "CANCELLED" in why
    (run / "pace").unlink()
    devcluster.job("resume", "broken")
    third = devcluster.events(run, "submitted")[-1]["job_id"]
    assert third not in (first, second)
    assert devcluster.wait(third) == "COMPLETED", devcluster.logs()
