"""What this machine and its site are: SLURM or not, partitions and their nodes, GPUs and CPUs here.

`discover` asks; the rest are pure readers of what `scontrol` prints as text. Its JSON differs between SLURM's versions.
What does not change from day to day stands below ``site:`` in a profile: `jobs.cluster discover` writes it, and the
checks of a submission (`require_access`, `require_shared`) read it there instead of asking the scheduler.
"""

import grp
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from trainkit import fileio, terminal
from trainkit.accelerators import AMD, DEVICE, INTEL, NVIDIA, SHARES
from trainkit.config import yaml
from trainkit.config.loading import SITE, Loaded, find_profile
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.process import NoAnswer, visible_cpus
from trainkit.ranks import expand
from trainkit.schedulers.base import NoCluster, batch_here

# A node that is powered down is none of these: SLURM boots it for the job, as clouds do.
_DOWN = {
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "FUTURE", "INVAL", "INVALID_REG", "MAINT",
    "NOT_RESPONDING", "UNKNOWN",
}  # fmt: skip
Dialect = Literal["gpus-per-node", "gres", "constraint"]
ON_GPUS = "bf16 on GPUs from Ampere on and by AMD and Intel, fp16 on Volta and Turing, else fp32"
ON_CPUS = "bf16 on CPUs with AVX512-BF16 or AMX, else fp32"
_HEADING = "# What is known of the site; jobs are checked against it before they are queued.\n"


@dataclass(frozen=True)
class Node:
    """One compute node."""

    name: str
    cpus: int
    gpus: int
    up: bool = True
    mem_mb: int | None = None
    """Memory that jobs may have; None where the site does not say."""
    gpu_types: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """What `--constraint` can ask for."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Generic resources that are shares of GPUs -> how many one GPU has."""


@dataclass(frozen=True)
class Partition:
    """One partition; None where it sets no limit, and no names where it lets everybody in."""

    name: str
    nodes: tuple[Node, ...] = ()
    default: bool = False
    max_time_min: float | None = None
    max_nodes: int | None = None
    up: bool = True
    max_mem_mb: int | None = None
    """Memory per node that one job may have."""
    min_nodes: int | None = None
    has_memory_default: bool = False
    """The site gives a job memory by its CPUs or GPUs, if the job does not say."""
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Unix groups whose members it lets in."""
    preempt_mode: str = ""


@dataclass(frozen=True)
class Site:
    """Where a command is given. ``gpus`` and ``cpus`` are those of this machine that this process may use."""

    scheduler: str
    """Name of the scheduler that is here; empty if there is none."""
    gpus: int
    cpus: int
    partitions: tuple[Partition, ...] = ()
    unknown: str = ""
    """Why the partitions are not known, if SLURM is there but did not tell."""
    user_groups: tuple[str, ...] = ()
    """Unix groups of this user; empty where they do not matter, as for root."""

    def partition(self, name: str | None) -> Partition | None:
        """The partition of that name, or the default one; None if unknown."""
        named = (item for item in self.partitions if item.name == name or (name is None and item.default))
        return next(named, None)


def discover(env: Mapping[str, str]) -> Site:
    """Ask this machine, and its scheduler if it has one."""
    scheduler, unknown = batch_here(env), ""
    partitions: tuple[Partition, ...] = ()
    try:
        partitions = scheduler.partitions(env) if scheduler is not None else ()
    except NoAnswer as error:
        scheduler, unknown = None if isinstance(error, NoCluster) else scheduler, error.words
    groups = _own_groups() if os.geteuid() != 0 and any(partition.groups for partition in partitions) else ()
    return Site(scheduler.name if scheduler else "", local_gpus(env), visible_cpus(), partitions, unknown, groups)


def read_partitions(text: str, nodes: Mapping[str, Node]) -> tuple[Partition, ...]:
    """Partitions from ``scontrol show partition -o``."""
    return tuple(_partition(_fields(line), nodes) for line in text.splitlines() if line.startswith("PartitionName="))


def read_nodes(text: str) -> dict[str, Node]:
    """Nodes by name from ``scontrol show node -o``."""
    found = (_node(_fields(line)) for line in text.splitlines() if line.startswith("NodeName="))
    return {node.name: node for node in found}


def count_gpus(gres: str, kind: str = "gpu") -> int:
    """GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has 4, ``gpu`` has 1; or another kind."""
    return sum(int(rest[-1]) if rest and rest[-1].isdigit() else 1 for rest in _listed(gres, kind))


def gpus_asked(gres: str) -> int:
    """GPUs that a job sees which asks for these: with ``shard:2`` it is one, of which others have shards, too."""
    return count_gpus(gres) or int(any(count_gpus(gres, kind) for kind in SHARES))


def gpu_types(gres: str) -> tuple[str, ...]:
    """Types of the GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has a100."""
    return tuple(dict.fromkeys(rest[0] for rest in _listed(gres, "gpu") if rest and not rest[0].isdigit()))


def _listed(gres: str, wanted: str) -> list[list[str]]:
    """What follows a kind in each item of such a list: its type, its count, both or neither."""
    items = [item.strip().removeprefix("gres/") for item in re.sub(r"\([^)]*\)", "", gres).split(",")]
    words = [item.replace("=", ":").split(":") for item in items]
    return [rest for kind, *rest in words if kind == wanted]


def visible_gpus(mask: str | None, present: int) -> int:
    """How many of the ``present`` GPUs a process with that mask sees.

    As CUDA and ROCm read it: the list ends at the first entry that names no device.
    """
    if mask is None or not present:
        return present

    def names_one(entry: str) -> bool:
        return entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < present)

    return len(list(takewhile(names_one, dict.fromkeys(map(str.strip, mask.split(","))))))


def local_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs of this machine that a process with that environment sees; asked from drivers, without torch.

    Args:
        root: of /sys.
    """
    if named := re.fullmatch(r"\w+:(\d{1,4})", env.get(DEVICE, "")):
        return visible_gpus(NVIDIA.mask_in(env), int(named[1]))
    counted = {NVIDIA: _nvidia_gpus, AMD: _amd_gpus, INTEL: _intel_gpus}
    for kind, count in counted.items():
        if present := count(root):
            return visible_gpus(kind.mask_in(env), present)
    return int(sys.platform == "darwin" and platform.machine() == "arm64")


