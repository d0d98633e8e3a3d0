"""Environments as launchers set them, and the rank that follows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.ranks import env as ranks_env
from trainkit.ranks.env import (
    NO_SECRET,
    PORTS,
    VARIABLE,
    ForgedError,
    RankEnv,
    Secret,
    candidates,
    check_head,
    derived_port,
    device_index,
    ephemeral_range,
    expand,
    expand_counts,
    fold,
    free_port,
    start_for,
)

Env = dict[str, str]

# What SLURM 22.05 gives to task 3 of `srun` in an `sbatch -N2 --ntasks-per-node=2`, less what says nothing about ranks.
SRUN_TASK: Env = {
    "SLURM_JOB_ID": "118",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH_SHELL: Env = {
    **{name: value for name, value in SRUN_TASK.items() if "STEP" not in name},
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SALLOC_SHELL: Env = {
    name: value for name, value in BATCH_SHELL.items() if name not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
}
TORCHRUN: Env = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
OPEN_MPI: Env = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n1",
}
INTEL_MPI: Env = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n1",
}
SUBMITIT_LOCAL: Env = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4242",
    "SUBMITIT_LOCAL_GLOBALID": "2",
    "SUBMITIT_LOCAL_LOCALID": "2",
    "SUBMITIT_LOCAL_NTASKS": "4",
    "TRAINKIT_SIMULATED_NODES": "2",
}
# What a command job with `distribution: {type: pytorch}` has: neither torchrun's id nor LOCAL_WORLD_SIZE.
AZURE_ML: Env = {
    "AZUREML_NODE_COUNT": "2", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "NODE_RANK": "1",
}  # fmt: skip
HAND_SET: Env = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def place(env: Env) -> tuple[int, int, int, int, int, int]:
    found = RankEnv.from_mapping(env)
    return (
        *(found.rank, found.world_size),
        *(found.local_rank, found.local_world_size),
        *(found.node_rank, found.num_nodes),
    )


@pytest.mark.parametrize(
    ("env", "launcher", "expected"),
    [
        (SRUN_TASK, "slurm", (3, 4, 1, 2, 1, 2)),
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1, 2)),
        (OPEN_MPI, "mpi", (3, 4, 1, 2, 1, 2)),
        (INTEL_MPI, "mpi", (2, 4, 0, 2, 1, 2)),
        (SUBMITIT_LOCAL, "submitit-local", (2, 4, 0, 2, 1, 2)),
        (HAND_SET, "manual", (1, 2, 0, 1, 1, 2)),
        (AZURE_ML, "manual", (2, 4, 0, 2, 1, 2)),
        ({}, "single", (0, 1, 0, 1, 0, 1)),
    ],
    ids=["srun", "torchrun", "open-mpi", "intel-mpi", "submitit-local", "hand-set", "azure-ml", "single"],
)
def test_each_launcher_gives_every_rank_its_place(env: Env, launcher: str, expected: tuple[int, ...]) -> None:
    assert place(env) == expected
    assert RankEnv.from_mapping(env).launcher == launcher


# ---------------------------------------------------------------- SLURM


def test_the_head_node_of_a_step_is_the_first_of_its_hosts() -> None:
    assert RankEnv.from_mapping(SRUN_TASK).master_addr == "n1"


def test_the_hosts_of_a_step_are_known_by_node_rank() -> None:
    assert RankEnv.from_mapping(SRUN_TASK).hosts == ("n1", "n2")


def test_a_step_on_part_of_an_allocation_has_the_steps_head_node_and_size() -> None:
    step = {
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
    }
    found = RankEnv.from_mapping({**SRUN_TASK, **step})
    assert (found.master_addr, found.world_size, found.num_nodes) == ("n2", 2, 1)


def test_an_uneven_step_has_its_own_number_of_ranks_on_each_node() -> None:
    uneven = {**SRUN_TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert place(uneven) == (3, 4, 0, 1, 1, 2)


def test_the_batch_scripts_head_node_and_port_are_taken_over() -> None:
    found = RankEnv.from_mapping({**SRUN_TASK, "MASTER_ADDR": "ib-n1", "MASTER_PORT": "21234"})
    assert (found.master_addr, found.master_port) == ("ib-n1", 21234)


def test_without_a_port_all_ranks_of_a_job_derive_the_same_one() -> None:
    other = {**SRUN_TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert RankEnv.from_mapping(SRUN_TASK).master_port == RankEnv.from_mapping(other).master_port


def test_without_a_port_a_restarted_job_derives_another_one() -> None:
    restarted = RankEnv.from_mapping({**SRUN_TASK, "SLURM_RESTART_COUNT": "1"})
    assert restarted.master_port != RankEnv.from_mapping(SRUN_TASK).master_port


@pytest.mark.parametrize("env", [SALLOC_SHELL, BATCH_SHELL], ids=["salloc", "batch"])
@pytest.mark.parametrize("exported", [{}, {"MASTER_ADDR": "n1", "MASTER_PORT": "21234"}], ids=["plain", "with master"])
def test_a_shell_inside_an_allocation_is_not_a_rank(env: Env, exported: Env) -> None:
    assert RankEnv.from_mapping({**env, **exported}) == RankEnv.single()


def test_the_interactive_step_that_newer_sallocs_shell_runs_in_is_not_a_rank() -> None:
    shell = {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290"}
    assert RankEnv.from_mapping(shell).launcher == "single"


def test_ranks_that_a_batch_script_exported_for_the_whole_job_do_not_hide_slurms() -> None:
    assert place({**SRUN_TASK, "RANK": "0", "WORLD_SIZE": "4"}) == (3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_NODEID"])
def test_a_partial_set_of_slurms_names_the_missing_variable(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not set"):
        RankEnv.from_mapping(without(SRUN_TASK, name))


def test_a_step_without_any_host_list_names_the_missing_variable() -> None:
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST is not set"):
        RankEnv.from_mapping(without(SRUN_TASK, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))


# ---------------------------------------------------------------- torchrun


def test_torchrun_inside_slurm_is_torchrun() -> None:
    agent = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    found = RankEnv.from_mapping({**SRUN_TASK, **agent, **TORCHRUN})
    assert (found.launcher, found.rank, found.hosts) == ("torchrun", 5, ("n1", "n2"))


def test_complete_hand_set_ranks_inside_slurm_are_taken() -> None:
    found = RankEnv.from_mapping({**SRUN_TASK, **without(TORCHRUN, "TORCHELASTIC_RUN_ID")})
    assert (found.launcher, found.rank, found.local_rank) == ("manual", 5, 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_partial_set_of_torchruns_names_the_missing_variable(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is not set"):
        RankEnv.from_mapping(without(TORCHRUN, name))


# ---------------------------------------------------------------- MPI


def test_mpirun_inside_slurm_is_mpi() -> None:
    daemon = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert RankEnv.from_mapping({**SRUN_TASK, **daemon, **OPEN_MPI}).launcher == "mpi"
    assert RankEnv.from_mapping({**SRUN_TASK, **daemon, **INTEL_MPI}).launcher == "mpi"


def test_sruns_own_pmi_is_slurm() -> None:
    assert RankEnv.from_mapping({**SRUN_TASK, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"


def test_mpi_ranks_dealt_out_node_by_node_are_placed_by_their_local_rank() -> None:
    dealt = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}  # --map-by node: ranks 0 and 2 on node 0, as local ranks 0 and 1
    assert place(dealt) == (2, 4, 1, 2, 0, 2)


def test_mpi_on_one_machine_meets_on_loopback() -> None:
    found = RankEnv.from_mapping(
        {**without(OPEN_MPI, "MASTER_ADDR"), "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    )
    assert (found.master_addr, found.num_nodes) == ("127.0.0.1", 1)


def test_mpi_under_slurm_meets_on_the_jobs_first_host() -> None:
    found = RankEnv.from_mapping(
        {**without(OPEN_MPI, "MASTER_ADDR"), "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "c[7-8]"}
    )
    assert found.master_addr == "c7"


def test_azures_master_node_is_taken_without_azures_port() -> None:
    found = RankEnv.from_mapping({**without(OPEN_MPI, "MASTER_ADDR"), "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"})
    assert (found.launcher, found.master_addr) == ("mpi", "10.0.0.4")
    assert found.master_port != 6000


def test_azures_master_node_of_a_single_node_is_taken() -> None:
    found = RankEnv.from_mapping({**without(OPEN_MPI, "MASTER_ADDR"), "AZ_BATCHAI_MPI_MASTER_NODE": "vm0"})
    assert found.master_addr == "vm0"


@pytest.mark.parametrize(
    "name",
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MASTER_ADDR",
    ],
)
def test_a_partial_set_of_open_mpis_names_the_missing_variable(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not set"):
        RankEnv.from_mapping(without(OPEN_MPI, name))


@pytest.mark.parametrize("name", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR"])
def test_a_partial_set_of_pmis_names_the_missing_variable(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not set"):
        RankEnv.from_mapping(without(INTEL_MPI, name))


# ---------------------------------------------------------------- submitit on this machine


@pytest.mark.parametrize(("task", "local_rank", "node_rank"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
def test_local_tasks_are_split_over_the_simulated_nodes(task: int, local_rank: int, node_rank: int) -> None:
    found = RankEnv.from_mapping({**SUBMITIT_LOCAL, "SUBMITIT_LOCAL_GLOBALID": str(task)})
    assert (found.local_rank, found.node_rank, found.num_nodes) == (local_rank, node_rank, 2)


def test_without_simulated_nodes_local_tasks_are_one_node() -> None:
    assert place(without(SUBMITIT_LOCAL, "TRAINKIT_SIMULATED_NODES")) == (2, 4, 2, 4, 0, 1)


def test_a_local_job_started_in_a_slurm_shell_is_local() -> None:
    shell = {**SRUN_TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert RankEnv.from_mapping({**shell, **SUBMITIT_LOCAL}).launcher == "submitit-local"


def test_simulated_nodes_that_do_not_divide_the_tasks_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be split over 3 simulated nodes"):
        RankEnv.from_mapping({**SUBMITIT_LOCAL, "TRAINKIT_SIMULATED_NODES": "3"})


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_a_partial_set_by_hand_names_the_missing_variable(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is not set"):
        RankEnv.from_mapping(without(HAND_SET, name))


def test_node_rank_in_place_of_rank_is_told_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"^RANK is not set"):
        RankEnv.from_mapping({"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "NODE_RANK": "1", "WORLD_SIZE": "2"})


def test_a_master_address_alone_is_a_partial_set() -> None:
    with pytest.raises(UserError, match=r"^RANK is not set"):
        RankEnv.from_mapping({"MASTER_ADDR": "10.0.0.5"})


def test_ranks_by_hand_that_meet_on_loopback_are_on_one_machine() -> None:
    assert place({**HAND_SET, "MASTER_ADDR": "localhost"}) == (1, 2, 1, 2, 0, 1)


def test_ranks_by_hand_with_a_local_world_size_are_split_over_nodes() -> None:
    assert place({**HAND_SET, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == (3, 4, 1, 2, 1, 2)


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize("text", ["x", "²", "-1", "1.0"])
def test_a_rank_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(UserError, match=f"RANK='{text}' is not a number"):
        RankEnv.from_mapping({**HAND_SET, "RANK": text})


def test_a_port_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="Port 65536 does not exist"):
        RankEnv.from_mapping({**HAND_SET, "MASTER_PORT": "65536"})


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(UserError, match="rank 2 does not fit world_size 2"):
        RankEnv.from_mapping({**HAND_SET, "RANK": "2"})


def test_a_variable_set_to_nothing_counts_as_missing() -> None:
    with pytest.raises(UserError, match=r"^WORLD_SIZE is not set"):
        RankEnv.from_mapping({**HAND_SET, "WORLD_SIZE": ""})


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(0, 4, 0), (3, 4, 3), (3, 1, 0), (0, 1, 0)])
def test_local_rank_indexes_what_is_visible(local_rank: int, visible: int, index: int) -> None:
    assert device_index(local_rank, visible) == index


@pytest.mark.parametrize(("local_rank", "visible"), [(2, 2), (0, 0)])
def test_a_rank_without_a_device_is_refused(local_rank: int, visible: int) -> None:
    with pytest.raises(UserError, match="has no device"):
        device_index(local_rank, visible)


# SLURM's compact lists, as SLURM writes them.


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("a1,b2", ["a1", "b2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[3,1]", ["n3", "n1"]),
        ("gpu[03-05,9],cpu1", ["gpu03", "gpu04", "gpu05", "gpu9", "cpu1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]-n[03-04]", ["rack1-n03", "rack1-n04", "rack2-n03", "rack2-n04"]),
        ("rack[1-2]-n[3-4],login", ["rack1-n3", "rack1-n4", "rack2-n3", "rack2-n4", "login"]),
        ("[1-2]a", ["1a", "2a"]),
        ("n[1-2].cluster.example.org", ["n1.cluster.example.org", "n2.cluster.example.org"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("node-7", ["node-7"]),
    ],
)
def test_a_host_list_expands_in_its_own_order(nodelist: str, hosts: list[str]) -> None:
    assert expand(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    ["", "n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n1,", ",n1", "n1,,n2", "n1 n2", "n[1-2-3]"],
)
def test_a_malformed_host_list_is_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="Cannot read the host list"):
        expand(nodelist)


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-99999999999]", "n[1-9999]m[1-9999]", f"n[{'9' * 5000}]", "n[1-90000],m[1-90000]", "n," * 600_000 + "n"],
    ids=lambda text: text[:20],
)
def test_a_list_of_more_hosts_than_any_machine_has_is_not_made(nodelist: str) -> None:
    with pytest.raises(UserError, match="Cannot read the host list") as caught:
        expand(nodelist)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("counts", "numbers"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])]
)
def test_task_counts_give_one_number_per_node(counts: str, numbers: list[int]) -> None:
    assert expand_counts(counts) == numbers


@pytest.mark.parametrize("counts", ["", "x", "2(x)", "2(3)", "2,"])
def test_malformed_task_counts_are_refused(counts: str) -> None:
    with pytest.raises(UserError, match="tasks per node"):
        expand_counts(counts)


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        ([], ""),
        (["login"], "login"),
        (["n1", "n2"], "n1, n2"),
        ([f"n{number:02}" for number in range(1, 33)], "n[01-32]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n098", "n099", "n100", "n7"], "n[098-100], n7"),
        (["n1", "n02", "n3"], "n1, n02, n3"),
        (["n3", "n2", "n1"], "n3, n2, n1"),
        (["rack1-n03.hpc", "rack1-n04.hpc", "rack1-n05.hpc", "rack2-n05.hpc"], "rack1-n[03-05].hpc, rack2-n05.hpc"),
    ],
)
def test_many_hosts_are_folded_for_people(hosts: list[str], folded: str) -> None:
    assert fold(hosts) == folded
    assert expand(folded.replace(", ", ",")) == hosts if hosts else not folded


# Ports and head nodes.

LINUX = range(32768, 61000)


def test_derived_ports_are_outside_the_default_ephemeral_range() -> None:
    assert not {derived_port(str(job), attempt) for job in range(200) for attempt in range(5)} & set(LINUX)


def test_ranks_of_one_attempt_derive_the_same_port() -> None:
    assert derived_port("4711", 3) == derived_port("4711", 3)


def test_every_attempt_of_a_job_derives_a_port_of_its_own() -> None:
    assert len({derived_port("4711", attempt) for attempt in range(1000)}) == 1000


def test_jobs_next_to_each_other_derive_ports_of_their_own() -> None:
    assert len({derived_port(str(job), 0) for job in range(100, 110)}) == 10


def test_the_kernels_text_of_the_ephemeral_range_includes_its_last_port() -> None:
    assert ephemeral_range("32768\t60999\n") == LINUX


def test_the_search_begins_at_the_given_port_and_wraps() -> None:
    ports = list(candidates(29998, LINUX))
    assert ports[:3] == [29998, 29999, 20000]
    assert len(ports) == len(PORTS)


def test_a_site_with_a_wide_ephemeral_range_gets_ports_outside_of_it() -> None:
    assert set(candidates(20000, range(15000, 65000))) <= {*range(1024, 15000), *range(65000, 65536)}


def test_a_site_where_every_port_is_ephemeral_still_gets_one() -> None:
    assert next(iter(candidates(20005, range(1024, 65536)))) == 20005


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port(port) != port


def test_no_free_port_at_all_is_an_error_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_env, "_is_free", lambda port: False)
    with pytest.raises(UserError, match="No free port"):
        free_port()


def test_a_restart_begins_its_search_elsewhere() -> None:
    first, second = start_for({"SLURM_JOB_ID": "7"}), start_for({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    assert first != second


def test_outside_of_slurm_the_search_begins_anywhere() -> None:
    assert start_for({}) is None


def test_the_module_prints_one_port_outside_the_ephemeral_range_and_imports_no_torch() -> None:
    code = (
        "import atexit, runpy, sys, trainkit.process; atexit.register(lambda: print('torch' in sys.modules))\n"
        "runpy.run_module('trainkit.ranks.env', run_name='__main__')"
    )
    env = {**os.environ, "SLURM_JOB_ID": "99", "SLURM_RESTART_COUNT": "2"}
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    port, torch_loaded = out.stdout.split()
    assert int(port) in PORTS
    assert torch_loaded == "False"


def test_a_head_node_whose_name_does_not_resolve_is_refused() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid.*cannot be found"):
        check_head("no-such-host.invalid", 2)


@pytest.mark.parametrize("addr", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_head_node_is_refused_on_several_nodes(addr: str) -> None:
    with pytest.raises(UserError, match="is loopback"):
        check_head(addr, 2)


def test_a_loopback_head_node_is_fine_on_one_node() -> None:
    check_head("127.0.0.1", 1)


def test_an_address_of_the_network_is_fine_on_several_nodes() -> None:
    check_head("10.1.2.3", 2)


OURS, THEIRS = Secret("correct horse battery staple"), Secret("another text of enough length")


def test_what_was_sealed_is_had_again_with_the_same_secret() -> None:
    assert OURS.unseal("joined/1", OURS.seal("joined/1", b"n1")) == b"n1"


@pytest.mark.parametrize(
    "sealed",
    [
        b"",
        b"n1",
        THEIRS.seal("joined/1", b"n1"),
        NO_SECRET.seal("joined/1", b"n1"),
        OURS.seal("joined/0", b"n1"),  # moved here from another place
        OURS.seal("joined/1", b"n1")[:-1],
        OURS.seal("joined/1", b"n1") + b"2",
    ],
    ids=["nothing", "plain", "another secret", "no secret", "another purpose", "cut", "longer"],
)
def test_anything_else_is_a_forgery(sealed: bytes) -> None:
    with pytest.raises(ForgedError):
        OURS.unseal("joined/1", sealed)


def test_names_say_nothing_to_who_does_not_know_the_secret() -> None:
    assert OURS.name("joined/1") == Secret(OURS.text).name("joined/1")
    assert len({OURS.name("joined/1"), OURS.name("joined/0"), THEIRS.name("joined/1"), NO_SECRET.name("joined/1")}) == 4
    assert "joined" not in OURS.name("joined/1")


def test_it_is_read_from_the_environment_and_may_be_absent() -> None:
    assert Secret.from_mapping({VARIABLE: f" {OURS.text}\n"}) == OURS
    assert not Secret.from_mapping({})
    assert not Secret.from_mapping({VARIABLE: ""})


def test_one_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        Secret.from_mapping({VARIABLE: "swordfish"})


def test_each_that_is_made_is_another_and_long_enough() -> None:
    first, second = Secret.generate(), Secret.generate()
    assert first != second
    assert len(first.text) >= 32


def test_it_does_not_show_itself() -> None:
    assert OURS.text not in repr(OURS)
