"""The commands of README.md, docs/slurm.md and docs/bench.md, on a cluster."""

import re
import shlex

import pytest

from tests import readme
from tests.light_experiment import PAUSE
from tests.slurm.conftest import Cluster

PAGES = (readme.README, readme.SLURM, readme.DOCS / "bench.md")

pytestmark = pytest.mark.slurm


def test_the_commands_for_a_cluster_work_as_they_stand(devcluster: Cluster, light: dict[str, str]) -> None:
    (devcluster.home / "slurm").symlink_to(readme.README.parent / "slurm")
    env = {**light, PAUSE: "3"}  # as long as it takes to look at a run and to cancel it
    for block in (block for page in PAGES for block in readme.blocks("slurm", page)):
        said = ""
        for line in block:
            words = shlex.split(line)
            if words[:2] == ["python", "-m"] and words[2].startswith("jobs."):
                done = devcluster.job(words[2].removeprefix("jobs."), *words[3:], check=False, env=env)
            else:
                done = devcluster.run(*words, check=False, env=env)
            # The templates name an account and a partition that nobody has: these two lines are for the user to edit.
            expected = 1 if line.startswith("sbatch") else 0
            assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"
            if line.startswith("sbatch"):
                assert "CHANGE_ME" in line + done.stderr or "invalid partition" in done.stderr
            said += done.stdout
        for job in re.findall(r"Submitted job (\d+)", said):  # eight ranks need not train to the end
            devcluster.run("scancel", job, check=False)
