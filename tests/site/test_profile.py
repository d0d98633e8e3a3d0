"""The profiles in configs/clusters: each is a dialect that sites speak, and what a job asks for there is held here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.config.loading import load
from trainkit.launch.plan import make_plan
from trainkit.schedulers.slurm_script import batch_script
from trainkit.site.profile import Site, count_gpus, discover, read_nodes, read_partitions, visible_gpus

# As a SLURM 22.05.8 printed them, but for what one cluster does not have at once: a drained node, a reason, limits.
NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=6.76 AvailableFeatures=(null) \
ActiveFeatures=(null) Gres=gpu:4 NodeAddr=10.99.7.1 NodeHostName=n1 Version=22.05.8 OS=Linux 6.18.44 #1 SMP \
RealMemory=16000 AllocMem=0 FreeMem=17113 Sockets=8 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 \
Partitions=main,low,high  BootTime=2026-11-20T09:43:57 CfgTRES=cpu=8,mem=16000M,billing=8,gres/gpu=4 AllocTRES=
NodeName=n2 CPUEfctv=6 CPUTot=8 Gres=gpu:a100:2(S:0-1),nvme:1 State=IDLE+DRAIN ThreadsPerCore=1 \
Reason=disk is bad [root@x]
NodeName=n3 CPUTot=16 Gres=(null) State=MIXED
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=00:05:00 \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-3] PriorityTier=10 \
State=UP TotalCPUs=32 TotalNodes=3 TRES=cpu=32,mem=62.50G,node=4,billing=32,gres/gpu=16
PartitionName=short Default=NO MaxNodes=2 MaxTime=1-12:00:00 Nodes=n1 State=UP
PartitionName=closed Default=NO MaxNodes=1 MaxTime=00:30:00 Nodes=(null) State=INACTIVE
"""


def test_nodes_and_partitions_are_read_whatever_stands_around_them() -> None:
    nodes = read_nodes(NODES)
    found = [(node.name, node.cpus, node.gpus, node.up) for node in nodes.values()]
    assert found == [("n1", 8, 4, True), ("n2", 6, 2, False), ("n3", 16, 0, True)]
    site = Site("slurm", 0, 1, read_partitions(PARTITIONS, nodes))
    main, short, closed = site.partitions
    assert site.partition(None) == site.partition("main") == main
    assert site.partition("nosuch") is None
    assert (short.max_time_min, short.max_nodes, [node.name for node in short.nodes]) == (36 * 60, 2, ["n1"])
    assert (closed.up, closed.max_time_min, closed.nodes) == (False, 30, ())


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:4", 4), ("gpu", 1), ("gpu:a100:8", 8), ("gpu:a100:4(S:0-1)", 4), ("(null)", 0), ("nvme:2", 0), ("", 0),
     ("gpu:a100:2(S:0),gpu:t4:1(S:1),nvme:1", 3)],
)  # fmt: skip
def test_gpus_are_counted_in_generic_resources(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


@pytest.mark.parametrize(
    ("mask", "present", "count"),
    [(None, 4, 4), ("", 4, 0), ("0,1", 4, 2), ("5,6", 8, 2), ("5,6", 4, 0), ("0,-1,1", 4, 1), ("1,1", 4, 1),
     ("GPU-8932f937,GPU-11111111", 4, 2), ("0", 0, 0)],
)  # fmt: skip
def test_the_visible_device_mask_is_counted_as_cuda_reads_it(mask: str | None, present: int, count: int) -> None:
    assert visible_gpus(mask, present) == count


def test_a_machine_without_sbatch_has_no_slurm(tmp_path: Path) -> None:
    assert not discover({"PATH": str(tmp_path)}).scheduler


@pytest.mark.parametrize(
    ("scontrol", "is_slurm", "known", "unknown"),
    [
        (f"if [ $2 = node ]; then cat <<'E'\n{NODES}\nE\nelse cat <<'E'\n{PARTITIONS}\nE\nfi", True,
         ["main", "short", "closed"], ""),
        ("echo 'slurm_load_node: Unable to contact slurm controller' >&2; exit 1", True, [], "Unable to contact"),
        ("echo 'fatal: Could not establish a configuration source' >&2; exit 1", False, [],
         "configured for no cluster"),
    ],
    ids=["a login node", "no answer", "packages without a cluster"],
)  # fmt: skip
def test_a_login_node_tells_its_partitions_or_why_it_does_not(
    fake_command: Callable[[str, str], Path], scontrol: str, is_slurm: bool, known: list[str], unknown: str
) -> None:
    fake_command("sbatch", "exit 1")
    fake_command("scontrol", scontrol)
    site = discover(dict(os.environ))
    assert bool(site.scheduler) == is_slurm
    assert [partition.name for partition in site.partitions] == known
    assert unknown in site.unknown


PROFILES = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))
ELSEWHERE = Site("slurm", 0, 2, unknown="this test is on no login node")

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
