"""Which rank am I, where do the ranks meet, and what do they alone know.

`RankEnv` is a pure function of the environment that torchrun, srun, mpirun, submitit or a human has set. The finest
description wins. ``srun torchrun``, and mpirun's daemons that srun starts, leave SLURM's variables of the
*launcher* in the environment of each rank, so torchrun, submitit's local executor and mpirun go before SLURM.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import math
import re
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainkit import fileio, terminal
from trainkit.errors import UserError

PORTS = range(20000, 30000)
"""Below Linux's default ephemeral range (32768-60999): a port in that range can be taken, between our probe and
rank 0's bind, by any outgoing connection."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
VARIABLE = "TRAINKIT_SECRET"
SHORTEST = 16
"""Characters of a secret. Strangers can see what is sealed with it, and try all short ones in peace."""
HAND_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
HEAD_SUFFIX = "TRAINKIT_HEAD_SUFFIX"
"""What the names of nodes end with in the network between them, where that has names of its own: ``i`` at JSC."""
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_OTHER_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Step ids from here on are SLURM's own: the shell of salloc (interactive), the batch script, external, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MOST = 100_000
"""Hosts in one list; SLURM itself knows at most 65,533."""
_LONGEST = 1 << 20
"""Characters of a list."""
_RANGES = r"\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*"
_ITEM = rf"(?:[^,\[\]\s]|\[{_RANGES}\])+"  # a comma inside brackets does not end an item
_LIST = re.compile(rf"{_ITEM}(?:,{_ITEM})*")
_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)  # the last one of a host name
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


# Lists of hosts


def expand(nodelist: str) -> list[str]:
    """The host names of ``nodelist`` in its order, which is SLURM's order of nodes.

    ``rack[1-2]-n[03-04]`` is ``rack1-n03, rack1-n04, rack2-n03, rack2-n04``; leading zeros are kept.
    Raises UserError if it is empty, malformed, or longer than any machine's.
    """
    hosts: list[str] = []
    try:
        if len(nodelist) > _LONGEST or not _LIST.fullmatch(nodelist):
            raise ValueError
        for item in re.findall(_ITEM, nodelist):
            parts = re.split(r"[\[\]]", item)  # text, ranges, text, ...
            choices = [_numbers(part) if at % 2 else [part] for at, part in enumerate(parts)]
            if math.prod(map(len, choices)) + len(hosts) > _MOST:
                raise ValueError
            hosts += map("".join, itertools.product(*choices))
    except ValueError:
        what = f"Cannot read the host list '{terminal.one_line(nodelist, 200)}'."
        fix = "Give host names, or a list that 'scontrol show hostnames' can read."
        raise UserError(what, why="SLURM writes them like 'n1,n2' or 'gpu[03-05,9]'.", fix=fix) from None
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= _MOST - len(numbers):
            raise ValueError
        numbers += [str(int(first) + at).zfill(len(first)) for at in range(count)]
    return numbers


def fold(hosts: Sequence[str]) -> str:
    """``hosts`` for people, in their order: three and more in a row are ``n[01-32]``."""
    rows: list[list[str]] = []
    for host in hosts:
        if rows and host == _successor(rows[-1][-1]):
            rows[-1].append(host)
        else:
            rows.append([host])
    words: list[str] = []
    for row in rows:
        if len(row) > 2 and (first := _NUMBER.fullmatch(row[0])) is not None:
            last = row[-1][len(first[1]) :].removesuffix(first[3])
            row = [f"{first[1]}[{first[2]}-{last}]{first[3]}"]
        words += row
    return ", ".join(words)


def _successor(host: str) -> str | None:
    match = _NUMBER.fullmatch(host)
    return match and f"{match[1]}{int(match[2]) + 1:0{len(match[2])}}{match[3]}"


