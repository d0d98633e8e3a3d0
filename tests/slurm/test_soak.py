"""A few interruptions of `python -m tests.soak`, which does as many as one likes."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from tests.soak import cluster as soaked
from tests.soak.training import Soak

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


NODES = ("n1", "n2", "n3", "n4")


@pytest.mark.long
def test_a_run_that_is_interrupted_at_random_ends_as_if_nothing_had_happened(devcluster: Cluster) -> None:
    cluster = soaked.Cluster(devcluster.home, devcluster.env, (), NODES)
    soak = Soak(cluster, random.Random(3), kinds=("kill", "usr2"), nodes=1)
    said: list[str] = []
    assert soak.soak(2, said.append) == [], f"{said}{devcluster.logs()}"
    assert (len(said), soak.resumed) == (2, [])


def test_the_soak_sees_a_process_that_is_left_on_a_node(devcluster: Cluster) -> None:
    devcluster.run(soaked.DEVCLUSTER, "exec", "n4", "sh", "-c", "sleep 77 >/dev/null 2>&1 &")
    cluster = soaked.Cluster(devcluster.home, devcluster.env, (), NODES)
    left = [process for process in cluster.processes() if process.command == "sleep 77"]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert [process.node for process in left] == ["n4"]
