"""A job whose first node is bad for real, on a real SLURM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.slurm.test_check import mounted

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


def test_a_job_goes_on_without_the_node_that_fails_its_preflight(devcluster: Cluster, light: dict[str, str]) -> None:
    full = devcluster.home / "full"
    full.mkdir()
    arguments = ("single", "--preflight", "--cluster", "devcluster", "--exclude", "n3,n4", "--run-dir", "preflight")
    # The first of those that are idle is taken: it must be n1.
    devcluster.wait_for(
        "n1", lambda: devcluster.run("sinfo", "-h", "-N", "-n", "n1", "-o", "%T").stdout.split()[:1] == ["idle"]
    )
    with mounted(devcluster, "n1", full, "-t tmpfs -o size=2m tmpfs"):
        submitted = devcluster.job("submit", *arguments, "train.max_steps=1", env={**light, "TMPDIR": str(full)}).stdout
        job_id = submitted.split("Submitted job ")[1].split(":")[0]
        assert devcluster.wait(job_id) == "COMPLETED"
    run = devcluster.home / "preflight"
    words = f"failed preflight: disk: {full}: 2 MB free"
    assert [(event["node"], event["why"]) for event in devcluster.events(run, "excluded")] == [("n1", words)]
    assert [event["hosts"] for event in devcluster.events(run, "started")] == [["n2"]]