def expand_counts(counts: str) -> list[int]:
    """SLURM_TASKS_PER_NODE, one number per node: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    found: list[int] = []
    for item in counts.split(","):
        if (match := _COUNT.fullmatch(item)) is None:
            fix = "Leave SLURM_TASKS_PER_NODE as SLURM sets it."
            why = "SLURM writes them like '4' or '2(x3),1'."
            raise UserError(f"Cannot read the tasks per node '{counts}'.", why=why, fix=fix)
        found += [int(match[1])] * int(match[2] or 1)
    return found


# Where the ranks meet


def derived_port(job: str, attempt: int) -> int:
    """A port that all ranks compute alike, without a message: another one for each job, and for each attempt of it."""
    digest = hashlib.sha256(job.encode()).digest()
    # A stride that shares no factor with the span: the attempts of a job visit every port before one returns.
    return PORTS[(int.from_bytes(digest[:4], "big") + 7919 * attempt) % len(PORTS)]


def candidates(start: int, ephemeral: range) -> Iterable[int]:
    """Ports to try, from ``start`` on; none of them ephemeral, unless the site has made all of them so."""
    ring = [*range(start, PORTS.stop), *range(PORTS.start, start)]
    outside = [port for port in ring if port not in ephemeral]
    return outside or [port for port in range(1024, 65536) if port not in ephemeral] or ring


def free_port(start: int | None = None) -> int:
    """A port that nothing listens on here now, outside the kernel's range for outgoing connections; near ``start``,
    else anywhere."""
    try:
        first, last = map(int, fileio.read_text(_EPHEMERAL).split())
    except OSError:  # not Linux: the range that IANA suggests, which macOS uses
        first, last = 49152, 65535
    for port in candidates(secrets.choice(PORTS) if start is None else start, range(first, last + 1)):
        if is_free(port):
            return port
    why = f"Everything outside the ephemeral range, from {PORTS.start} on, is taken on {socket.gethostname()}."
    raise UserError("No free port for the ranks to meet on.", why=why, fix="Set MASTER_PORT to a free one.")


def check_head(addr: str, num_nodes: int) -> None:
    """Refuse a head node that other nodes cannot reach: a name that does not resolve, or loopback on several nodes."""
    try:
        addresses = _addresses(addr)
    except OSError as error:
        why = f"Its name does not resolve on {socket.gethostname()}: {error}."
        fix = "Give a name or an IP address that every node can resolve, as MASTER_ADDR or --master-addr."
        raise UserError(f"The head node '{addr}' cannot be found.", why=why, fix=fix) from error
    if num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise UserError(
            f"The head node '{addr}' is loopback ({', '.join(sorted(addresses))}), but there are {num_nodes} nodes.",
            why="On every other node that address is the node itself, so its ranks would wait for ever.",
            fix="Give the head node's address in the nodes' network, as MASTER_ADDR or --master-addr.",
        )


def head_address(addr: str) -> str | None:
    """The head node's address in the nodes' network, by its name as another node sees it; None if there is none."""
    with suppress(OSError):
        return next((each for each in _addresses(addr) if not ipaddress.ip_address(each).is_loopback), None)
    return None


def _addresses(addr: str) -> list[str]:
    """Addresses of a name, without the scope of ``fe80::1%eth0``. Raises OSError if it does not resolve."""
    found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def address_towards(addr: str) -> str | None:
    """This machine's own address on the route to ``addr``, as the kernel would choose it; nothing is sent."""
    there = head_address(addr)
    if there is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError:  # no route
            return None
        return str(probe.getsockname()[0]).split("%")[0]


def is_free(port: int) -> bool:
    """Whether a server may listen on this port of this machine."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both families, as TCPStore listens
        # As TCPStore does: a port in TIME_WAIT from the attempt before may be used, one in LISTEN may not.
        # Bound and not listened on: ranks that dial already would be accepted, and then cut off.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def restarts(env: Mapping[str, str]) -> int:
    """How often SLURM has restarted the job."""
    count = env.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


# Which rank this process is


def is_srun_task(env: Mapping[str, str]) -> bool:
    """Not the shell of salloc (no PROCID, or an interactive step) nor the batch script (PROCID 0, no numbered step)."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def slurm_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Hosts of the step, else of the job; empty outside SLURM."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((tuple(expand(env[name])) for name in names if env.get(name)), ())


