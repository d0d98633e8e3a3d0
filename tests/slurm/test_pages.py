"""Commands of docs/slurm.md and of the assignments, typed on a cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import readme
from tests.debian import cannot_run
from tests.recipes.conftest import data, fetched  # noqa: F401
from tests.recipes.student import less
from tests.slurm.conftest import DEVCLUSTER, PROJECT, Cluster, _clean_environment, _place, missing

pytestmark = [pytest.mark.slurm, pytest.mark.long]
STANDS_FOR = {"ACCOUNT": "thesis", "PARTITION": "main"}


@pytest.fixture
def home(devcluster: Cluster, data: Path) -> Cluster:  # noqa: F811
    """The cluster, and a home folder with templates and data as in a clone."""
    for name, folder in (("slurm", PROJECT / "slurm"), ("data", data)):
        if not (devcluster.home / name).exists():
            (devcluster.home / name).symlink_to(folder)
    return devcluster


def on_a_cluster(pages: list[Path], *marks: str) -> list[str]:
    """The lines of pages that are given on a cluster."""
    return [line for page in pages for mark, lines in readme.marked(page) for line in lines if mark in marks]


@pytest.mark.parametrize(
    "typed",
    [on_a_cluster([readme.SLURM], "sbatch"), on_a_cluster(sorted(readme.ASSIGNMENTS.glob("*.md")), "slurm", "sbatch")],
    ids=["slurm", "assignments"],
)
def test_the_commands_for_a_cluster_work_as_they_stand(typed: list[str], home: Cluster, light: dict[str, str]) -> None:
    assert any(line.startswith("sbatch ") for line in typed)
    # Nobody downloads here, and no bucket is near: the ranks of this test import no torch and send nothing.
    for line in typed:
        # torchrun has the port where light ranks would meet, and a bench measures: their ranks train, on the CPU.
        trains = "torchrun" in line or "jobs.bench" in line
        here = line
        if "jobs.bench" in line:  # o2 crawls on a CPU
            here = (
                re.sub(r"--gpus-per-node \d", "--gpus-per-node 0 --ntasks-per-node 2", line) + " train.precision=fp32"
            )
        words = re.sub("ACCOUNT|PARTITION", lambda found: STANDS_FOR[found[0]], less(here)).split()
        done = home.run(*words, env={} if trains else light, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        found = re.search(r"Submitted (?:batch )?job (\d+)", done.stdout)
        assert found or not re.search("^sbatch|jobs.(?:submit|bench) (?!.*--(?:dry-run|estimate))", line), done.stdout
        if found:
            assert home.wait(found[1], timeout=400) == "COMPLETED", home.logs()
    runs = {run.name for run in (home.home / "runs").glob("[!.]*")}
    assert any(re.search(r"-job\d+$", name) for name in runs)


@pytest.mark.timeout(900)
def test_the_commands_for_a_cluster_of_ones_own_work_as_they_stand(tmp_path: Path) -> None:
    if reason := missing():
        cannot_run(f"no development cluster: {reason}")
    (lines,) = readme.blocks("devcluster", readme.SLURM)
    assert (lines[0], lines[-1]) == ("slurm/devcluster up", "slurm/devcluster down --purge")
    place = _place(os.getpid(), 1)
    env = {**_clean_environment(), **place, "PYTHONPATH": str(PROJECT), "TRAINKIT_RUNS": str(tmp_path / "runs")}
    script = "\n".join(lines)
    try:
        bash = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(bash, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([str(DEVCLUSTER), "down", "--purge"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert "val acc1" in done.stdout
    assert not Path(place["DEVCLUSTER_DIR"]).exists()
