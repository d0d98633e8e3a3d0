"""Place of a rank among all ranks, their meeting point, and the secret that they share.

`RankEnv` is a pure function of the environment that torchrun, srun, mpirun, submitit or a human has set. The finest
description wins. ``srun torchrun``, and mpirun's daemons that srun starts, leave SLURM's variables of the
*launcher* in the environment of each rank, so torchrun, submitit's local executor and mpirun go before SLURM.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainkit.common.errors import UserError
from trainkit.common.hosts import derived_port, expand, expand_counts

VARIABLE = "TRAINKIT_SECRET"
SHORTEST = 16
"""Characters of a secret. Strangers can see what is sealed with it, and try all short ones in peace."""
HAND_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
HEAD_SUFFIX = "TRAINKIT_HEAD_SUFFIX"
"""Variable with the end of nodes' names in the network between them, where that has its own names: ``i`` at JSC."""
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_OTHER_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Step ids from here on are SLURM's own: the shell of salloc (interactive), the batch script, external, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def check_head(addr: str, num_nodes: int) -> None:
    """Refuse a head node that other nodes cannot reach: a name that does not resolve, or loopback on several nodes."""
    try:
        addresses = _addresses(addr)
    except OSError as error:
        why = f"Its name does not resolve on {socket.gethostname()}: {error}."
        fix = "Give a name or an IP address that every node can resolve, as MASTER_ADDR or --master-addr."
        raise UserError(f"The head node '{addr}' cannot be found.", why=why, fix=fix) from error
    if num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        what = f"The head node '{addr}' is loopback ({', '.join(sorted(addresses))}), but there are {num_nodes} nodes."
        why = "On every other node this address is the node itself, so its ranks would wait for ever."
        fix = "Give the head node's address in the nodes' network, as MASTER_ADDR or --master-addr."
        raise UserError(what, why=why, fix=fix)


def head_address(addr: str) -> str | None:
    """Return the head node's address in the nodes' network, by its name as another node sees it, if there is one."""
    with suppress(OSError):
        for address in _addresses(addr):
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return None


def _addresses(addr: str) -> list[str]:
    """Resolve a name to addresses, without the scope of ``fe80::1%eth0``. Raises OSError if it does not resolve."""
    found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def address_towards(addr: str) -> str | None:
    """Return this machine's own address on the route to ``addr``, as the kernel would choose it; nothing is sent."""
    there = head_address(addr)
    if there is None:
        return None
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError:  # no route
            return None
        return str(probe.getsockname()[0]).split("%")[0]


def restarts(env: Mapping[str, str]) -> int:
    """Count how often SLURM has restarted the job."""
    count = env.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


# The place of this process among the ranks


def is_srun_task(env: Mapping[str, str]) -> bool:
    """Return True for a task of srun.

    The shell of salloc has no PROCID or an interactive step, the batch script has PROCID 0 and no numbered step.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def slurm_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """List the hosts of the step, else of the job; none outside SLURM."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return tuple(expand(env[name]))
    return ()


def job_port(env: Mapping[str, str]) -> int:
    """Derive the port where the ranks of a job meet, when nobody has set one.

    All ranks must agree without a message, so it goes by what all of them see: job, step and number of restarts.
    """
    for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "AZ_BATCH_JOB_ID"):
        if env.get(name):
            return derived_port(f"{env[name]}.{env.get('SLURM_STEP_ID', '')}", restarts(env))
    return derived_port("", restarts(env))


def is_loopback(addr: str) -> bool:
    """Return True for an address of this machine alone."""
    return addr in ("localhost", "::1") or addr.startswith("127.")