def job_port(env: Mapping[str, str]) -> int:
    """The port where the ranks of a job meet, when nobody has set one."""
    # All ranks must agree without a message, so from what all of them see: the job, its step, how often it restarted.
    names = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "AZ_BATCH_JOB_ID")
    job = next((f"{env[name]}.{env.get('SLURM_STEP_ID', '')}" for name in names if env.get(name)), "")
    return derived_port(job, restarts(env))


def is_loopback(addr: str) -> bool:
    """Whether the address is this machine's own."""
    return addr in ("localhost", "::1") or addr.startswith("127.")


@dataclass(frozen=True)
class Reader:
    """Variables of one launcher, with errors that name them."""

    env: Mapping[str, str]
    launcher: str

    def text(self, name: str, default: str | None = None) -> str:
        """A variable's value, or the default; without one, UserError when it is not set."""
        value = self.env.get(name, "")
        return value or (self.missing(name) if default is None else default)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0; otherwise UserError."""
        value = self.text(name, None if default is None else str(default))
        if not value.isdecimal():
            why = f"This process was started as a rank ({self.launcher}), and {name} says which."
            fix = f"Set {name} to a number, or unset it."
            raise UserError(f"{name}='{value}' is not a number.", why=why, fix=fix)
        return int(value)

    def missing(self, name: str) -> NoReturn:
        """Raise the UserError for a set of variables without ``name``."""
        there = [other for other in HAND_SET if other in self.env]
        raise UserError(
            f"{name} is not set, so this process cannot tell its place among the ranks.",
            why=f"Only part of a set is there ({self.launcher}){': ' * bool(there)}{', '.join(there)}.",
            fix=f"Set {name} too, or unset the others to run as a single process.",
        )

    def rank(self, rank: int, world_size: int, local_world_size: int, addr: str, port: int, **known: Any) -> RankEnv:
        """A rank; local_rank, node_rank and num_nodes are ``known``, or those of nodes whose ranks follow one
        another."""
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
                raise UserError(
                    f"{name} {getattr(self, name)} does not fit {size} {getattr(self, size)}.",
                    why=f"The environment that '{self.launcher}' gives to this process contradicts itself.",
                    fix="Unset variables left over from another launcher, or set all of them anew.",
                )
        if not 0 <= self.master_port < 65536:
            why = f"Ports go from 1 to 65535; it is where the ranks of '{self.launcher}' meet."
            fix = "Set MASTER_PORT to a free port, for example 29500, or unset it."
            raise UserError(f"Port {self.master_port} does not exist.", why=why, fix=fix)

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
        if "TORCHELASTIC_RUN_ID" in env:
            return _from_variables(Reader(env, "torchrun"))
        # LOCAL_RANK tells torchrun's ranks from RANK and WORLD_SIZE that a batch script exported for the whole job.
        if all(name in env for name in _TORCH_VARIABLES):
            return _from_variables(Reader(env, "manual"))
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            return _from_submitit_local(Reader(env, "submitit-local"))
        if any(name in env for name in _OPEN_MPI[:2]):
            return _from_mpi(Reader(env, "mpi"), *_OPEN_MPI)
        # `srun --mpi=pmi2` sets PMI_RANK too, but not the local ones, which come from Intel MPI's and MPICH's mpirun.
        if "MPI_LOCALRANKID" in env or (not is_srun_task(env) and any(name in env for name in _OTHER_MPI[:2])):
            return _from_mpi(Reader(env, "mpi"), *_OTHER_MPI)
        if is_srun_task(env):
            return _from_slurm(Reader(env, "slurm"))
        # In a batch script, and in a shell of an allocation, MASTER_ADDR is for the tasks that it will start.
        is_job_shell = "SLURM_JOB_ID" in env and "RANK" not in env
        if any(name in env for name in HAND_SET) and not is_job_shell:
            return _from_variables(Reader(env, "manual"))
        return cls.single()

    @classmethod
    def single(cls) -> RankEnv:
        """The only process there is."""
        return Reader({}, "single").rank(0, 1, 1, "127.0.0.1", 0)


def device_index(local_rank: int, visible_device_count: int) -> int:
    """The index, among the devices visible to this process, of the one it should use.

    The mask is taken as it is: under ``--gpus-per-node`` each task sees all devices of the job on its node, under
    ``--gpus-per-task=1`` only its own, which then is number 0.
    """
    if visible_device_count == 1:
        return 0
    if local_rank < visible_device_count:
        return local_rank
    what = f"Local rank {local_rank} has no device: {visible_device_count} visible."
    fix = "Start as many ranks per node as it has devices (--ntasks-per-node), or let this process see more."
    raise UserError(what, why="Every rank of a node takes the visible device of its local rank's number.", fix=fix)


def _from_variables(read: Reader) -> RankEnv:
    """torch's variables, set by torchrun or by hand."""
    rank, world_size = read.number("RANK"), read.number("WORLD_SIZE")
    addr, port = read.text("MASTER_ADDR"), read.number("MASTER_PORT")
    ranks_here = world_size if world_size == 1 or is_loopback(addr) else None
    if read.launcher == "manual" and not all(name in read.env for name in _TORCH_VARIABLES):
        # By hand LOCAL_RANK may be missing: then all ranks are on this machine, or there is one on each.
        return read.rank(rank, world_size, max(read.number("LOCAL_WORLD_SIZE", ranks_here or 1), 1), addr, port)
    nodes = read.number("AZUREML_NODE_COUNT", 0)
    if nodes and world_size % nodes == 0:  # each with as many ranks
        ranks_here = world_size // nodes
    local_world_size = read.number("LOCAL_WORLD_SIZE", ranks_here)
    size = max(local_world_size, 1)
    num_nodes = read.number("GROUP_WORLD_SIZE", -(-world_size // size))
    hosts = slurm_hosts(read.env) if read.launcher == "torchrun" else ()
    return read.rank(
        rank,
        world_size,
        local_world_size,
        addr,
        port,
        hosts=hosts if len(hosts) == num_nodes else (),
        local_rank=read.number("LOCAL_RANK"),
        node_rank=read.number("GROUP_RANK" if "GROUP_RANK" in read.env else "NODE_RANK", rank // size),
        num_nodes=num_nodes,
    )


def _from_submitit_local(read: Reader) -> RankEnv:
    """submitit knows one local node; TRAINKIT_SIMULATED_NODES splits its tasks into as many blocks."""
    rank, world_size = read.number("SUBMITIT_LOCAL_GLOBALID"), read.number("SUBMITIT_LOCAL_NTASKS")
    num_nodes = read.number("TRAINKIT_SIMULATED_NODES", 1)
    if num_nodes < 1 or world_size % num_nodes:
        what = f"{world_size} local tasks cannot be split over {num_nodes} simulated nodes."
        fix = "Unset TRAINKIT_SIMULATED_NODES; `python -m jobs.submit` sets it for its own jobs."
        raise UserError(what, why="TRAINKIT_SIMULATED_NODES must divide SUBMITIT_LOCAL_NTASKS.", fix=fix)
    port = read.number("MASTER_PORT", derived_port(f"local-{read.text('SUBMITIT_LOCAL_JOB_ID', '')}", 0))
    return read.rank(rank, world_size, world_size // num_nodes, read.text("MASTER_ADDR", "127.0.0.1"), port)


def _from_mpi(read: Reader, rank: str, size: str, local_rank: str, local_size: str) -> RankEnv:
    world_size = read.number(size)
    is_alone = world_size == 1
    mine, local = read.number(rank), read.number(local_rank, 0 if is_alone else None)
    local_world_size = max(read.number(local_size, 1 if is_alone else None), 1)
    num_nodes = -(-world_size // local_world_size)
    # mpirun fills a node before the next one unless told otherwise (`--map-by node`); it sets no node number.
    node_rank = mine // local_world_size if mine % local_world_size == local else mine % num_nodes
    addr, port = _mpi_head(read, num_nodes), read.number("MASTER_PORT", job_port(read.env))
    return read.rank(mine, world_size, local_world_size, addr, port, local_rank=local, node_rank=node_rank)


def _mpi_head(read: Reader, num_nodes: int) -> str:
    azure = read.text("AZ_BATCH_MASTER_NODE", "") or read.text("AZ_BATCHAI_MPI_MASTER_NODE", "")
    if told := read.text("MASTER_ADDR", "") or azure.rsplit(":", 1)[0]:  # address:port, but the port is Azure's own
        return told
    return "127.0.0.1" if num_nodes == 1 else next(iter(slurm_hosts(read.env)), "") or read.missing("MASTER_ADDR")


def _from_slurm(read: Reader) -> RankEnv:
    hosts, rank = slurm_hosts(read.env), read.number("SLURM_PROCID")
    # The step's numbers, where they are: SLURM_NTASKS may be that of the whole allocation.
    world_size = read.number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in read.env else "SLURM_NTASKS")
    node_rank, local_rank = read.number("SLURM_NODEID"), read.number("SLURM_LOCALID")
    step = "SLURM_STEP_TASKS_PER_NODE" in read.env
    tasks = expand_counts(read.text("SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE"))
    if node_rank >= len(tasks):
        what = f"SLURM_NODEID is {node_rank}, but the tasks per node are given for {len(tasks)} nodes."
        fix = "Submit from a shell without SLURM_* of another job."
        raise UserError(what, why="Variables of two jobs are mixed in this environment.", fix=fix)
    first = next(iter(hosts), "")
    named = f"{first}{read.env.get(HEAD_SUFFIX, '')}" if first else ""
    addr = read.text("MASTER_ADDR", "") or named or read.missing("SLURM_STEP_NODELIST")
    return read.rank(
        rank, world_size, tasks[node_rank], addr, read.number("MASTER_PORT", job_port(read.env)), hosts=hosts,
        local_rank=local_rank, node_rank=node_rank, num_nodes=len(hosts) or read.number("SLURM_NNODES"),
    )  # fmt: skip


# What the ranks of one run know


class ForgedError(Exception):
    """What was read was not written by one who knows the secret."""


@dataclass(frozen=True)
class Secret:
    """What the ranks of one run know and nobody else: whoever does not know it is no rank of it.

    It comes in TRAINKIT_SECRET, which whoever starts the ranks sets, and is never written down. Everybody knows the
    empty one.
    """

    text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.text and len(self.text) < SHORTEST:
            why = f"A stranger could guess it; {SHORTEST} characters are the least."
            fix = 'Make one with `python -c "import secrets; print(secrets.token_urlsafe())"`.'
            raise UserError(f"The run's secret is too short: {len(self.text)} characters.", why=why, fix=fix)

    def __bool__(self) -> bool:
        return bool(self.text)

    @classmethod
    def generate(cls) -> Secret:
        """A new one, of 256 random bits."""
        return cls(secrets.token_urlsafe(32))

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> Secret:
        """That of ``env``, as a rule os.environ; the empty one if there is none."""
        return cls(env.get(VARIABLE, "").strip())

    def name(self, purpose: str) -> str:
        """A name for ``purpose`` that only who knows the secret can tell: HMAC-SHA256, in hex."""
        return self._mac(b"name", purpose.encode()).hex()

    def seal(self, purpose: str, value: bytes) -> bytes:
        """``value`` with a mark that only who knows the secret can make."""
        return self._mac(b"value", purpose.encode(), value) + value

    def unseal(self, purpose: str, sealed: bytes) -> bytes:
        """The value that was sealed for ``purpose``.

        Raises ForgedError when it was sealed with another secret, for another purpose, or not at all.
        """
        mark, value = sealed[:32], sealed[32:]
        if not hmac.compare_digest(mark, self._mac(b"value", purpose.encode(), value)):
            raise ForgedError(purpose)
        return value

    def _mac(self, *parts: bytes) -> bytes:
        # Each part with its length: ("ab", "c") must not be ("a", "bc").
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.text.encode(), message, hashlib.sha256).digest()


NO_SECRET = Secret()
"""Of a single process, and of ranks that were started by hand without one."""
