"""Which rank am I? A pure function of the environment that torchrun, srun, mpirun, submitit or a human has set.

The finest description wins. ``srun torchrun``, and mpirun's daemons that srun starts, leave SLURM's variables of the
*launcher* in the environment of each rank, so torchrun, submitit's local executor and mpirun go before SLURM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import UserError
from trainkit.ranks.hostlist import expand_counts
from trainkit.ranks.rendezvous import derived_port
from trainkit.ranks.variables import HAND_SET, Reader, is_job_shell, is_loopback, is_srun_task, job_port, slurm_hosts

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, kw_only=True)
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
        if not 0 <= self.master_port < 65536:
            raise UserError(
                f"Port {self.master_port} does not exist.",
                why=f"Ports go from 1 to 65535; it is where the ranks of '{self.launcher}' meet.",
                fix="Set MASTER_PORT to a free port, for example 29500, or unset it.",
            )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes records."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are on this machine, as far as can be told without asking; simulated nodes are."""
        return self.num_nodes == 1 or self.launcher == "submitit-local" or is_loopback(self.master_addr)

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> RankEnv:
        """Read ``env``, as a rule os.environ. Raises UserError that names what is missing in a partial set."""
        # LOCAL_RANK tells torchrun's ranks from RANK and WORLD_SIZE that a batch script exported for the whole job.
        if "TORCHELASTIC_RUN_ID" in env or all(name in env for name in _TORCH_VARIABLES):
            return _from_torch_variables(Reader(env, "torchrun" if "TORCHELASTIC_RUN_ID" in env else "manual"))
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            return _from_submitit_local(Reader(env, "submitit-local"))
        if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
            return _from_mpi(
                Reader(env, "mpi"),
                rank="OMPI_COMM_WORLD_RANK",
                size="OMPI_COMM_WORLD_SIZE",
                local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
                local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
            )
        # `srun --mpi=pmi2` sets PMI_RANK too, but not the local ones, which come from Intel MPI's and MPICH's mpirun.
        if "MPI_LOCALRANKID" in env or (not is_srun_task(env) and ("PMI_RANK" in env or "PMI_SIZE" in env)):
            return _from_mpi(
                Reader(env, "mpi"),
                rank="PMI_RANK",
                size="PMI_SIZE",
                local_rank="MPI_LOCALRANKID",
                local_size="MPI_LOCALNRANKS",
            )
        if is_srun_task(env):
            return _from_slurm(Reader(env, "slurm"))
        if any(name in env for name in HAND_SET) and not is_job_shell(env):
            return _from_hand_set(Reader(env, "manual"))
        return cls.single()

    @classmethod
    def single(cls) -> RankEnv:
        """The only process there is."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            num_nodes=1,
            master_addr="127.0.0.1",
            master_port=0,
            launcher="single",
        )


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


def _from_torch_variables(read: Reader) -> RankEnv:
    rank, world_size, local_rank = (read.number(name) for name in _TORCH_VARIABLES)
    node_name = "GROUP_RANK" if "GROUP_RANK" in read.env else "NODE_RANK"
    addr = read.text("MASTER_ADDR")
    local_world_size = read.number("LOCAL_WORLD_SIZE", _ranks_per_node(read, world_size, addr))
    node_rank = read.number(node_name, rank // max(local_world_size, 1))
    num_nodes = read.number("GROUP_WORLD_SIZE", -(-world_size // max(local_world_size, 1)))
    hosts = slurm_hosts(read.env) if read.launcher == "torchrun" else ()
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=addr,
        master_port=read.number("MASTER_PORT"),
        launcher=read.launcher,
        hosts=hosts if len(hosts) == num_nodes else (),
    )


def _ranks_per_node(read: Reader, world_size: int, addr: str) -> int | None:
    """Where it is not said: Azure ML tells the number of nodes, each with as many ranks; else all on one machine."""
    nodes = read.number("AZUREML_NODE_COUNT", 0)
    if nodes and world_size % nodes == 0:
        return world_size // nodes
    return world_size if world_size == 1 or is_loopback(addr) else None


def _from_submitit_local(read: Reader) -> RankEnv:
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
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=num_nodes,
        master_addr=read.text("MASTER_ADDR", "127.0.0.1"),
        master_port=read.number("MASTER_PORT", derived_port(f"local-{read.text('SUBMITIT_LOCAL_JOB_ID', '')}", 0)),
        launcher=read.launcher,
    )


def _from_mpi(read: Reader, *, rank: str, size: str, local_rank: str, local_size: str) -> RankEnv:
    world_size = read.number(size)
    alone = world_size == 1
    mine, local = read.number(rank), read.number(local_rank, 0 if alone else None)
    local_world_size = max(read.number(local_size, 1 if alone else None), 1)
    num_nodes = -(-world_size // local_world_size)
    # mpirun fills a node before the next one unless told otherwise (`--map-by node`); it sets no node number.
    node_rank = mine // local_world_size if mine % local_world_size == local else mine % num_nodes
    return RankEnv(
        rank=mine,
        world_size=world_size,
        local_rank=local,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=_mpi_head(read, num_nodes),
        master_port=read.number("MASTER_PORT", job_port(read.env)),
        launcher=read.launcher,
    )


def _mpi_head(read: Reader, num_nodes: int) -> str:
    if "MASTER_ADDR" in read.env:
        return read.text("MASTER_ADDR")
    if "AZ_BATCH_MASTER_NODE" in read.env:  # address:port, on several nodes; the port is Azure's own
        return read.text("AZ_BATCH_MASTER_NODE").rsplit(":", 1)[0]
    if "AZ_BATCHAI_MPI_MASTER_NODE" in read.env:
        return read.text("AZ_BATCHAI_MPI_MASTER_NODE")
    if num_nodes == 1:
        return "127.0.0.1"
    hosts = slurm_hosts(read.env)
    return hosts[0] if hosts else read.missing("MASTER_ADDR")


def _from_slurm(read: Reader) -> RankEnv:
    hosts = slurm_hosts(read.env)
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
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=addr or read.missing("SLURM_STEP_NODELIST"),
        master_port=read.number("MASTER_PORT", job_port(read.env)),
        launcher=read.launcher,
        hosts=hosts,
    )


def _from_hand_set(read: Reader) -> RankEnv:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT without LOCAL_RANK: one rank per machine, or all on this one."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        read.text(name)
    rank, world_size = read.number("RANK"), read.number("WORLD_SIZE")
    one_machine = is_loopback(read.text("MASTER_ADDR"))
    local_world_size = max(read.number("LOCAL_WORLD_SIZE", world_size if one_machine else 1), 1)
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=-(-world_size // local_world_size),
        master_addr=read.text("MASTER_ADDR"),
        master_port=read.number("MASTER_PORT"),
        launcher=read.launcher,
    )