def _nvidia_gpus(root: Path) -> int:
    with suppress(Exception):  # no library, or no driver
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    return 0


def _amd_gpus(root: Path) -> int:
    """Those that this process may use: a job's cgroup hides the others' properties."""
    found = 0
    for node in root.glob("sys/class/kfd/kfd/topology/nodes/*"):
        with suppress(OSError, ValueError):
            found += int(fileio.read_text(node / "gpu_id")) != 0
    return found


def _intel_gpus(root: Path) -> int:
    """Cards that only compute; what shows a picture is counted as part of the processor."""
    found = 0
    for device in root.glob("sys/class/drm/card*/device"):
        with suppress(OSError):
            vendor, kind = (fileio.read_text(device / name).strip() for name in ("vendor", "class"))
            found += vendor == "0x8086" and kind.startswith("0x0380")
    return found


def cpu_formats() -> tuple[str, ...]:
    """Number formats that this machine's processor multiplies itself, the fastest that trains well first."""
    return ("bf16", "fp32") if cpu_flags() & {"avx512_bf16", "amx_bf16"} else ("fp32",)


def cpu_flags() -> set[str]:
    """What this machine's processor can do, in Linux's words; empty elsewhere."""
    with suppress(OSError):
        lines = fileio.read_text(Path("/proc/cpuinfo")).splitlines()
        return next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return set()


def _own_groups() -> tuple[str, ...]:
    found = []
    for number in {os.getegid(), *os.getgroups()}:
        with suppress(KeyError):  # a number without a name
            found.append(grp.getgrgid(number).gr_name)
    return tuple(found)


def _fields(line: str) -> dict[str, str]:
    # Values may hold spaces (OS=, Reason=), so a field runs up to the next word with an equals sign.
    return {name: value.strip() for name, value in re.findall(r"(\w+)=(.*?)(?=\s\w+=|$)", line)}


