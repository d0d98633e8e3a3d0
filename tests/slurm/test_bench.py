"""A bench on a real SLURM: all of its arms in one job, in turns on the same nodes."""

from __future__ import annotations

import json
import re
import statistics
import time
from typing import TYPE_CHECKING

import pytest

from trainkit.bench.base import CONTROL

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SMALL = ("--gpus-per-node", "1", "--rounds", "3", "monitor.loggers=[]", "train.precision=fp32")


def test_all_arms_are_one_job_whose_figures_are_those_of_its_samples(devcluster: Cluster) -> None:
    words = ("--nodes", "2", "--updates", "3", "--run-dir", "runs/scaled")
    said = devcluster.job("bench", "scaling", "ddp", *SMALL, *words).stdout
    match = re.search(r"Submitted job (\d+): 2 nodes x 1 rank", said)
    assert match, said
    assert "jobs.bench --show" in said
    assert devcluster.wait(match[1], timeout=240) == "COMPLETED", devcluster.logs()
    assert devcluster.states(match[1]) == ["COMPLETED"]
    shown = json.loads(devcluster.job("bench", "--show", "runs/scaled", "--json").stdout)
    assert "2 ranks on n1, n2" in shown["where"]
    taken = {
        name: [one["seconds"] for one in sorted(shown["samples"], key=lambda one: one["round"]) if one["arm"] == name]
        for name in ("1 rank", "2 ranks", CONTROL)
    }
    one, two, again = taken.values()
    by_hand = [(first + second) / 2 / both for first, second, both in zip(one, again, two, strict=True)]
    arm = next(arm for arm in shown["arms"] if arm["name"] == "2 ranks")
    assert arm["ratios"] == pytest.approx(by_hand)
    assert arm["ratio"] in (None, pytest.approx(statistics.median(by_hand)))
    assert arm["exposed_share"] > 0
    table = devcluster.job("bench", "--show", "runs/scaled").stdout
    assert [line.split("  ")[0] for line in table.splitlines() if " rank" in line[:8]][:2] == ["1 rank", "2 ranks"]


def test_a_bench_that_nears_its_time_limit_or_is_cancelled_tells_what_it_has(devcluster: Cluster) -> None:
    words = ("--seconds", "1", "--rounds", "400", "--run-dir", "runs/cut", "--nodes", "1")
    said = devcluster.job("bench", "amp", "ddp", *SMALL, *words).stdout
    job = re.search(r"Submitted job (\d+)", said)
    samples = devcluster.home / "runs" / "cut" / "samples.jsonl"

    def has_three_rounds() -> bool:
        return samples.exists() and samples.read_text().count('"control"') >= 4

    devcluster.wait_for("three rounds", has_three_rounds, timeout=240)
    assert job is not None
    before = time.monotonic()
    devcluster.run("scancel", "--signal=USR2", job[1])  # as SLURM does before the time limit
    assert devcluster.wait(job[1]) == "COMPLETED"
    assert time.monotonic() - before < 60
    table = devcluster.job("bench", "--show", "runs/cut").stdout
    assert re.search(r"Note: It was told to stop after \d+ of 400 rounds\.", table), table
    assert "fp32" in table
