"""Which rank am I? A pure function of the environment that torchrun, srun, mpirun, submitit or a human has set.

The finest description wins. ``srun torchrun``, and mpirun's daemons that srun starts, leave SLURM's variables of the
*launcher* in the environment of each rank, so torchrun, submitit's local executor and mpirun go before SLURM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from trainkit.errors import UserError
from trainkit.ranks.hostlist import expand, expand_counts
from trainkit.ranks.rendezvous import derived_port

# Step ids from here on are SLURM's own: the shell of salloc (interactive), the batch script, external, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_HAND_SET_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnv:
    """One rank's place among all ranks. ``local_rank`` counts on this node and indexes the devices visible here."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    """0 for a single process, which meets nobody."""
    launcher: str
    """"slurm", "torchrun", "mpi", "submitit-local", "manual" or "single"."""
    hosts: tuple[str, ...] = ()
    """Host names by node_rank, where the launcher says them; else empty."""

    def __post_init__(self) -> None:
        for name, value, size_name, size in (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("node_rank", self.node_rank, "num_nodes", self.num_nodes),
        ):
            if not 0 <= value < size:
                raise UserError(
                    f"{name} {value} does not fit {size_name} {size}.",
                    why=f"The environment that '{self.launcher}' gives to this process contradicts itself.",
                    fix="Unset variables left over from another launcher, or set all of them anew.",
                )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes records."""
        return self.rank == 0

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> RankEnv:
        """Read ``env``, as a rule os.environ. Raises UserError that names what is missing in a partial set."""
        # LOCAL_RANK tells torchrun's ranks from RANK and WORLD_SIZE that a batch script exported for the whole job.
        if "TORCHELASTIC_RUN_ID" in env or all(name in env for name in _TORCH_VARIABLES):
            return _from_torch_variables(_Reader(env, "torchrun" if "TORCHELASTIC_RUN_ID" in env else "manual"))
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            return _from_submitit_local(_Reader(env, "submitit-local"))
        if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
            return _from_mpi(
                _Reader(env, "mpi"),
                rank="OMPI_COMM_WORLD_RANK",
                size="OMPI_COMM_WORLD_SIZE",
                local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
                local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
            )
        # `srun --mpi=pmi2` sets PMI_RANK too, but not the local ones, which come from Intel MPI's and MPICH's mpirun.
        if "MPI_LOCALRANKID" in env or (not _is_srun_task(env) and ("PMI_RANK" in env or "PMI_SIZE" in env)):
            return _from_mpi(
                _Reader(env, "mpi"),
                rank="PMI_RANK",
                size="PMI_SIZE",
                local_rank="MPI_LOCALRANKID",
                local_size="MPI_LOCALNRANKS",
            )
        if _is_srun_task(env):
            return _from_slurm(_Reader(env, "slurm"))
        if any(name in env for name in _HAND_SET_VARIABLES) and not _is_job_shell(env):
            return _from_hand_set(_Reader(env, "manual"))
        return cls.single()

    @classmethod
    def single(cls) -> RankEnv:
        """The only process there is."""
        return cls(0, 1, 0, 1, 0, 1, master_addr="127.0.0.1", master_port=0, launcher="single")


def device_index(local_rank: int, visible_device_count: int) -> int:
    """The index, among the devices visible to this process, of the one it should use.

    The mask (CUDA_VISIBLE_DEVICES) is taken as it is: under ``--gpus-per-node`` each task sees all devices of the job
    on its node, under ``--gpus-per-task=1`` only its own, which then is number 0.
    """
    if visible_device_count == 1:
        return 0
    if local_rank < visible_device_count:
        return local_rank
    raise UserError(
        f"Local rank {local_rank} has no device: {visible_device_count} visible.",
        why="Every rank of a node takes the visible device of its local rank's number.",
        fix="Start as many ranks per node as it has devices (--ntasks-per-node), or widen CUDA_VISIBLE_DEVICES.",
    )


def _from_torch_variables(read: _Reader) -> RankEnv:
    rank, world_size, local_rank = (read.number(name) for name in _TORCH_VARIABLES)
    node_name = "GROUP_RANK" if "GROUP_RANK" in read.env else "NODE_RANK"
    addr = read.text("MASTER_ADDR")
    local_world_size = read.number("LOCAL_WORLD_SIZE", world_size if world_size == 1 or _is_loopback(addr) else None)
    node_rank = read.number(node_name, rank // max(local_world_size, 1))
    num_nodes = read.number("GROUP_WORLD_SIZE", -(-world_size // max(local_world_size, 1)))
    hosts = _slurm_hosts(read.env) if read.launcher == "torchrun" else ()
    return RankEnv(
        rank,
        world_size,
        local_rank,
        local_world_size,
        node_rank,
        num_nodes,
        addr,
        read.number("MASTER_PORT"),
        read.launcher,
        hosts if len(hosts) == num_nodes else (),
    )


def _from_submitit_local(read: _Reader) -> RankEnv:
    """submitit knows one local node; TRAINKIT_SIMULATED_NODES splits its tasks into as many blocks."""
    rank, world_size = read.number("SUBMITIT_LOCAL_GLOBALID"), read.number("SUBMITIT_LOCAL_NTASKS")
    num_nodes = read.number("TRAINKIT_SIMULATED_NODES", 1)
    if num_nodes < 1 or world_size % num_nodes:
        raise UserError(
            f"{world_size} local tasks cannot be split over {num_nodes} simulated nodes.",
            why="TRAINKIT_SIMULATED_NODES must divide SUBMITIT_LOCAL_NTASKS.",
            fix="Unset TRAINKIT_SIMULATED_NODES; `python -m jobs.submit` sets it for its own jobs.",
        )
    local_world_size = world_size // num_nodes
    return RankEnv(
        rank,
        world_size,
        rank % local_world_size,
        local_world_size,
        rank // local_world_size,
        num_nodes,
        read.text("MASTER_ADDR", "127.0.0.1"),
        read.number("MASTER_PORT", derived_port(f"local-{read.text('SUBMITIT_LOCAL_JOB_ID', '')}", 0)),
        read.launcher,
    )


def _from_mpi(read: _Reader, *, rank: str, size: str, local_rank: str, local_size: str) -> RankEnv:
    world_size = read.number(size)
    alone = world_size == 1
    mine, local = read.number(rank), read.number(local_rank, 0 if alone else None)
    local_world_size = max(read.number(local_size, 1 if alone else None), 1)
    num_nodes = -(-world_size // local_world_size)
    # mpirun fills a node before the next one unless told otherwise (`--map-by node`); it sets no node number.
    node_rank = mine // local_world_size if mine % local_world_size == local else mine % num_nodes
    return RankEnv(
        mine,
        world_size,
        local,
        local_world_size,
        node_rank,
        num_nodes,
        _mpi_head(read, num_nodes),
        read.number("MASTER_PORT", _job_port(read.env)),
        read.launcher,
    )


def _mpi_head(read: _Reader, num_nodes: int) -> str:
    if "MASTER_ADDR" in read.env:
        return read.text("MASTER_ADDR")
    if "AZ_BATCH_MASTER_NODE" in read.env:  # address:port, on several nodes; the port is Azure's own
        return read.text("AZ_BATCH_MASTER_NODE").rsplit(":", 1)[0]
    if "AZ_BATCHAI_MPI_MASTER_NODE" in read.env:
        return read.text("AZ_BATCHAI_MPI_MASTER_NODE")
    if num_nodes == 1:
        return "127.0.0.1"
    hosts = _slurm_hosts(read.env)
    return hosts[0] if hosts else read.missing("MASTER_ADDR")


def _from_slurm(read: _Reader) -> RankEnv:
    hosts = _slurm_hosts(read.env)
    rank = read.number("SLURM_PROCID")
    # The step's numbers, where they are: SLURM_NTASKS may be that of the whole allocation.
    world_size = read.number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in read.env else "SLURM_NTASKS")
    node_rank, local_rank = read.number("SLURM_NODEID"), read.number("SLURM_LOCALID")
    num_nodes = len(hosts) or read.number("SLURM_NNODES")
    step = "SLURM_STEP_TASKS_PER_NODE" in read.env
    tasks = expand_counts(read.text("SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE"))
    if node_rank >= len(tasks):
        raise UserError(
            f"SLURM_NODEID is {node_rank}, but the tasks per node are given for {len(tasks)} nodes.",
            why="Variables of two jobs are mixed in this environment.",
            fix="Submit from a shell without SLURM_* of another job.",
        )
    addr = read.text("MASTER_ADDR") if "MASTER_ADDR" in read.env else hosts[0] if hosts else None
    return RankEnv(
        rank,
        world_size,
        local_rank,
        tasks[node_rank],
        node_rank,
        num_nodes,
        addr or read.missing("SLURM_STEP_NODELIST"),
        read.number("MASTER_PORT", _job_port(read.env)),
        read.launcher,
        hosts,
    )


def _from_hand_set(read: _Reader) -> RankEnv:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT without LOCAL_RANK: one rank per machine, or all on this one."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        read.text(name)
    rank, world_size = read.number("RANK"), read.number("WORLD_SIZE")
    one_machine = _is_loopback(read.text("MASTER_ADDR"))
    local_world_size = max(read.number("LOCAL_WORLD_SIZE", world_size if one_machine else 1), 1)
    return RankEnv(
        rank,
        world_size,
        rank % local_world_size,
        local_world_size,
        rank // local_world_size,
        -(-world_size // local_world_size),
        read.text("MASTER_ADDR"),
        read.number("MASTER_PORT"),
        read.launcher,
    )


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Not the shell of salloc (no PROCID, or an interactive step) nor the batch script (PROCID 0, no numbered step)."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in env and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _is_job_shell(env: Mapping[str, str]) -> bool:
    """A batch script, or a shell in an allocation: MASTER_ADDR exported there is for the tasks it will start."""
    return "SLURM_JOB_ID" in env and "RANK" not in env


def _slurm_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return tuple(expand(env[name]))
    return ()


def _job_port(env: Mapping[str, str]) -> int:
    # All ranks must agree without a message, so from what all of them see: the job, its step, how often it restarted.
    for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "AZ_BATCH_JOB_ID"):
        if env.get(name):
            restarts = env.get("SLURM_RESTART_COUNT") or "0"
            return derived_port(f"{env[name]}.{env.get('SLURM_STEP_ID', '')}", int(restarts))
    return derived_port("", 0)


def _is_loopback(addr: str) -> bool:
    return addr == "localhost" or addr == "::1" or addr.startswith("127.")


@dataclass(frozen=True)
class _Reader:
    """Variables of one launcher, with errors that name them."""

    env: Mapping[str, str]
    launcher: str

    def text(self, name: str, default: str | None = None) -> str:
        value = self.env.get(name, "")
        return value or (self.missing(name) if default is None else default)

    def number(self, name: str, default: int | None = None) -> int:
        value = self.text(name, None if default is None else str(default))
        if not value.isdigit():
            raise UserError(
                f"{name}='{value}' is not a number.",
                why=f"This process was started as a rank ({self.launcher}), and {name} says which.",
                fix=f"Set {name} to a number, or unset it.",
            )
        return int(value)

    def missing(self, name: str) -> NoReturn:
        there = [other for other in _SETS[self.launcher] if other in self.env]
        raise UserError(
            f"{name} is not set, so this process cannot tell its place among the ranks.",
            why=f"Only part of a set is there ({self.launcher}): {', '.join(there)}.",
            fix=f"Set {name} too, or unset the others to run as a single process.",
        )


_SETS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", *_HAND_SET_VARIABLES, "LOCAL_WORLD_SIZE"),
    "manual": (*_HAND_SET_VARIABLES, "LOCAL_WORLD_SIZE"),
    "submitit-local": ("SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS"),
    "mpi": (
        *(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"),
}
