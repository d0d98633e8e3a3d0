"""The profiles in configs/clusters: each is a dialect that sites speak, and what a job asks for there is held here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.config.loading import load
from trainkit.launch.batch_script import batch_script
from trainkit.launch.plan import make_plan
from trainkit.site.profile import Site

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))
ELSEWHERE = Site(True, 0, 2, unknown="this test is on no login node")

COMMON = ["open-mode=append", "output=/runs/x/logs/batch.out"]
GOLDEN = {
    "plain": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=4:00:00", "signal=USR2@90"),
        *("requeue", *COMMON),
    ],
    "gres": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gres=gpu:a100:4", "time=8:00:00", "partition=gpu"),
        *("signal=USR2@90", "requeue", *COMMON),
    ],
    "constraint": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "cpus-per-task=16", "time=2:00:00", "account=thesis"),
        *("constraint=gpu", "signal=USR2@90", "requeue", *COMMON),
    ],
    "apptainer": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=4:00:00", "partition=gpu"),
        *("signal=USR2@90", "requeue", *COMMON),
    ],
    "conda_modules": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=4:00:00", "partition=gpu"),
        *("signal=USR2@90", "requeue", *COMMON),
    ],
    "cloud": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=12:00:00", "partition=gpu"),
        *("signal=USR2@90", "requeue", *COMMON, "wait-all-nodes=1"),
    ],
    "devcluster": [
        *("job-name=ddp", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=1", "time=10:00", "mem=4G"),
        *("partition=main", "signal=USR2@90", "requeue", *COMMON),
    ],
}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_cluster_profile_loads_and_is_outranked_by_flags(profile: Path) -> None:
    flags = {"launch.cluster": (profile.stem, "--cluster"), "launch.time": ("5", "--time")}
    loaded = load("ddp", flags=flags)
    assert loaded.config.launch.time == "5"
    assert any(source.kind == "cluster profile" for source in loaded.sources.values())


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_what_a_job_asks_for_at_each_kind_of_site(profile: Path) -> None:
    flags = {
        "launch.cluster": (profile.stem, "--cluster"),
        "launch.nodes": (2, "--nodes"),
        "launch.gpus_per_node": (4, "--gpus-per-node"),
    }
    if profile.stem == "constraint":
        flags["launch.account"] = ("thesis", "--account")
    plan = make_plan(load("ddp", flags=flags), ELSEWHERE, Path("/runs/x"))
    written = [item.name if item.value is None else f"{item.name}={item.value}" for item in plan.directives]
    assert written == GOLDEN[profile.stem]


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("apptainer", ["module load apptainer", "apptainer exec --nv", "trainkit.sif"]),
        ("conda_modules", ["module load cuda/12.4 miniforge3", "conda activate trainkit", "WANDB_MODE:-offline"]),
    ],
)
def test_what_a_profile_brings_beyond_directives_is_in_the_script(profile: str, words: list[str]) -> None:
    flags = {"launch.cluster": (profile, "--cluster"), "launch.gpus_per_node": (4, "--gpus-per-node")}
    plan = make_plan(load("ddp", flags=flags), ELSEWHERE, Path("/runs/x"))
    script = batch_script(plan, Path("/runs/x"), cwd=Path("/home/me"), python="/usr/bin/python3")
    assert [word for word in words if word not in script] == []