def _partition(fields: Mapping[str, str], nodes: Mapping[str, Node]) -> Partition:
    names = fields.get("Nodes", "")
    members = expand(names) if names not in ("(null)", "") else []
    return Partition(
        fields["PartitionName"],
        tuple(nodes[name] for name in members if name in nodes),
        default=fields.get("Default") == "YES",
        max_time_min=limit_minutes(fields.get("MaxTime", "")),
        max_nodes=leading_number(fields.get("MaxNodes", "")),
        up=fields.get("State", "UP") == "UP",
        max_mem_mb=leading_number(fields.get("MaxMemPerNode", "")) or None,
        min_nodes=leading_number(fields.get("MinNodes", "")) or None,
        has_memory_default=any(leading_number(fields.get(f"DefMemPer{unit}", "")) for unit in ("CPU", "Node"))
        or "DefMemPerGPU" in fields.get("JobDefaults", ""),
        accounts=names_in(fields.get("AllowAccounts", "")),
        denied_accounts=names_in(fields.get("DenyAccounts", "")),
        qos=names_in(fields.get("AllowQos", fields.get("AllowQOS", ""))),
        groups=names_in(fields.get("AllowGroups", "")),
        preempt_mode=fields.get("PreemptMode", ""),
    )


def names_in(text: str) -> tuple[str, ...]:
    """Names in a list of SLURM's; none for ALL, which is how it says that it does not mind."""
    return () if text in ("", "ALL", "(null)", "N/A") else tuple(name for name in text.split(",") if name)


def leading_number(text: str) -> int | None:
    """``5 sec`` is 5, UNLIMITED is none."""
    match = re.match(r"\d{1,18}", text)
    return int(match[0]) if match else None


def limit_minutes(text: str) -> float | None:
    """A time limit of SLURM's in minutes; None for UNLIMITED, NONE, infinite and n/a."""
    with suppress(ValueError):
        return time_minutes(text)
    return None


