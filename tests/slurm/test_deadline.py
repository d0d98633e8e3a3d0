"""`submit --by` on a real SLURM with accounts: a full queue, a deadline that can be kept, and one that cannot."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.slurm.conftest import NODES, Cluster
from trainkit.cluster.waits import FEW

pytestmark = pytest.mark.slurm

ASKED = ("ddp", "--gpus-per-node", "0", "--time", "10", "model.name=light_model:build", "monitor.loggers=[jsonl]")


@pytest.fixture(scope="module")
def full(devcluster: Cluster, light: dict[str, str]) -> Iterator[Cluster]:
    """A run has told its pace, jobs like it have waited for seconds, and now the nodes are taken for an hour."""
    first = devcluster.job("submit", *ASKED, "train.epochs=2", "--run-dir", "runs/first", env=light).stdout
    found = re.search(r"Submitted job (\d+)", first)
    assert found
    assert devcluster.wait(found[1]) == "COMPLETED", devcluster.logs()
    short = [devcluster.sbatch("--time", "10", "-o", "/dev/null", "--wrap", "true") for _ in range(FEW)]
    for job in short:
        assert devcluster.wait(job) == "COMPLETED"
    wide = devcluster.sbatch("--time", "60", "-o", "/dev/null", f"-N{NODES}", "--exclusive", "--wrap", "sleep 600")
    devcluster.wait_for("the wide job", lambda: devcluster.states(wide) == ["RUNNING"])
    yield devcluster
    devcluster.run("scancel", wide)


def asked(cluster: Cluster, light: dict[str, str], *words: str) -> dict[str, Any]:
    """What `submit --dry-run --json` tells of a deadline."""
    told = json.loads(cluster.job("submit", *ASKED, *words, "--dry-run", "--json", env=light).stdout)["outlook"]
    assert isinstance(told, dict)
    return told


def test_odds_come_from_the_accounts_and_the_start_from_the_queue(full: Cluster, light: dict[str, str]) -> None:
    told = asked(full, light, "train.epochs=2", "--by", "30min")
    rows = {row["nodes"]: row for row in told["rows"]}
    assert list(rows) == [1, 2, 4]
    assert told["nodes"] == 1, told
    assert "though the queue itself expects a later start" in told["says"]
    assert rows[1]["basis"] == "measured"
    assert rows[1]["jobs"] >= FEW
    assert rows[1]["odds"] > 90
    assert rows[1]["start"] > time.time() + 45 * 60


def test_what_takes_too_long_cannot_be_done_and_is_queued_as_asked(full: Cluster, light: dict[str, str]) -> None:
    long = ("train.max_steps=100000000", "--by", "30min")
    told = asked(full, light, *long)
    assert told["nodes"] is None
    assert re.search(r"Cannot be done: even if it started now, .* train.max_steps=\d+ would fit", told["says"])
    done = full.job("submit", *ASKED, *long, "--run-dir", "runs/long", env=light).stdout
    assert re.search(r"Cannot be done.*Submitted job \d+", done, re.DOTALL)
