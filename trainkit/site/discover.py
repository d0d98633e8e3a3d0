"""Ask a site what it is: its scheduler and this machine. A question that nobody answers is a gap.

At most six calls to the scheduler. The readers are pure: from the text that SLURM's commands print to facts.
"""

import os
import pwd
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainkit import fileio, process, terminal
from trainkit.errors import UserError
from trainkit.schedulers.base import Scheduler, batch_here, batch_schedulers
from trainkit.site import profile
from trainkit.site.profile import Account, Dialect, Partition, Qos, SiteFacts, leading_number, names_in

ACCOUNT_FIELDS = ("User", "DefaultAccount", "Cluster", "Account", "Partition", "QOS")

# File systems that other machines see as well. What a disk holds (ext4, xfs) may be exported too: nobody can tell.
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|glusterfs|panfs|afs|cifs|smb3|orangefs|pvfs2|wekafs|vastnfs|moosefs|9p|virtiofs"
    r"|fuse\.(ceph.*|glusterfs|moosefs|juicefs|gcsfuse|s3fs|sshfs|lustre.*|beegfs.*)"
)
_NO_HOME = ("/proc", "/sys", "/run", "/dev", "/snap", "/boot", "/etc", "/var/lib")


def read_config(text: str) -> dict[str, str]:
    """Names and values from ``scontrol show config``."""
    return {name: value.strip() for name, value in re.findall(r"^(\w+) *= (.*)$", text, re.MULTILINE)}


def read_preemption(settings: Mapping[str, str]) -> str:
    """Who preempts whom and what becomes of those who must go; empty where nobody is preempted."""
    if not (kind := settings.get("PreemptType", "")) or kind.endswith("none"):
        return ""
    parameters = f"{settings.get('PreemptParameters', '')},{settings.get('SlurmctldParameters', '')}"
    own_signal = ", with the job's own signal" if "send_user_signal" in parameters else ""
    return f"{kind.removeprefix('preempt/')}, {settings.get('PreemptMode', '')}{own_signal}"


def read_accounts(text: str, cluster: str = "") -> tuple[Account, ...]:
    """Accounts of a user on ``cluster`` from ``sacctmgr -nP show user NAME withassoc format=`ACCOUNT_FIELDS```."""
    found = []
    for line in text.splitlines():
        if len(fields := line.split("|")) >= len(ACCOUNT_FIELDS):
            _, default, where, name, partition, qos = fields[: len(ACCOUNT_FIELDS)]
            if name and (not cluster or where.lower() in ("", cluster.lower())):
                found.append(Account(name, partition, names_in(qos), name == default))
    return tuple(dict.fromkeys(found))


def read_qos(text: str) -> tuple[Qos, ...]:
    """QOS from ``sacctmgr -nP show qos format=Name,MaxWall,MaxTRESPU``."""
    rows = [line.split("|") for line in text.splitlines()]
    return tuple(Qos(*row[:3]) for row in rows if len(row) >= 3 and row[0])


def read_shared_folders(mounts: str) -> tuple[str, ...]:
    """Where file systems are mounted that other machines see too, from ``/proc/self/mounts``."""
    rows = [[*line.split(), "", "", ""] for line in mounts.splitlines()]
    places = [row[1] for row in rows if _NETWORK.fullmatch(row[2]) and not row[1].startswith(_NO_HOME)]
    return tuple(dict.fromkeys(place.replace("\\040", " ") for place in places))


NO_ANSWER = "no answer "
"""In a gap: a scheduler that is there, and silent."""
_CONTAINERS = ("apptainer", "singularity", "enroot", "docker", "podman")
_MODULES = re.compile(r"(python|py-?torch|torch|cuda|cudnn|nccl|conda|mamba|apptainer|singularity|uv)\b", re.I)


