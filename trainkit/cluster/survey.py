"""Survey of a site, its scheduler, and this machine with its GPUs and CPUs. A question without an answer is a gap.

At most six calls to the scheduler. The readers are pure: from the text that SLURM's commands print to facts.
"""

import os
import platform
import pwd
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from trainkit.cluster import site, site_profile
from trainkit.cluster.scheduler import NoCluster, Scheduler, batch_here, batch_schedulers
from trainkit.cluster.site import Dialect, Partition, Site, leading_number, names_in
from trainkit.cluster.site_profile import ClusterAccount, Qos, SiteFacts
from trainkit.cluster.slurm_commands import read_config
from trainkit.common import fileio, process, terminal
from trainkit.common.accelerators import AMD, DEVICE, INTEL, NVIDIA
from trainkit.common.errors import UserError
from trainkit.common.process import NoAnswer, visible_cpus

ACCOUNT_FIELDS = ("User", "DefaultAccount", "Cluster", "Account", "Partition", "QOS")

# File systems that other machines see as well. What a disk holds (ext4, xfs) may be exported too: nobody can tell.
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|glusterfs|panfs|afs|cifs|smb3|orangefs|pvfs2|wekafs|vastnfs|moosefs|9p|virtiofs"
    r"|fuse\.(ceph.*|glusterfs|moosefs|juicefs|gcsfuse|s3fs|sshfs|lustre.*|beegfs.*)"
)
_NO_HOME = ("/proc", "/sys", "/run", "/dev", "/snap", "/boot", "/etc", "/var/lib")


def read_preemption(settings: Mapping[str, str]) -> str:
    """Say in words which jobs are preempted, and what becomes of them; empty where none is."""
    kind = settings.get("PreemptType", "")
    if not kind or kind.endswith("none"):
        return ""
    parameters = f"{settings.get('PreemptParameters', '')},{settings.get('SlurmctldParameters', '')}"
    words = f"{kind.removeprefix('preempt/')}, {settings.get('PreemptMode', '')}"
    if "send_user_signal" in parameters:
        words += ", with the job's own signal"
    return words


def read_accounts(text: str, cluster: str = "") -> tuple[ClusterAccount, ...]:
    """Read accounts of a user on ``cluster`` from ``sacctmgr -nP show user NAME withassoc format=`ACCOUNT_FIELDS```."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")[: len(ACCOUNT_FIELDS)]
        if len(fields) < len(ACCOUNT_FIELDS):
            continue
        _, default, where, name, partition, qos = fields
        if name and (not cluster or where.lower() in ("", cluster.lower())):
            found.append(ClusterAccount(name, partition, names_in(qos), name == default))
    return tuple(dict.fromkeys(found))


def read_qos(text: str) -> tuple[Qos, ...]:
    """Read QOS from ``sacctmgr -nP show qos format=Name,MaxWall,MaxTRESPU``."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 3 and fields[0]:
            found.append(Qos(*fields[:3]))
    return tuple(found)


def read_shared_folders(mounts: str) -> tuple[str, ...]:
    """List mount points of file systems that other machines see too, from ``/proc/self/mounts``."""
    places: dict[str, None] = {}
    for line in mounts.splitlines():
        _, place, kind, *_ = [*line.split(), "", "", ""]
        if _NETWORK.fullmatch(kind) and not place.startswith(_NO_HOME):
            places[place.replace("\\040", " ")] = None
    return tuple(places)


NO_ANSWER = "no answer "
"""In a gap: a scheduler that is there, and silent."""
_CONTAINERS = ("apptainer", "singularity", "enroot", "docker", "podman")
_MODULES = re.compile(r"(python|py-?torch|torch|cuda|cudnn|nccl|conda|mamba|apptainer|singularity|uv)\b", re.I)


def ask_site(env: Mapping[str, str]) -> SiteFacts:
    """Collect everything that this machine and its scheduler tell about the site."""
    user = pwd.getpwuid(os.getuid()).pw_name
    scheduler = batch_here(env) or batch_schedulers()[0]  # its programs are missed by name
    ask = _Ask(scheduler, scheduler.questions(user, ",".join(ACCOUNT_FIELDS)), env)
    config = read_config(ask("config"))
    partitions = _partitions(ask)
    nodes = list(chain.from_iterable(partition.nodes for partition in partitions))
    dialect: Dialect = "gpus-per-node"
    if any(node.gpus for node in nodes):
        # --gpus-per-node came with select/cons_tres, in 19.05; --gres is older.
        if config.get("SelectType", "select/cons_tres") != "select/cons_tres":
            dialect = "gres"
    elif any("gpu" in node.features for node in nodes):
        dialect = "constraint"
    associations = ask("accounts")
    enforced = config.get("AccountingStorageEnforce")
    is_enforced = None
    if enforced is not None:
        is_enforced = enforced.lower() not in ("none", "(null)", "")
    containers = [name for name in _CONTAINERS if shutil.which(name, path=env.get("PATH"))]
    if scheduler.has_pyxis(env):
        containers.insert(0, "pyxis")
    try:
        mounts = fileio.read_text(Path("/proc/self/mounts"))
    except OSError:
        mounts = ""
    return SiteFacts(
        cluster=config.get("ClusterName", ""),
        version=config.get("SLURM_VERSION", ""),
        gpu_dialect=dialect,
        partitions=tuple(map(site_profile.facts_of, partitions)),
        accounts=read_accounts(associations, config.get("ClusterName", "")),
        qos=read_qos(ask("qos") if associations else ""),
        accounts_enforced=is_enforced,
        max_array_size=leading_number(config.get("MaxArraySize", "")),
        kill_wait_seconds=leading_number(config.get("KillWait", "")),
        preemption=read_preemption(config),
        containers=tuple(containers),
        modules=_modules(ask),
        shared_folders=read_shared_folders(mounts),
        gaps=tuple(ask.gaps),
    )


