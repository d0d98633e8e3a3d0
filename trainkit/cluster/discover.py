"""Asking a site what it is: ``scontrol``, ``sinfo``, ``sacctmgr`` and this machine. What nobody answers is a gap.

At most six calls to the scheduler. Text formats only: SLURM's JSON differs between its versions.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit import programs, reading, terminal
from trainkit.cluster import discover_read as read
from trainkit.cluster.site import Partition, read_nodes, read_partitions
from trainkit.cluster.site_facts import Dialect, SiteFacts, facts_of
from trainkit.errors import UserError

NO_ANSWER = "no answer "
"""In a gap: a scheduler that is there, and silent."""
_CONTAINERS = ("apptainer", "singularity", "enroot", "docker", "podman")
_MODULES = re.compile(r"(python|py-?torch|torch|cuda|cudnn|nccl|conda|mamba|apptainer|singularity|uv)\b", re.I)
_MOST_MODULES = 40


def ask_site(env: Mapping[str, str]) -> SiteFacts:
    """Everything that this machine and SLURM's commands tell about the site."""
    ask = _Ask(env)
    config = read.config(ask("scontrol", "show", "config"))
    partitions = _partitions(ask)
    user = pwd.getpwuid(os.getuid()).pw_name
    fields = "format=" + ",".join(read.ACCOUNT_FIELDS)
    associations = ask("sacctmgr", "-nP", "show", "user", user, "withassoc", fields)
    qos = ask("sacctmgr", "-nP", "show", "qos", "format=Name,MaxWall,MaxTRESPU") if associations else ""
    enforced = config.get("AccountingStorageEnforce")
    return SiteFacts(
        cluster=config.get("ClusterName", ""),
        version=config.get("SLURM_VERSION", "") or _version(ask),
        gpu_dialect=_dialect(config, partitions),
        partitions=tuple(facts_of(partition) for partition in partitions),
        accounts=read.accounts(associations, config.get("ClusterName", "")),
        qos=read.qos(qos),
        accounts_enforced=None if enforced is None else enforced.lower() not in ("none", "(null)", ""),
        max_array_size=read.leading_number(config.get("MaxArraySize", "")),
        kill_wait_seconds=read.leading_number(config.get("KillWait", "")),
        preemption=read.preemption(config),
        containers=_containers(ask),
        modules=_modules(ask),
        shared_folders=read.shared_folders(_mounts()),
        gaps=tuple(ask.gaps),
    )


@dataclass(frozen=True)
class _Ask:
    """Runs a command; an empty answer, and a line in ``gaps``, if it is not there, refuses or is silent."""

    env: Mapping[str, str]
    gaps: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Programs that have not answered in time, and are not asked again: each would keep the user waiting."""

    def __call__(self, *command: str) -> str:
        words = " ".join(command[:3] if command[0] == "scontrol" else command[:4])
        if self.where(command[0]) is None:
            self.gaps.append(f"{words}: there is no {command[0]} on this machine")
            return ""
        done = self.run(command)
        if isinstance(done, str):
            self.gaps.append(f"{words}: {done}")
            return ""
        if done.code:
            said = (done.err or done.out).strip().splitlines()
            self.gaps.append(f"{words}: {terminal.one_line(said[-1]) if said else f'exit code {done.code}'}")
            return ""
        return done.out

    def where(self, program: str) -> str | None:
        return shutil.which(program, path=self.env.get("PATH"))

    def run(self, command: Sequence[str]) -> programs.Answer | str:
        """What it came to, or in words why it came to nothing."""
        if command[0] in self.silent:
            return "not asked, since it was silent before"
        try:
            return programs.ask(command, env=self.env).shown()
        except programs.NoAnswer as error:
            self.silent.add(command[0])
            return error.words.removeprefix(f"{command[0]} gave ")


def _partitions(ask: _Ask) -> tuple[Partition, ...]:
    """From scontrol; from sinfo, which knows less, where a site does not let its users ask that."""
    try:
        told = ask("scontrol", "show", "partition", "-o")
        nodes = read_nodes(ask("scontrol", "show", "node", "-o")) if told else {}
        if nodes:
            return read_partitions(told, nodes)
    except (ValueError, KeyError, UserError) as error:  # cut off, or of a version to come
        ask.gaps.append(f"scontrol show: cannot be read: {terminal.one_line(error)}")
    try:
        return read.sinfo(ask("sinfo", "-h", "-e", "-o", read.SINFO_FORMAT))
    except (ValueError, KeyError, UserError) as error:
        ask.gaps.append(f"sinfo: cannot be read: {terminal.one_line(error)}")
        return ()


def _version(ask: _Ask) -> str:
    """As sinfo says it of itself, which asks nobody: ``slurm 23.02.7``; Debian's is ``slurm-wlm 22.05.8``."""
    done = ask.run(("sinfo", "--version")) if ask.where("sinfo") else ""
    return "" if isinstance(done, str) or done.code else (done.out.split() or [""])[-1]


def _dialect(config: Mapping[str, str], partitions: Sequence[Partition]) -> Dialect:
    """How GPUs are asked for: --gpus-per-node came with select/cons_tres, in 19.05; --gres is older."""
    nodes = [node for partition in partitions for node in partition.nodes]
    if any(node.gpus for node in nodes):
        return "gpus-per-node" if config.get("SelectType", "select/cons_tres") == "select/cons_tres" else "gres"
    return "constraint" if any("gpu" in node.features for node in nodes) else "gpus-per-node"


def has_pyxis(env: Mapping[str, str] | None = None) -> bool | None:
    """Whether srun has the options that pyxis adds, by its own help, which asks nobody; None if it does not say."""
    try:
        said = programs.ask(("srun", "--help"), env=env)
    except programs.NoAnswer:
        return None
    return None if said.code else "--container-image" in said.out + said.err


def _containers(ask: _Ask) -> tuple[str, ...]:
    """Programs that are here."""
    found = [name for name in _CONTAINERS if ask.where(name)]
    return ("pyxis", *found) if has_pyxis(ask.env) else tuple(found)


def _modules(ask: _Ask) -> tuple[str, ...]:
    """Modules that training may need, as Lmod or Environment Modules list them; () where there are none."""
    home = ask.env.get("MODULESHOME", "")
    programs = [
        ask.env.get("LMOD_CMD", ""),
        ask.env.get("MODULES_CMD", ""),
        f"{home}/libexec/modulecmd.tcl",
        f"{home}/bin/modulecmd",
    ]
    program = next((item for item in programs if item and os.access(item, os.X_OK)), None)
    if program is None:
        return ()
    done = ask.run((program, "bash", "-t", "avail"))
    if isinstance(done, str):
        ask.gaps.append(f"module avail: {done}")
        return ()
    names = [line.strip().removesuffix("(default)") for line in done.err.splitlines()]
    wanted = [name for name in names if _MODULES.match(name.rpartition("/")[0].rpartition("/")[2] or name)]
    if len(wanted) > _MOST_MODULES:
        ask.gaps.append(f"module avail: the first {_MOST_MODULES} of {len(wanted)}")
    return tuple(wanted[:_MOST_MODULES])


def _mounts() -> str:
    try:
        return reading.read_text(Path("/proc/self/mounts"))
    except OSError:
        return ""