def _node(fields: Mapping[str, str]) -> Node:
    # CPUEfctv, where there is one, leaves out the cores that the site keeps for itself.
    cpus = fields.get("CPUEfctv") or fields.get("CPUTot") or "1"
    # CfgTRES is complete only where the site accounts for GPUs; Gres always names them.
    gpus = count_gpus(fields.get("Gres", ""))
    # "IDLE+DRAIN", "DOWN*"; "IDLE~" is one that is powered down.
    words = {word.rstrip("*~#!%$@^-") for word in fields.get("State", "").upper().split("+")}
    memory = (leading_number(fields.get("RealMemory", "")) or 0) - (leading_number(fields.get("MemSpecLimit", "")) or 0)
    mem_mb = memory if memory > 1 else None  # 1 MB is SLURM's word for a memory that nobody has configured
    types, features = gpu_types(fields.get("Gres", "")), names_in(fields.get("AvailableFeatures", ""))
    shares = {kind: count_gpus(fields.get("Gres", ""), kind) // gpus for kind in SHARES if gpus}
    return Node(fields["NodeName"], int(cpus), gpus, not words & _DOWN, mem_mb, types, features, shares)


# What a profile keeps of a site


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike. Memory in MB; null where the site does not say."""

    count: int
    cpus: int
    mem_mb: int | None = None
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartitionFacts:
    """One partition: its limits, who may use it (empty: everybody), and its nodes by kind."""

    name: str
    default: bool = False
    up: bool = True
    max_time: str | None = None
    max_nodes: int | None = None
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    preempt_mode: str = ""
    nodes: tuple[NodeKind, ...] = ()


@dataclass(frozen=True)
class Account:
    """An account that this user may charge, where (empty: in every partition), and with which QOS."""

    name: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default: bool = False


@dataclass(frozen=True)
class Qos:
    """A quality of service and its limits, in SLURM's words."""

    name: str
    max_wall: str = ""
    max_tres_per_user: str = ""


@dataclass(frozen=True)
class SiteFacts:
    """A site. None and empty: not known, or not there; ``gaps`` says what could not be asked, and why."""

    cluster: str = ""
    version: str = ""
    gpu_dialect: Dialect = "gpus-per-node"
    partitions: tuple[PartitionFacts, ...] = ()
    accounts: tuple[Account, ...] = ()
    qos: tuple[Qos, ...] = ()
    accounts_enforced: bool | None = None
    max_array_size: int | None = None
    kill_wait_seconds: int | None = None
    preemption: str = ""
    containers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shared_folders: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()


def facts_of(partition: Partition) -> PartitionFacts:
    """A partition as a profile keeps it."""
    limit = partition.max_time_min
    kinds = Counter((node.cpus, node.mem_mb, node.gpus, node.gpu_types, node.features) for node in partition.nodes)
    same = {key: getattr(partition, key) for key in ("name", "default", "up", "max_nodes", "accounts", "qos")}
    return PartitionFacts(
        **same,
        max_time=slurm_time(limit) if limit is not None else None,
        preempt_mode="" if partition.preempt_mode == "OFF" else partition.preempt_mode,
        nodes=tuple(NodeKind(count, *kind) for kind, count in kinds.items()),
    )


def to_profile(facts: SiteFacts) -> str:
    """Text of a new profile: what to ask for at this site, and below ``site:`` what was found."""
    usable = [item for item in facts.partitions if item.default] or [item for item in facts.partitions if item.up]
    launch: dict[str, object] = {"partition": usable[0].name} if usable else {}
    if facts.gpu_dialect != "gpus-per-node":
        launch["gpu_dialect"] = facts.gpu_dialect
    head = f"# {facts.cluster or 'This site'}, as `python -m jobs.cluster discover` found it."
    hint = "# Below launch: is what every job gets: any setting of launch may stand there, as account, setup, internet."
    return "\n".join([head, hint, yaml.dump({"launch": launch}), _known(facts)])


def renewed(text: str, facts: SiteFacts) -> str:
    """A profile's text with what is known of its site by now. Settings and comments stay as they are."""
    rest = re.sub(rf"^{SITE}:.*\n?(?:[ \t].*\n?|\n)*", "", text, flags=re.MULTILINE).replace(_HEADING, "").rstrip()
    return f"{rest}\n\n{_known(facts)}" if rest else _known(facts)


def _known(facts: SiteFacts) -> str:
    return _HEADING + yaml.dump({SITE: TypeAdapter(SiteFacts).dump_python(facts, mode="json", exclude_defaults=True)})


def read_facts(cluster: str) -> SiteFacts | None:
    """What the profile of that name, or in that file, knows of its site; None if it holds settings only.

    Raises UserError if there is no such profile, or its section ``site`` is damaged.
    """
    path = find_profile(cluster)
    values, lines = yaml.read(path)
    if not values.get(SITE):
        return None
    try:
        return TypeAdapter(SiteFacts).validate_python(values[SITE])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{path} cannot be read below '{SITE}' ({path}:{lines.get(f'{SITE}.{where}', lines[SITE])})."
        why = f"{where}: {first['msg']}." if where else f"{first['msg']}."
        fix = "Correct it, or find it out anew: python -m jobs.cluster discover NAME --force."
        raise UserError(what, why=why, fix=fix) from None


def lines(facts: SiteFacts) -> list[str]:
    """All of ``jobs.cluster show``: partitions as a table, the rest as in a profile, then what is not known."""
    found = [f"{facts.cluster or 'This site'}: SLURM {facts.version or 'of unknown version'}"]
    rows = [_row(partition) for partition in facts.partitions]
    found += [f"  {line}" for line in (terminal.table(rows[0], rows[1:]) if rows else [])]
    shown = {"cluster", "version", "partitions", "gaps"}
    rest = TypeAdapter(SiteFacts).dump_python(facts, mode="json", exclude=shown, exclude_defaults=True)
    found += [f"  {line}" for line in yaml.dump(rest).splitlines()] if rest else []
    return found + [f"  not known   {gap}" for gap in facts.gaps]


def _row(partition: PartitionFacts) -> tuple[str, ...]:
    kinds = " + ".join(_kind(kind) for kind in partition.nodes) or "no nodes"
    who = [f"accounts {','.join(partition.accounts)}"] if partition.accounts else []
    who += [f"QOS {','.join(partition.qos)}"] if partition.qos else []
    who += [f"preemption: {partition.preempt_mode.lower()}"] if partition.preempt_mode else []
    limit = partition.max_time or "no time limit"
    most = f"at most {partition.max_nodes} nodes a job" if partition.max_nodes else ""
    up = "" if partition.up else "takes no jobs"
    name = partition.name + "*" * partition.default
    return name, kinds, limit, ", ".join(filter(None, (most, *who, up)))


def _kind(kind: NodeKind) -> str:
    memory = f", {kind.mem_mb / 1024:.0f} GB" if kind.mem_mb else ""
    name = f" {'/'.join(kind.gpu_types)}" if kind.gpu_types else ""
    gpus = f", {kind.gpus}{name} GPU{'s' * (kind.gpus > 1)}" if kind.gpus else ""
    return f"{kind.count} x {kind.cpus} CPUs{memory}{gpus}"


# Checks of a submission


PLACEHOLDER = "CHANGE_ME"
"""What a profile or a template has where everybody has something else."""


def require_access(loaded: Loaded, partition: Partition | None, facts: SiteFacts, *, minutes: float, gpus: int) -> None:
    """Refuse an account or a QOS that this user or the partition does not have, and more than the QOS allows.

    It goes by what the scheduler has just told of the partition and what the site's profile knows, and asks nobody.
    Accounts are refused only where the site enforces them: elsewhere any name is as good as another.

    Args:
        minutes: the job's time limit.
        gpus: on all of its nodes.

    Raises:
        UserError: the account is still a profile's placeholder.
        RefusedError: everything else.
    """
    launch, names = loaded.config.launch, list(dict.fromkeys(item.name for item in facts.accounts))
    if launch.account == PLACEHOLDER:
        key, why = "launch.account", "Everybody has another one."
        fix = "Give yours: --account NAME, or export SBATCH_ACCOUNT=NAME."
        fix += f" You have: {', '.join(names)}." if names else ""
        raise UserError(f"{key} is still {PLACEHOLDER} ({loaded.source(key)}).", why=why, fix=fix, key=key)
    for key, what, why, fix in _objections(launch.account, launch.qos, names, partition, facts, minutes, gpus):
        where = "launch.qos" if key == "launch.gpus_per_node" else key
        raise RefusedError(f"{what} ({loaded.source(where)}).", why=why, fix=fix, key=key)


def _objections(
    account: str | None, qos: str | None, names: Sequence[str], partition: Partition | None, facts: SiteFacts,
    minutes: float, gpus: int,
) -> Iterator[tuple[str, str, str, str]]:  # fmt: skip
    """What stands against a request: the setting, and the three lines of its error."""
    charged = account or next((item.name for item in facts.accounts if item.default), None)
    lets_in = partition.accounts if partition is not None else ()
    is_out = partition is not None and charged in partition.denied_accounts
    if partition is not None and charged is not None and (is_out or (lets_in and charged not in lets_in)):
        why = f"It lets in: {', '.join(lets_in)}." if lets_in else "It shuts this account out."
        fix = "Use another --partition" + (f", or --account {lets_in[0]} if it is yours." if lets_in else ".")
        yield "launch.account", f"Account '{charged}' may not use partition '{partition.name}'", why, fix
    mine = [item for item in facts.accounts if charged in (None, item.name)]
    allowed = list(dict.fromkeys(name for item in mine for name in item.qos))
    if facts.accounts_enforced and facts.accounts:
        places = [item.partition for item in mine]
        if account is not None and not mine:
            fix = did_you_mean(account, names, otherwise=f"Use --account {names[0]}.")
            yield "launch.account", f"Account '{account}' is none of yours", f"You have: {', '.join(names)}.", fix
        elif account is not None and partition is not None and all(places) and partition.name not in places:
            fix = f"Use --partition {places[0]}, or another --account."
            what = f"Account '{account}' is not for partition '{partition.name}'"
            yield "launch.account", what, f"It is yours in: {', '.join(places)}.", fix
        if qos is not None and allowed and qos not in allowed:
            whose = f" with account '{charged}'" if charged else ""
            fix = did_you_mean(qos, allowed, otherwise=f"Use --qos {allowed[0]}, or leave it out.")
            yield "launch.qos", f"QOS '{qos}' is none of yours{whose}", f"You have: {', '.join(allowed)}.", fix
    if qos is not None and partition is not None and partition.qos and qos not in partition.qos:
        fix = did_you_mean(qos, partition.qos, otherwise=f"Use --qos {partition.qos[0]}, or another --partition.")
        what = f"QOS '{qos}' is not for partition '{partition.name}'"
        yield "launch.qos", what, f"It takes: {', '.join(partition.qos)}.", fix
    name = qos or (allowed[0] if len(allowed) == 1 else None)
    limits = next((item for item in facts.qos if item.name == name), None)
    if limits is not None and limits.max_wall and minutes > time_minutes(limits.max_wall):
        longest = slurm_time(time_minutes(limits.max_wall))
        what = f"--time {slurm_time(minutes)} is over the limit of QOS '{name}'"
        why = f"Its MaxWall is {longest}; SLURM would leave the job pending for ever."
        fix = f"Use --time {longest}; the job is requeued at the limit and goes on where it was."
        yield "launch.time", what, why, fix
    most = re.search(r"gres/gpu=(\d+)", limits.max_tres_per_user) if limits is not None else None
    if most is not None and gpus > int(most[1]):
        why = f"Its limit is {most[1]}; SLURM would leave the job pending for ever."
        fix = f"Ask for at most {most[1]} GPUs over all nodes, or use another --qos."
        yield "launch.gpus_per_node", f"{gpus} GPUs are more than QOS '{name}' gives one user", why, fix


LEAST_MB = 200
"""The snapshot of the code, logs and a first small checkpoint."""
LEAST_FILES = 1000
"""A snapshot is some 300 files; logs, checkpoints and TensorBoard's come on top."""

# Every machine has its own of these, on whatever site: memory, not disk.
_OWN = ("/dev", "/run", "/proc")
_USUALLY_OWN = ("/tmp", "/var/tmp")


def require_room(folder: Path) -> None:
    """Raise RefusedError where a run folder could be begun, but not filled."""
    require_text(folder)
    place = next(item for item in (folder, *folder.absolute().parents) if item.is_dir())
    try:
        there = os.statvfs(place)
    except OSError:  # making the folder will say it better
        return
    otherwise = "choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir."
    if (free_mb := there.f_bavail * there.f_frsize / 1e6) < LEAST_MB:
        why = f"{free_mb:.0f} MB are free, and {LEAST_MB} are little for a run: its code, its logs, its checkpoints."
        fix = f"Free some space, or {otherwise}"
        raise RefusedError(f"There is no room for a run in {place}.", why=why, fix=fix)
    if there.f_files and there.f_favail < LEAST_FILES:  # no number of files at all: it knows no such limit
        why = f"{there.f_favail} more files (inodes) may be made there, and a run needs {LEAST_FILES}."
        fix = f"Remove old runs or environments, or {otherwise}"
        raise RefusedError(f"There is no room for the files of a run in {place}.", why=why, fix=fix)


def require_text(folder: Path) -> None:
    """Raise UserError for a folder whose name is no text: records and scripts could not name it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        what = f"The name of {terminal.one_line(folder)} is no text in UTF-8."
        fix = "Rename that folder, or start from another one: --run-dir FOLDER."
        raise UserError(what, why="Records, scripts and logs name it.", fix=fix) from None


def require_shared(folder: Path, what: str, site: Site, shared: Sequence[str]) -> None:
    """Raise RefusedError for a folder that compute nodes do not see: their job would end without a log.

    Args:
        what: what it is, for the message: ``The run folder``.
        shared: where the site's shared file systems are, as its profile knows them; empty where nobody knows.
    """
    if _is_one_machine(site):
        return
    real = Path(os.path.realpath(folder))
    if any(real.is_relative_to(item) for item in _OWN):
        why = "Every machine has memory of its own there"
    elif shared and not any(real.is_relative_to(os.path.realpath(item)) for item in shared):
        why = f"The site's profile knows as shared: {', '.join(shared)}"
    else:
        return
    why += "; a compute node would not find it, and the job would end without a log."
    fix = f"Use a folder below {shared[0] if shared else 'your home'}"
    fix += ", or add this one to shared_folders in the profile if nodes do see it." if shared else "."
    raise RefusedError(f"{what} {folder} is on this machine alone.", why=why, fix=fix)


def doubtful(folder: Path, site: Site, shared: Sequence[str]) -> str:
    """A word of caution about a folder that most sites do not share; empty if there is no doubt."""
    real = Path(os.path.realpath(folder))
    usual = [item for item in _USUALLY_OWN if real.is_relative_to(item)]
    if shared or _is_one_machine(site) or not usual:
        return ""
    return f"Note: {folder} must be seen by the compute nodes, and few sites share {usual[0]}."


def _is_one_machine(site: Site) -> bool:
    """Whether this very machine is the only node."""
    names = {node.name for partition in site.partitions for node in partition.nodes}
    return names == {socket.gethostname().partition(".")[0]}