@dataclass(frozen=True)
class LauncherVariables:
    """Variables of one launcher, with errors that name them."""

    env: Mapping[str, str]
    launcher: str

    def text(self, name: str, default: str | None = None) -> str:
        """Return a variable's value, or the default; without one, UserError when it is not set."""
        value = self.env.get(name) or default
        if value is None:
            self.missing(name)
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a variable's value as a whole number of at least 0; otherwise UserError."""
        if default is not None and not self.env.get(name):
            return default
        value = self.text(name)
        if not value.isdecimal():
            why = f"This process was started as a rank ({self.launcher}), and {name} says which."
            fix = f"Set {name} to a number, or unset it."
            raise UserError(f"{name}='{value}' is not a number.", why=why, fix=fix)
        return int(value)

    def missing(self, name: str) -> NoReturn:
        """Raise the UserError for a set of variables without ``name``."""
        why = f"Only part of a set is there ({self.launcher})"
        there = [other for other in HAND_SET if other in self.env]
        if there:
            why += f": {', '.join(there)}"
        what = f"{name} is not set, so this process does not know its rank."
        raise UserError(what, why=f"{why}.", fix=f"Set {name} too, or unset the others to run as a single process.")

    def rank(self, rank: int, world_size: int, local_world_size: int, addr: str, port: int, **known: Any) -> RankEnv:
        """Make a rank; local_rank, node_rank and num_nodes are ``known``, or follow from nodes filled in order."""
        size = max(local_world_size, 1)
        blocks = {"local_rank": rank % size, "node_rank": rank // size, "num_nodes": -(-world_size // size)}
        return RankEnv(
            rank=rank, world_size=world_size, local_world_size=local_world_size, master_addr=addr, master_port=port,
            launcher=self.launcher, **(blocks | known),
        )  # fmt: skip


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
        sizes = {"rank": "world_size", "local_rank": "local_world_size", "node_rank": "num_nodes"}
        for name, size in sizes.items():
            if not 0 <= getattr(self, name) < getattr(self, size):
                what = f"{name} {getattr(self, name)} does not fit {size} {getattr(self, size)}."
                why = f"The environment that '{self.launcher}' gives to this process contradicts itself."
                fix = "Unset variables of another launcher, or set all of them."
                raise UserError(what, why=why, fix=fix)
        if not 0 <= self.master_port < 65536:
            why = f"Ports go from 1 to 65535; the ranks of '{self.launcher}' meet there."
            fix = "Set MASTER_PORT to a free port, for example 29500, or unset it."
            raise UserError(f"Port {self.master_port} does not exist.", why=why, fix=fix)

    @property
    def is_main(self) -> bool:
        """True for rank 0, which writes records."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """True if all ranks are on this machine, as far as can be told without asking; simulated nodes are."""
        return self.num_nodes == 1 or self.launcher == "submitit-local" or is_loopback(self.master_addr)

    @property
    def is_signalled_itself(self) -> bool:
        """True if its launcher signals each process that a rank has started, and not the rank alone."""
        return self.launcher == "slurm"

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> RankEnv:
        """Read ``env``, as a rule os.environ. Raises UserError that names what is missing in a partial set."""
        if "TORCHELASTIC_RUN_ID" in env:
            return _from_variables(LauncherVariables(env, "torchrun"))
        # LOCAL_RANK tells torchrun's ranks from RANK and WORLD_SIZE that a batch script exported for the whole job.
        if all(name in env for name in _TORCH_VARIABLES):
            return _from_variables(LauncherVariables(env, "manual"))
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            return _from_submitit_local(LauncherVariables(env, "submitit-local"))
        if any(name in env for name in _OPEN_MPI[:2]):
            return _from_mpi(LauncherVariables(env, "mpi"), *_OPEN_MPI)
        # `srun --mpi=pmi2` sets PMI_RANK too, but not the local ones, which come from Intel MPI's and MPICH's mpirun.
        if "MPI_LOCALRANKID" in env or (not is_srun_task(env) and any(name in env for name in _OTHER_MPI[:2])):
            return _from_mpi(LauncherVariables(env, "mpi"), *_OTHER_MPI)
        if is_srun_task(env):
            return _from_slurm(LauncherVariables(env, "slurm"))
        # In a batch script, and in a shell of an allocation, MASTER_ADDR is for the tasks that it will start.
        is_job_shell = "SLURM_JOB_ID" in env and "RANK" not in env
        if any(name in env for name in HAND_SET) and not is_job_shell:
            return _from_variables(LauncherVariables(env, "manual"))
        return cls.single()

    @classmethod
    def single(cls) -> RankEnv:
        """The only process there is."""
        return LauncherVariables({}, "single").rank(0, 1, 1, "127.0.0.1", 0)


def device_index(local_rank: int, visible_device_count: int) -> int:
    """Return the index, among the devices visible to this process, of the one it should use.

    The mask is taken as it is: under ``--gpus-per-node`` each task sees all devices of the job on its node, under
    ``--gpus-per-task=1`` only its own, which then is number 0.
    """
    if visible_device_count == 1:
        return 0
    if local_rank < visible_device_count:
        return local_rank
    what = f"Local rank {local_rank} has no device: {visible_device_count} visible."
    fix = "Start as many ranks per node as it has devices (--ntasks-per-node), or let this process see more."
    raise UserError(what, why="Each rank of a node uses the visible device with the number of its local rank.", fix=fix)


def _from_variables(read: LauncherVariables) -> RankEnv:
    """Read torch's variables, set by torchrun or by hand."""
    rank = read.number("RANK")
    world_size = read.number("WORLD_SIZE")
    addr = read.text("MASTER_ADDR")
    port = read.number("MASTER_PORT")
    ranks_here = None
    if world_size == 1 or is_loopback(addr):
        ranks_here = world_size
    if read.launcher == "manual" and not all(name in read.env for name in _TORCH_VARIABLES):
        # By hand LOCAL_RANK may be missing: then all ranks are on this machine, or there is one on each.
        return read.rank(rank, world_size, max(read.number("LOCAL_WORLD_SIZE", ranks_here or 1), 1), addr, port)
    nodes = read.number("AZUREML_NODE_COUNT", 0)
    if nodes and world_size % nodes == 0:  # each with as many ranks
        ranks_here = world_size // nodes
    local_world_size = read.number("LOCAL_WORLD_SIZE", ranks_here)
    size = max(local_world_size, 1)
    num_nodes = read.number("GROUP_WORLD_SIZE", -(-world_size // size))
    node_rank = read.number("GROUP_RANK" if "GROUP_RANK" in read.env else "NODE_RANK", rank // size)
    hosts: tuple[str, ...] = ()
    if read.launcher == "torchrun" and len(slurm_hosts(read.env)) == num_nodes:
        hosts = slurm_hosts(read.env)
    return read.rank(
        rank, world_size, local_world_size, addr, port, hosts=hosts, local_rank=read.number("LOCAL_RANK"),
        node_rank=node_rank, num_nodes=num_nodes,
    )  # fmt: skip


def _from_submitit_local(read: LauncherVariables) -> RankEnv:
    """Read submitit's one local node, whose tasks TRAINKIT_SIMULATED_NODES splits into as many blocks."""
    rank = read.number("SUBMITIT_LOCAL_GLOBALID")
    world_size = read.number("SUBMITIT_LOCAL_NTASKS")
    num_nodes = read.number("TRAINKIT_SIMULATED_NODES", 1)
    if num_nodes < 1 or world_size % num_nodes:
        what = f"{world_size} local tasks cannot be split over {num_nodes} simulated nodes."
        fix = "Unset TRAINKIT_SIMULATED_NODES; `python -m jobs.submit` sets it for its own jobs."
        raise UserError(what, why="TRAINKIT_SIMULATED_NODES must divide SUBMITIT_LOCAL_NTASKS.", fix=fix)
    port = read.number("MASTER_PORT", derived_port(f"local-{read.text('SUBMITIT_LOCAL_JOB_ID', '')}", 0))
    return read.rank(rank, world_size, world_size // num_nodes, read.text("MASTER_ADDR", "127.0.0.1"), port)


def _from_mpi(read: LauncherVariables, rank: str, size: str, local_rank: str, local_size: str) -> RankEnv:
    world_size = read.number(size)
    mine = read.number(rank)
    alone = world_size == 1
    local = read.number(local_rank, 0 if alone else None)
    local_world_size = max(read.number(local_size, 1 if alone else None), 1)
    num_nodes = -(-world_size // local_world_size)
    # mpirun fills a node before the next one unless told otherwise (`--map-by node`); it sets no node number.
    node_rank, place = divmod(mine, local_world_size)
    if place != local:
        node_rank = mine % num_nodes
    addr = _mpi_head(read, num_nodes)
    port = read.number("MASTER_PORT", job_port(read.env))
    return read.rank(mine, world_size, local_world_size, addr, port, local_rank=local, node_rank=node_rank)


def _mpi_head(read: LauncherVariables, num_nodes: int) -> str:
    azure = read.text("AZ_BATCH_MASTER_NODE", "") or read.text("AZ_BATCHAI_MPI_MASTER_NODE", "")
    told = read.text("MASTER_ADDR", "") or azure.rsplit(":", 1)[0]
    if told:  # address:port, but the port is Azure's own
        return told
    if num_nodes == 1:
        return "127.0.0.1"
    hosts = slurm_hosts(read.env)
    return hosts[0] if hosts else read.missing("MASTER_ADDR")


def _from_slurm(read: LauncherVariables) -> RankEnv:
    hosts = slurm_hosts(read.env)
    rank = read.number("SLURM_PROCID")
    # The step's numbers, where they are: SLURM_NTASKS may be that of the whole allocation.
    world_size = read.number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in read.env else "SLURM_NTASKS")
    node_rank = read.number("SLURM_NODEID")
    local_rank = read.number("SLURM_LOCALID")
    tasks = expand_counts(read.text("SLURM_STEP_TASKS_PER_NODE", "") or read.text("SLURM_TASKS_PER_NODE"))
    if node_rank >= len(tasks):
        what = f"SLURM_NODEID is {node_rank}, but the tasks per node are given for {len(tasks)} nodes."
        fix = "Submit from a shell without the SLURM_* variables of another job."
        raise UserError(what, why="Variables of two jobs are mixed in this environment.", fix=fix)
    addr = read.text("MASTER_ADDR", "")
    if not addr:
        if not hosts:
            read.missing("SLURM_STEP_NODELIST")
        addr = hosts[0] + read.env.get(HEAD_SUFFIX, "")
    return read.rank(
        rank, world_size, tasks[node_rank], addr, read.number("MASTER_PORT", job_port(read.env)), hosts=hosts,
        local_rank=local_rank, node_rank=node_rank, num_nodes=len(hosts) or read.number("SLURM_NNODES"),
    )  # fmt: skip


# The secret of one run's ranks


class ForgedError(Exception):
    """Error for a value that was not written by one who knows the secret."""


@dataclass(frozen=True)
class Secret:
    """Secret that the ranks of one run share, by which they know one another.

    The program that starts the ranks sets it in TRAINKIT_SECRET; it is never written down. Everybody knows the empty
    one.
    """

    text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.text and len(self.text) < SHORTEST:
            why = f"A stranger could guess it; it needs at least {SHORTEST} characters."
            fix = 'Make one with `python -c "import secrets; print(secrets.token_urlsafe())"`.'
            raise UserError(f"The run's secret is too short: {len(self.text)} characters.", why=why, fix=fix)

    def __bool__(self) -> bool:
        return bool(self.text)

    @classmethod
    def generate(cls) -> Secret:
        """Make a new one, of 256 random bits."""
        return cls(secrets.token_urlsafe(32))

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> Secret:
        """Read that of ``env``, as a rule os.environ; the empty one if there is none."""
        return cls(env.get(VARIABLE, "").strip())

    def derived(self, purpose: str) -> Secret:
        """Make another secret that all who know this one can make, and nobody else."""
        return Secret(self.name(f"secret/{purpose}"))

    def name(self, purpose: str) -> str:
        """Derive a name for ``purpose`` that only who knows the secret can tell: HMAC-SHA256, in hex."""
        return self._mac(b"name", purpose.encode()).hex()

    def seal(self, purpose: str, value: bytes) -> bytes:
        """Put before ``value`` a mark that only who knows the secret can make."""
        return self._mac(b"value", purpose.encode(), value) + value

    def unseal(self, purpose: str, sealed: bytes) -> bytes:
        """Return the value that was sealed for ``purpose``.

        Raises ForgedError when it was sealed with another secret, for another purpose, or not at all.
        """
        mark = sealed[:32]
        value = sealed[32:]
        if not hmac.compare_digest(mark, self._mac(b"value", purpose.encode(), value)):
            raise ForgedError(purpose)
        return value

    def _mac(self, *parts: bytes) -> bytes:
        # Each part with its length: ("ab", "c") must not be ("a", "bc").
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.text.encode(), message, hashlib.sha256).digest()


NO_SECRET = Secret()
"""Secret of a single process, and of ranks that were started by hand without one."""