@dataclass(frozen=True)
class _Ask:
    """Asks a question; an empty answer, and a line in ``gaps``, if its program is not there, refuses or is silent."""

    scheduler: Scheduler
    questions: Mapping[str, tuple[str, ...]]
    env: Mapping[str, str]
    gaps: list[str] = field(default_factory=list)
    unanswered: dict[str, str] = field(default_factory=dict)
    """Program -> why it has given no answer. It is not asked again: that would keep the user waiting."""

    def __call__(self, question: str) -> str:
        command = self.questions[question]
        words = " ".join(command[: command.index("show") + 2])
        answer = self.run(words, *command)
        if answer is None:
            return ""
        if answer.code:
            self.gaps.append(f"{words}: {answer.words}")
            return ""
        return answer.out

    def run(self, words: str, *command: str) -> process.ProgramOutput | None:
        """Ask a program; its answer may be that it refuses. ``words``: the question, for a gap."""
        program = command[0]
        if program not in self.unanswered:
            try:
                return self.scheduler.ask(command, self.env)
            except process.NoAnswer as error:
                self.unanswered[program] = error.words.removeprefix(f"{program} gave ")
        self.gaps.append(f"{words}: {self.unanswered[program]}")
        return None


def _partitions(ask: _Ask) -> tuple[Partition, ...]:
    partitions = ask("partitions")
    if not partitions:
        return ()
    try:
        return site.read_partitions(partitions, site.read_nodes(ask("nodes")))
    except (ValueError, KeyError, UserError) as error:  # cut off, or of a version to come
        ask.gaps.append(f"scontrol show: cannot be read: {terminal.one_line(error)}")
        return ()


def _modules(ask: _Ask) -> tuple[str, ...]:
    """List modules that training may need, as Lmod or Environment Modules do; none where neither is there."""
    home = ask.env.get("MODULESHOME", "")
    places = (
        ask.env.get("LMOD_CMD"), ask.env.get("MODULES_CMD"), f"{home}/libexec/modulecmd.tcl", f"{home}/bin/modulecmd"
    )  # fmt: skip
    programs = [place for place in places if place and os.access(place, os.X_OK)]
    if not programs:
        return ()
    done = ask.run("module avail", programs[0], "bash", "-t", "avail")
    if done is None:
        return ()
    found = []
    for line in done.err.splitlines():
        name = line.strip().removesuffix("(default)")
        kind = name.rpartition("/")[0].rpartition("/")[2] or name  # libs/cuda/12.4 is of cuda
        if _MODULES.match(kind):
            found.append(name)
    return tuple(found)


# This machine


def discover(env: Mapping[str, str]) -> Site:
    """Ask this machine, and its scheduler if it has one."""
    scheduler = batch_here(env)
    name = unknown = expected = ""
    partitions: tuple[Partition, ...] = ()
    if scheduler is not None:
        name = scheduler.name
        try:
            partitions = scheduler.partitions(env)
        except NoCluster as error:
            name = ""
            unknown = error.words
        except NoAnswer as error:
            unknown = error.words
    if not name:
        expected = max(item.expected(env) for item in batch_schedulers())
    return Site(name, local_gpus(env), visible_cpus(), partitions, unknown, expected)


def visible_gpus(mask: str | None, present: int) -> int:
    """Count the GPUs, of ``present`` ones, that a process with that mask sees.

    CUDA and ROCm read a mask in this way: the list ends at the first entry that names no device.
    """
    if mask is None or not present:
        return present
    seen = set()
    for entry in mask.split(","):
        name = entry.strip()
        is_device = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < present)
        if not is_device:
            break
        seen.add(name)
    return len(seen)


def local_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count this machine's GPUs that a process with that environment sees, by their drivers and without torch.

    Args:
        root: of /sys.
    """
    named = re.fullmatch(r"\w+:(\d{1,4})", env.get(DEVICE, ""))
    if named:
        return visible_gpus(NVIDIA.mask_in(env), int(named[1]))
    counted = {NVIDIA: _nvidia_gpus, AMD: _amd_gpus, INTEL: _intel_gpus}
    for kind, count in counted.items():
        present = count(root)
        if present:
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
    """Count the GPUs that this process may use: a job's cgroup hides the others' properties."""
    found = 0
    for node in root.glob("sys/class/kfd/kfd/topology/nodes/*"):
        with suppress(OSError, ValueError):
            found += int(fileio.read_text(node / "gpu_id")) != 0
    return found


def _intel_gpus(root: Path) -> int:
    """Count cards that only compute; one that shows a picture is counted as part of the processor."""
    found = 0
    for device in root.glob("sys/class/drm/card*/device"):
        with suppress(OSError):
            vendor = fileio.read_text(device / "vendor").strip()
            found += vendor == "0x8086" and fileio.read_text(device / "class").startswith("0x0380")
    return found


def cpu_formats() -> tuple[str, ...]:
    """List number formats that this machine's processor multiplies itself, the fastest that trains well first."""
    if cpu_flags() & {"avx512_bf16", "amx_bf16"}:
        return ("bf16", "fp32")
    return ("fp32",)


def cpu_flags() -> set[str]:
    """Read the abilities of this machine's processor, in Linux's words; empty elsewhere."""
    with suppress(OSError):
        for line in fileio.read_text(Path("/proc/cpuinfo")).splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()