def ask_site(env: Mapping[str, str]) -> SiteFacts:
    """Everything that this machine and its scheduler tell about the site."""
    user = pwd.getpwuid(os.getuid()).pw_name
    scheduler = batch_here(env) or batch_schedulers()[0]  # its programs are missed by name
    ask = _Ask(scheduler, scheduler.questions(user, ",".join(ACCOUNT_FIELDS)), env)
    config = read_config(ask("config"))
    partitions = _partitions(ask)
    nodes = [node for partition in partitions for node in partition.nodes]
    # How GPUs are asked for: --gpus-per-node came with select/cons_tres, in 19.05; --gres is older.
    dialect: Dialect = "constraint" if any("gpu" in node.features for node in nodes) else "gpus-per-node"
    if any(node.gpus for node in nodes):
        dialect = "gpus-per-node" if config.get("SelectType", "select/cons_tres") == "select/cons_tres" else "gres"
    associations = ask("accounts")
    enforced = config.get("AccountingStorageEnforce")
    try:
        mounts = fileio.read_text(Path("/proc/self/mounts"))
    except OSError:
        mounts = ""
    return SiteFacts(
        cluster=config.get("ClusterName", ""),
        version=config.get("SLURM_VERSION", ""),
        gpu_dialect=dialect,
        partitions=tuple(map(profile.facts_of, partitions)),
        accounts=read_accounts(associations, config.get("ClusterName", "")),
        qos=read_qos(ask("qos") if associations else ""),
        accounts_enforced=None if enforced is None else enforced.lower() not in ("none", "(null)", ""),
        max_array_size=leading_number(config.get("MaxArraySize", "")),
        kill_wait_seconds=leading_number(config.get("KillWait", "")),
        preemption=read_preemption(config),
        containers=(
            *(("pyxis",) if scheduler.has_pyxis(env) else ()),
            *(name for name in _CONTAINERS if shutil.which(name, path=env.get("PATH"))),
        ),
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
    """Programs that have given no answer, and why. They are not asked again: each would keep the user waiting."""

    def __call__(self, question: str) -> str:
        command = self.questions[question]
        words = " ".join(command[: command.index("show") + 2])
        answer = self.run(words, *command)
        if answer is not None and answer.code:
            self.gaps.append(f"{words}: {answer.words}")
        return "" if answer is None or answer.code else answer.out

    def run(self, words: str, *command: str) -> process.Answer | None:
        """What a program answers, which may be that it refuses. ``words``: the question, for a gap."""
        if (program := command[0]) not in self.unanswered:
            try:
                return self.scheduler.ask(command, self.env)
            except process.NoAnswer as error:
                self.unanswered[program] = error.words.removeprefix(f"{program} gave ")
        self.gaps.append(f"{words}: {self.unanswered[program]}")
        return None


def _partitions(ask: _Ask) -> tuple[Partition, ...]:
    partitions = ask("partitions")
    try:
        return profile.read_partitions(partitions, profile.read_nodes(ask("nodes"))) if partitions else ()
    except (ValueError, KeyError, UserError) as error:  # cut off, or of a version to come
        ask.gaps.append(f"scontrol show: cannot be read: {terminal.one_line(error)}")
        return ()


def _modules(ask: _Ask) -> tuple[str, ...]:
    """Modules that training may need, as Lmod or Environment Modules list them; () where there are none."""
    home = ask.env.get("MODULESHOME", "")
    named = [ask.env.get(name, "") for name in ("LMOD_CMD", "MODULES_CMD")]
    places = [*named, f"{home}/libexec/modulecmd.tcl", f"{home}/bin/modulecmd"]
    if (program := next((item for item in places if item and os.access(item, os.X_OK)), None)) is None:
        return ()
    done = ask.run("module avail", program, "bash", "-t", "avail")
    names = [line.strip().removesuffix("(default)") for line in done.err.splitlines()] if done is not None else []
    return tuple(name for name in names if _MODULES.match(name.rpartition("/")[0].rpartition("/")[2] or name))
