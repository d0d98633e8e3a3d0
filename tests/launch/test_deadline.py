"""Whether a run can be done in time: its pace, its parts, and the answer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.cluster.site import ComputeNode, Partition, Site
from trainkit.config.loading import load
from trainkit.launch.deadline import Outlook, Pace, Row, advice, lines, row_of, update_seconds
from trainkit.launch.planning import make_plan

CONFIG = load("ddp", ["train.epochs=10"]).config
HOUR = 3600.0


def pace(nodes: int, ranks: int, update: float, updates: int = 100) -> Pace:
    return Pace(nodes, ranks, update * updates, updates, 60.0, 100, "cpu")


@pytest.mark.parametrize(
    ("paces", "ranks", "seconds", "basis"),
    [
        ([pace(1, 2, 4.0)], 2, 4.0, "measured"),
        ([pace(1, 2, 4.0, 90), pace(1, 2, 14.0, 10)], 2, 5.0, "measured"),
        ([pace(1, 2, 4.0)], 4, 2.0, "not measured"),
        # 2 s that more ranks do not shorten, and 8 s that they share.
        ([pace(1, 1, 10.0), pace(2, 2, 6.0)], 4, 4.0, "by the runs on 1 and 2 ranks"),
        ([pace(1, 1, 10.0), pace(1, 2, 6.0)], 4, 3.0, "not measured"),
        ([pace(1, 1, 5.0), pace(2, 2, 6.0)], 4, 3.0, "not measured"),
    ],
)
def test_the_pace_is_measured_or_says_what_it_rests_on(
    paces: list[Pace], ranks: int, seconds: float, basis: str
) -> None:
    found = update_seconds(paces, ranks)
    assert found[0] == pytest.approx(seconds)
    assert basis in found[1]


def in_jobs_of(time: str, *overrides: str) -> Row:
    """A run of 10 h on one node, in jobs with such a time limit."""
    partition = Partition("main", (ComputeNode("n1", cpus=4, gpus=0),), default=True)
    site = Site("slurm", 0, 2, partitions=(partition,))
    flags = {"launch.time": (time, "--time"), "launch.gpus_per_node": (0, "--gpus-per-node")}
    plan = make_plan(load("ddp", overrides, flags=flags), site, Path("/runs/one"))
    plan = replace(plan, lead_seconds=60)
    return row_of(plan, [pace(1, 1, 36.0)], 1000)


@pytest.mark.parametrize(
    ("row", "parts", "refusal"),
    [
        (in_jobs_of("12:00:00"), 1, ""),
        (in_jobs_of("4:00:00"), 3, ""),
        (in_jobs_of("2:00:00"), 6, ""),
        (in_jobs_of("2"), 1, "shorter than its start"),
        (in_jobs_of("4:00:00", "launch.requeue=false"), 3, "launch.requeue is false"),
    ],
)
def test_a_run_that_is_longer_than_a_job_becomes_parts(row: Row, parts: int, refusal: str) -> None:
    assert row.parts == parts
    assert refusal in row.refusal
    assert bool(refusal) == bool(row.refusal)
    assert row.seconds == 10 * HOUR + parts * 60


ONE = Row(1, 10 * HOUR, 10.0, 1, "measured")
TWO = Row(2, 6 * HOUR, 12.0, 1, "measured")


@pytest.mark.parametrize(
    ("rows", "deadline", "budget", "nodes", "says"),
    [
        ([ONE._replace(odds=0.95), TWO._replace(odds=0.99)], 20, None, 1, "Take 1 node."),
        ([ONE._replace(odds=0.5), TWO._replace(odds=0.9)], 20, None, 2, "Take 2 nodes."),
        ([ONE._replace(odds=0.95, start=15 * HOUR)], 20, None, 1, "though the queue itself expects a later start"),
        ([ONE._replace(odds=0.5), TWO._replace(odds=0.8)], 20, None, None, "80 %, on 2 nodes"),
        ([ONE._replace(start=HOUR, jobs=3)], 20, None, 1, "by the queue's word alone"),
        ([ONE._replace(start=0.0)], 20, None, 1, "Take 1 node."),
        ([ONE._replace(start=15 * HOUR)], 20, None, None, "Not likely"),
        ([ONE], 20, None, None, "Unknown: neither the queue nor the accounts"),
        ([ONE, TWO], 3, None, None, "train.epochs=5 would fit"),
        ([ONE, TWO], 0.1, None, None, "Not one epoch would fit"),
        ([ONE._replace(start=0.0), TWO._replace(start=HOUR)], None, 12, 2, "2 nodes would be done first"),
        ([ONE._replace(start=0.0), TWO._replace(start=HOUR)], None, 11, 1, "1 node would be done first"),
        ([ONE, TWO], None, 4, None, "at least 10 GPU-hours. train.epochs=4 would fit"),
        ([ONE._replace(odds=0.5), TWO._replace(odds=1.0)], 20, 11, None, "50 %"),
        ([ONE._replace(refusal="of a limit")], 20, None, None, "Cannot be done: of a limit."),
    ],
)
def test_the_cheapest_that_is_sure_enough_is_taken(
    rows: Sequence[Row], deadline: float | None, budget: float | None, nodes: int | None, says: str
) -> None:
    until = None if deadline is None else deadline * HOUR
    found = advice(rows, until, budget, 0.0, CONFIG, "GPU-hours")
    assert found[0] == nodes
    assert says in found[1]


def test_of_updates_too_at_least_one_must_fit() -> None:
    config = load("ddp", ["train.max_steps=10"]).config
    assert "train.max_steps=4 would fit" in advice([ONE], None, 4, 0.0, config, "GPU-hours")[1]
    assert "Not one update would fit" in advice([ONE], None, 0.1, 0.0, config, "GPU-hours")[1]


def test_the_table_fits_into_80_columns() -> None:
    rows = [
        Row(1, 100 * HOUR, 800.0, 5, "measured", 0.0, None, 12),
        Row(16, 30 * HOUR, 3840.0, 2, "measured", 0.0, 0.85, 1234),
        Row(32, 30 * HOUR, 7680.0, 2, "measured"),
    ]
    found = lines(Outlook(0.0, 140 * HOUR, 4000.0, rows, 16, "Take 16 nodes.", ()))
    assert max(map(len, found)) <= 80
    assert [line[67:].strip() for line in found[1:5]] == ["odds (jobs)", "- (12)", "85 % (1234)", "-"]
    assert found[-1] == "Take 16 nodes."
    late = lines(Outlook(0.0, 20 * HOUR, None, rows[2:], None, "", (), price=(0.5, "EUR")))
    assert ("3840.00 EUR" in late[2], late[2].endswith("too late")) == (True, True)
