"""Survey of a real cluster, and what is refused or foretold before a job is queued there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster
from trainkit.cluster.site_profile import NodeKind, SiteFacts, read_facts

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def limits(devcluster: Cluster) -> Iterator[None]:
    """Partition `low` of one hour and two nodes; taken back afterwards."""
    low = ("scontrol", "update", "PartitionName=low")
    devcluster.run(*low, "MaxTime=60", "MaxNodes=2")
    yield
    devcluster.run(*low, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED")


def discovered(devcluster: Cluster, folder: Path) -> SiteFacts:
    """Return the facts that `jobs.cluster discover` writes into a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cluster", "discover", "found"], cwd=folder, check=False,
        env={**devcluster.env, "PYTHONPATH": str(devcluster.home)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = read_facts(str(folder / "configs" / "clusters" / "found.yaml"))
    assert facts is not None
    return facts


def test_a_real_site_tells_everything_and_its_profile_is_one_to_submit_with(
    devcluster: Cluster, limits: None, tmp_path: Path
) -> None:
    facts = discovered(devcluster, tmp_path)
    assert facts.gaps == ()
    assert devcluster.run("sinfo", "--version").stdout.split()[-1] == facts.version
    by_name = {partition.name: partition for partition in facts.partitions}
    assert [name for name, partition in by_name.items() if partition.default] == ["main"]
    assert by_name["main"].nodes == (NodeKind(4, cpus=8, mem_mb=16000, gpus=4),)
    assert (by_name["low"].max_time, by_name["low"].max_nodes, by_name["main"].max_time) == ("1:00:00", 2, None)
    assert (facts.max_array_size, facts.accounts_enforced, facts.gpu_dialect) == (1001, False, "gpus-per-node")
    profile = str(tmp_path / "configs" / "clusters" / "found.yaml")
    dry = devcluster.job("submit", "ddp", "--cluster", profile, "--dry-run")
    assert "#SBATCH --partition=main\n" in dry.stdout
    assert "#SBATCH --mem=16000M\n" in dry.stdout


def test_the_earliest_start_is_the_schedulers_own_for_each_partition(devcluster: Cluster, limits: None) -> None:
    before = devcluster.run("squeue", "-h", "-o", "%i").stdout
    done = devcluster.job("submit", "ddp", "--nodes", "3", "train.global_batch_size=48", "--estimate")
    said = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(said) == {"main", "low", "high"}
    assert ", on n[" in said["high"]
    assert "low   no: 3 nodes are not possible" in said["low"]
    assert devcluster.run("squeue", "-h", "-o", "%i").stdout == before
