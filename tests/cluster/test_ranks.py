"""Environments as launchers set them, and the rank that follows."""

import socket
from pathlib import Path

import pytest

from trainkit.cluster import ranks
from trainkit.cluster.ranks import NO_SECRET, VARIABLE, RankEnv, Secret, check_head
from trainkit.common import hosts
from trainkit.common.errors import UserError
from trainkit.common.hosts import PORTS, candidates, derived_port, expand, expand_counts, fold, free_port

Env = dict[str, str]

# What SLURM 22.05 gives to task 3 of `srun` in an `sbatch -N2 --ntasks-per-node=2`, less what says nothing about ranks.
SRUN_TASK: Env = {
    "SLURM_JOB_ID": "118", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
FIRST: Env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
BATCH_SHELL: Env = {**{name: value for name, value in SRUN_TASK.items() if "STEP" not in name}, **FIRST}
SALLOC_SHELL: Env = {name: value for name, value in BATCH_SHELL.items() if name not in FIRST}
NEWER_SALLOC_SHELL: Env = {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290"}
TORCHRUN: Env = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400",
}  # fmt: skip
OPEN_MPI: Env = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1",
}  # fmt: skip
INTEL_MPI: Env = {
    "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "n1",
}  # fmt: skip
SUBMITIT_LOCAL: Env = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "4242", "SUBMITIT_LOCAL_GLOBALID": "2",
    "SUBMITIT_LOCAL_LOCALID": "2", "SUBMITIT_LOCAL_NTASKS": "4", "TRAINKIT_SIMULATED_NODES": "2",
}  # fmt: skip
# What a command job with `distribution: {type: pytorch}` has: neither torchrun's id nor LOCAL_WORLD_SIZE.
AZURE_ML: Env = {
    "AZUREML_NODE_COUNT": "2", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "NODE_RANK": "1",
}  # fmt: skip
HAND_SET: Env = {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


AGENT: Env = {**SRUN_TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
"""Environment of torchrun and of mpirun's daemons when srun starts them."""


@pytest.mark.parametrize(
    ("env", "launcher", "expected"),
    [
        (SRUN_TASK, "slurm", (3, 4, 1, 2, 1, 2)),
        ({**SRUN_TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}, "slurm", (3, 4, 0, 1, 1, 2)),
        ({**SRUN_TASK, "RANK": "0", "WORLD_SIZE": "4"}, "slurm", (3, 4, 1, 2, 1, 2)),  # of the batch script
        ({**SRUN_TASK, "PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm", (3, 4, 1, 2, 1, 2)),  # srun's own
        ({**AGENT, **TORCHRUN}, "torchrun", (5, 8, 1, 4, 1, 2)),
        ({**SRUN_TASK, **without(TORCHRUN, "TORCHELASTIC_RUN_ID")}, "manual", (5, 8, 1, 4, 1, 2)),
        # --map-by node: ranks 0 and 2 on node 0, as local ranks 0 and 1
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "mpi", (2, 4, 1, 2, 0, 2)),
        ({**AGENT, **OPEN_MPI}, "mpi", (3, 4, 1, 2, 1, 2)),
        ({**AGENT, **INTEL_MPI}, "mpi", (2, 4, 0, 2, 1, 2)),
        ({**SUBMITIT_LOCAL, "SUBMITIT_LOCAL_GLOBALID": "1"}, "submitit-local", (1, 4, 1, 2, 0, 2)),
        (without(SUBMITIT_LOCAL, "TRAINKIT_SIMULATED_NODES"), "submitit-local", (2, 4, 2, 4, 0, 1)),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "0", **SUBMITIT_LOCAL}, "submitit-local", (2, 4, 0, 2, 1, 2)),
        (HAND_SET, "manual", (1, 2, 0, 1, 1, 2)),
        ({**HAND_SET, "MASTER_ADDR": "localhost"}, "manual", (1, 2, 1, 2, 0, 1)),
        ({**HAND_SET, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "manual", (3, 4, 1, 2, 1, 2)),
        (AZURE_ML, "manual", (2, 4, 0, 2, 1, 2)),
        ({}, "single", (0, 1, 0, 1, 0, 1)),
    ],
)  # fmt: skip
def test_each_launcher_gives_every_rank_its_place(env: Env, launcher: str, expected: tuple[int, ...]) -> None:
    found = RankEnv.from_mapping(env)
    place = (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank, found.num_nodes)
    assert (found.launcher, place) == (launcher, expected)


NO_MASTER = without(OPEN_MPI, "MASTER_ADDR")


@pytest.mark.parametrize(
    ("env", "addr", "hosts"),
    [
        (SRUN_TASK, "n1", ("n1", "n2")),
        ({**SRUN_TASK, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
          "SLURM_PROCID": "1", "SLURM_NODEID": "0"}, "n2", ("n2",)),
        ({**SRUN_TASK, "MASTER_ADDR": "ib-n1"}, "ib-n1", ("n1", "n2")),
        ({**SRUN_TASK, "TRAINKIT_HEAD_SUFFIX": "i"}, "n1i", ("n1", "n2")),
        ({**AGENT, **TORCHRUN}, "n1", ("n1", "n2")),
        ({**NO_MASTER, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "127.0.0.1", ()),
        ({**NO_MASTER, "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "c[7-8]"}, "c7", ()),
        ({**NO_MASTER, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, "10.0.0.4", ()),
        ({**NO_MASTER, "AZ_BATCHAI_MPI_MASTER_NODE": "vm0"}, "vm0", ()),
    ],
    ids=["step", "part of a job", "exported", "by suffix", "torchrun", "machine", "mpi", "azure", "azure's node"],
)  # fmt: skip
def test_the_head_node_is_what_the_launcher_says(env: Env, addr: str, hosts: tuple[str, ...]) -> None:
    found = RankEnv.from_mapping(env)
    assert (found.master_addr, found.hosts) == (addr, hosts)
    assert found.master_port != 6000, "Azure's own"


def test_without_a_port_all_ranks_derive_one_anew_for_each_restart() -> None:
    def port(**more: str) -> int:
        return RankEnv.from_mapping({**SRUN_TASK, **more}).master_port

    assert port() == port(**FIRST) != port(SLURM_RESTART_COUNT="1")
    assert port(MASTER_PORT="21234") == 21234


def test_a_shell_inside_an_allocation_is_not_a_rank() -> None:
    for env in (SALLOC_SHELL, BATCH_SHELL, NEWER_SALLOC_SHELL):
        for exported in ({}, {"MASTER_ADDR": "n1", "MASTER_PORT": "21234"}):
            assert RankEnv.from_mapping({**env, **exported}) == RankEnv.single()


BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        *((SRUN_TASK, name) for name in ("SLURM_LOCALID", "SLURM_NODEID")),
        (without(SRUN_TASK, "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST"),
        *((TORCHRUN, name) for name in (*BY_HAND, "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        *((OPEN_MPI, name) for name in OPEN_MPI),
        *((INTEL_MPI, name) for name in INTEL_MPI),
        *((HAND_SET, name) for name in BY_HAND),
        ({"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500", "NODE_RANK": "1", "WORLD_SIZE": "2"}, "RANK"),
        ({"MASTER_ADDR": "10.0.0.5"}, "RANK"),
        ({**HAND_SET, "WORLD_SIZE": ""}, "WORLD_SIZE"),
    ],
)
def test_a_partial_set_names_the_missing_variable(env: Env, name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is not set"):
        RankEnv.from_mapping(env if env.get(name) == "" else without(env, name))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        *(({**HAND_SET, "RANK": text}, f"RANK='{text}' is not a number") for text in ("x", "\u00b2", "-1", "1.0")),
        ({**HAND_SET, "MASTER_PORT": "65536"}, "Port 65536 does not exist"),
        ({**HAND_SET, "RANK": "2"}, "rank 2 does not fit world_size 2"),
        ({**SUBMITIT_LOCAL, "TRAINKIT_SIMULATED_NODES": "3"}, "cannot be split over 3 simulated nodes"),
    ],
)
def test_a_wrong_value_is_refused_by_name(env: Env, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RankEnv.from_mapping(env)


def test_local_rank_indexes_what_is_visible() -> None:
    assert [ranks.device_index(*case) for case in ((0, 4), (3, 4), (3, 1), (0, 1))] == [0, 3, 0, 0]
    for local_rank, visible in ((2, 2), (0, 0)):
        with pytest.raises(UserError, match="has no device"):
            ranks.device_index(local_rank, visible)


# SLURM's compact lists, as SLURM writes them.


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a1,b2", ["a1", "b2"]),
        ("n[3,1]", ["n3", "n1"]),
        ("gpu[03-05,9],cpu1", ["gpu03", "gpu04", "gpu05", "gpu9", "cpu1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]-n[3-4],login", ["rack1-n3", "rack1-n4", "rack2-n3", "rack2-n4", "login"]),
        ("n[1-2].cluster.example.org", ["n1.cluster.example.org", "n2.cluster.example.org"]),
    ],
)
def test_a_host_list_expands_in_its_own_order(nodelist: str, hosts: list[str]) -> None:
    assert expand(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    [
        *("", "n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n1,", ",n1", "n1,,n2", "n1 n2", "n[1-2-3]"),
        # More hosts than any machine has are not made.
        *("n[1-99999999999]", "n[1-9999]m[1-9999]", f"n[{'9' * 5000}]", "n[1-90000],m[1-90000]", "n," * 600_000 + "n"),
        "n[1-90000,1-90000]",
    ],
    ids=lambda text: text[:20],
)
def test_a_malformed_or_endless_host_list_is_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="Cannot read the host list") as caught:
        expand(nodelist)
    assert len(str(caught.value)) < 1000


def test_task_counts_give_one_number_per_node() -> None:
    assert (expand_counts("4"), expand_counts("2(x3),1")) == ([4], [2, 2, 2, 1])
    for malformed in ("", "2(x)", "2(3)", "2,"):
        with pytest.raises(UserError, match="tasks per node"):
            expand_counts(malformed)


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["n1", "n2"], "n1, n2"),
        ([f"n{number:02}" for number in range(1, 33)], "n[01-32]"),
        (["n098", "n099", "n100", "n7"], "n[098-100], n7"),
        (["n1", "n02", "n3"], "n1, n02, n3"),
        (["rack1-n03.hpc", "rack1-n04.hpc", "rack1-n05.hpc", "rack2-n05.hpc"], "rack1-n[03-05].hpc, rack2-n05.hpc"),
    ],
)
def test_many_hosts_are_folded_for_people(hosts: list[str], folded: str) -> None:
    assert fold(hosts) == folded
    assert expand(folded.replace(", ", ",")) == hosts


# Ports and head nodes.

LINUX = range(32768, 61000)


def test_each_job_and_attempt_derives_another_port_none_of_them_ephemeral() -> None:
    assert not {derived_port(str(job), attempt) for job in range(200) for attempt in range(5)} & set(LINUX)
    assert derived_port("4711", 3) == derived_port("4711", 3)
    assert len({derived_port("4711", attempt) for attempt in range(1000)}) == 1000
    assert len({derived_port(str(job), 0) for job in range(100, 110)}) == 10
    of = ranks.job_port
    assert of({"SLURM_RESTART_COUNT": "many"}) == of({})
    starts = [{"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": count} for job in ("7", "8") for count in ("0", "1")]
    assert len({of(start) for start in starts}) == len(starts)


def test_a_search_begins_at_its_port_outside_the_kernels_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "ip_local_port_range"
    kernel.write_text("15000\t65535\n")
    monkeypatch.setattr(hosts, "_EPHEMERAL", kernel)
    assert free_port(20000) < 15000
    found = list(candidates(29998, LINUX))
    assert (found[:3], len(found)) == ([29998, 29999, 20000], len(PORTS))
    assert set(candidates(20000, range(15000, 65000))) <= {*range(1024, 15000), *range(65000, 65536)}
    assert next(iter(candidates(20005, range(1024, 65536)))) == 20005, "where every port is ephemeral"


def test_a_port_in_use_is_not_free_and_without_any_users_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):  # also where the kernel still holds a connection of another test's
        assert free_port(port) != port
    monkeypatch.setattr(hosts, "is_free", lambda port: False)
    with pytest.raises(UserError, match="no free port"):
        free_port()


