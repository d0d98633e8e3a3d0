from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.launch.environment import gpu_mask, leaked, python_path, scrubbed


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SLURM_CPUS_PER_TASK",
        "SLURMD_NODENAME",
        "SRUN_CPUS_PER_TASK",
        "SBATCH_PARTITION",
        "SBATCH_ACCOUNT",
        "PMI_RANK",
        "PMIX_ID",
        "PMI2_X",
        "OMPI_COMM_WORLD_RANK",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "SUBMITIT_EXECUTOR",
        "SUBMITIT_LOCAL_GLOBALID",
        "TRAINKIT_RUN_DIR",
        "TRAINKIT_ATTEMPT",
        "TRAINKIT_SIMULATED_NODES",
    ],
)
def test_what_describes_a_job_or_a_rank_does_not_reach_a_new_one(name: str) -> None:
    assert leaked({name: "1", "HOME": "/"}) == [name]


@pytest.mark.parametrize(
    "name",
    ["HOME", "PATH", "SLURM_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRAINKIT_RUNS", "FRANK", "MY_RANK_X"],
)
def test_everything_else_is_passed_on(name: str) -> None:
    assert scrubbed({name: "1", "RANK": "0"}) == {name: "1"}


@pytest.mark.parametrize(
    ("inherited", "node", "gpus", "mask"),
    [
        (None, 0, 2, "0,1"),
        (None, 1, 2, "2,3"),
        ("5,6", 0, 2, "5,6"),
        ("5,6", 1, 1, "6"),
        ("GPU-a,GPU-b", 1, 1, "GPU-b"),
        (None, 0, 0, ""),
        ("0,1", 1, 0, ""),
    ],
)
def test_simulated_nodes_divide_the_devices_that_were_visible(
    inherited: str | None, node: int, gpus: int, mask: str
) -> None:
    assert gpu_mask(inherited, node, gpus) == mask


def test_the_snapshot_goes_before_the_users_own_path() -> None:
    assert python_path(Path("/run/code"), {"PYTHONPATH": "/mine"}) == "/run/code:/mine"
    assert python_path(Path("/run/code"), {}) == "/run/code"
