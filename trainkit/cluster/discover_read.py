"""Readers of what SLURM's commands and this machine print about a site: pure, from text to facts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from trainkit.cluster.site import Node, Partition, count_gpus, gpu_types, names_in
from trainkit.cluster.site_facts import Account, Qos
from trainkit.config.slurm_options import time_minutes
from trainkit.ranks.hostlist import expand

ACCOUNT_FIELDS = ("User", "DefaultAccount", "Cluster", "Account", "Partition", "QOS")
SINFO_FORMAT = "%P|%a|%l|%s|%c|%m|%f|%G|%T|%N"

# File systems that other machines see as well. What a disk holds (ext4, xfs) may be exported too: nobody can tell.
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|glusterfs|panfs|afs|cifs|smb3|orangefs|pvfs2|wekafs|vastnfs|moosefs|9p|virtiofs"
    r"|fuse\.(ceph.*|glusterfs|moosefs|juicefs|gcsfuse|s3fs|sshfs|lustre.*|beegfs.*)"
)
_NO_HOME = ("/proc", "/sys", "/run", "/dev", "/snap", "/boot", "/etc", "/var/lib")


def config(text: str) -> dict[str, str]:
    """Names and values from ``scontrol show config``."""
    return {name: value.strip() for name, value in re.findall(r"^(\w+) *= (.*)$", text, re.MULTILINE)}


def leading_number(text: str) -> int | None:
    """``5 sec`` is 5."""
    match = re.match(r"\d{1,18}", text)
    return int(match[0]) if match else None


def preemption(settings: Mapping[str, str]) -> str:
    """Who preempts whom and what becomes of those who must go; empty where nobody is preempted."""
    kind = settings.get("PreemptType", "")
    if not kind or kind.endswith("none"):
        return ""
    parameters = f"{settings.get('PreemptParameters', '')},{settings.get('SlurmctldParameters', '')}"
    own_signal = ", with the job's own signal" if "send_user_signal" in parameters else ""
    return f"{kind.removeprefix('preempt/')}, {settings.get('PreemptMode', '')}{own_signal}"


def accounts(text: str, cluster: str = "") -> tuple[Account, ...]:
    """Accounts of a user on ``cluster`` from ``sacctmgr -nP show user NAME withassoc format=`ACCOUNT_FIELDS```."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= len(ACCOUNT_FIELDS):
            _, default, where, name, partition, qos = fields[: len(ACCOUNT_FIELDS)]
            if name and (not cluster or where.lower() in ("", cluster.lower())):
                found.append(Account(name, partition, names_in(qos), name == default))
    return tuple(dict.fromkeys(found))


def qos(text: str) -> tuple[Qos, ...]:
    """QOS from ``sacctmgr -nP show qos format=Name,MaxWall,MaxTRESPU``."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(Qos(*row[:3]) for row in rows if len(row) >= 3 and row[0])


def sinfo(text: str) -> tuple[Partition, ...]:
    """Partitions from ``sinfo -h -e -o`` `SINFO_FORMAT`: one line for nodes of a kind and a state."""
    found: dict[str, Partition] = {}
    members: dict[str, list[Node]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != SINFO_FORMAT.count("|") + 1:
            continue
        name, up, limit, size, cpus, memory, features, gres, state, names = fields
        up_node = not re.match(r"(down|drain|drng|fail|inval|maint|unk|future|planned_down)", state)
        node = Node(
            "",
            int(cpus.rstrip("+") or 1),
            count_gpus(gres),
            up=up_node,
            mem_mb=number if (number := leading_number(memory)) and number > 1 else None,
            gpu_types=gpu_types(gres),
            features=names_in(features),
        )
        members.setdefault(name.rstrip("*"), []).extend(replace(node, name=host) for host in names and expand(names))
        largest = size.rpartition("-")[2]
        found[name.rstrip("*")] = Partition(
            name.rstrip("*"),
            default=name.endswith("*"),
            max_time_min=_minutes(limit),
            max_nodes=int(largest) if largest.isdigit() else None,
            up=up == "up",
        )
    return tuple(replace(partition, nodes=tuple(members[name])) for name, partition in found.items())


def shared_folders(mounts: str) -> tuple[str, ...]:
    """Where file systems are mounted that other machines see too, from ``/proc/self/mounts``."""
    found = []
    for line in mounts.splitlines():
        _, place, kind, *_ = [*line.split(), "", "", ""]
        if _NETWORK.fullmatch(kind) and not place.startswith(_NO_HOME):
            found.append(place.replace("\\040", " "))
    return tuple(dict.fromkeys(found))


def _minutes(text: str) -> float | None:
    try:
        return time_minutes(text)
    except ValueError:  # infinite, n/a
        return None
