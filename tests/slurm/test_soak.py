"""A few interruptions of `python -m tests.soak`, which does as many as one likes."""

import random

import pytest

from tests.slurm.conftest import Cluster
from tests.soak import cluster as soaked
from tests.soak.training import Soak

pytestmark = pytest.mark.slurm


NODES = ("n1", "n2", "n3", "n4")


@pytest.mark.long
def test_a_run_that_is_interrupted_at_random_ends_as_if_nothing_had_happened(devcluster: Cluster) -> None:
    cluster = soaked.Cluster(devcluster.home, devcluster.env, (), NODES)
    soak = Soak(cluster, random.Random(3), kinds=("kill", "usr2"), nodes=1)
    said: list[str] = []
    assert soak.soak(2, said.append) == [], f"{said}{devcluster.logs()}"
    assert (len(said), soak.resumed) == (2, [])