def test_a_head_node_that_no_other_node_can_reach_is_refused() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid.*cannot be found"):
        check_head("no-such-host.invalid", 2)
    for addr in ("localhost", "127.0.0.1", "127.0.1.1", "::1"):
        check_head(addr, 1)
        with pytest.raises(UserError, match="is loopback"):
            check_head(addr, 2)
    check_head("10.1.2.3", 2)


OURS, THEIRS = Secret("correct horse battery staple"), Secret("another text of enough length")


def test_without_the_secret_nobody_can_seal_a_value_or_tell_a_name() -> None:
    ours = OURS.seal("joined/1", b"n1")
    assert OURS.unseal("joined/1", ours) == b"n1"
    others = (THEIRS.seal("joined/1", b"n1"), NO_SECRET.seal("joined/1", b"n1"), OURS.seal("joined/0", b"n1"))
    for sealed in (b"", b"n1", *others, ours[:-1], ours + b"2"):
        with pytest.raises(ranks.ForgedError):
            OURS.unseal("joined/1", sealed)

    assert OURS.name("joined/1") == Secret(OURS.text).name("joined/1")
    assert len({OURS.name("joined/1"), OURS.name("joined/0"), THEIRS.name("joined/1"), NO_SECRET.name("joined/1")}) == 4
    assert "joined" not in OURS.name("joined/1")


def test_a_secret_is_long_enough_read_from_the_environment_and_not_shown() -> None:
    assert Secret.from_mapping({VARIABLE: f" {OURS.text}\n"}) == OURS
    assert not Secret.from_mapping({})
    assert not Secret.from_mapping({VARIABLE: ""})
    with pytest.raises(UserError, match="too short"):
        Secret.from_mapping({VARIABLE: "swordfish"})

    first, second = Secret.generate(), Secret.generate()
    assert first != second
    assert len(first.text) >= 32
    assert OURS.text not in repr(OURS)
