"""Command and environment of a script's rank."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.cluster.plan import Plan
from trainkit.cluster.ranks import RankEnv
from trainkit.common import terminal
from trainkit.common.accelerators import interface_variables
from trainkit.common.process import granted_cpus
from trainkit.config.schema import Config, ScriptConfig
from trainkit.config.script import filled
from trainkit.run.code_files import PROJECT
from trainkit.run.events import Attempt

_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_NOT_ITS = ("SUBMITIT_", "TRAINKIT_HEARTBEAT", "TRAINKIT_SIMULATED_NODES", "TRAINKIT_KEEPER")
"""Beginnings of variables that are for this process and not for a script."""


def is_shell(script: ScriptConfig) -> bool:
    """True for a shell, which cannot handle a signal that it was started to ignore."""
    program = Path(script.program or "")
    return program.name in _SHELLS or program.suffix in (".sh", ".bash")


def command_of(
    config: Config, rank_env: RankEnv, attempt: Attempt | None, cwd: Path, env: Mapping[str, str]
) -> list[str]:
    """Command that a rank starts, from the snapshot of the run where it has one."""
    script = config.script
    assert script is not None
    values = {**script.values, **_values(config, rank_env, attempt)}
    arguments = [filled(word, values) for word in script.arguments]
    if attempt is not None and attempt.number > 0 and config.launch.on_restart is not None:
        arguments += _words_of_restart(config.launch.on_restart, values, attempt)
    if script.path is not None:
        return [sys.executable, str(_in_snapshot(script.path, script, attempt)), *arguments]
    if script.module is not None:
        return [sys.executable, "-P", "-m", script.module, *arguments]
    assert script.program is not None
    words = [script.program, *arguments]
    for index, word in enumerate(words):
        if word.endswith((".py", ".sh")) and (cwd / word).is_file():
            words[index] = str(_in_snapshot(str((cwd / word).resolve()), script, attempt))
    return words


def _in_snapshot(file: str, script: ScriptConfig, attempt: Attempt | None) -> Path:
    """The run's copy of a file of the project; itself where there is none."""
    path = Path(file)
    if attempt is not None and script.root is not None and path.is_relative_to(script.root):
        copy = attempt.run.code / PROJECT / path.relative_to(script.root)
        if copy.is_file():
            return copy
    return path


def _values(config: Config, rank_env: RankEnv, attempt: Attempt | None) -> dict[str, str]:
    """Values of the placeholders that every script may use."""
    return {
        "run": "" if attempt is None else str(attempt.run.path),
        "node_rank": str(rank_env.node_rank),
        "num_nodes": str(rank_env.num_nodes),
        "gpus_per_node": str(_gpus_per_node(config, attempt)),
        "master_addr": rank_env.master_addr,
        "master_port": str(rank_env.master_port),
    }


def _gpus_per_node(config: Config, attempt: Attempt | None) -> int:
    """GPUs of each node; 1 on the CPU, where a launcher starts one process."""
    if attempt is not None and attempt.run.plan.is_file():
        return max(Plan.read(attempt.run.plan).gpus_per_node, 1)
    asked = config.launch.gpus_per_node
    return asked if isinstance(asked, int) and asked else 1


def _words_of_restart(text: str, values: Mapping[str, str], attempt: Attempt) -> list[str]:
    """Words of ``launch.on_restart``; none, and a line that says so, while a file of the run in them is not there."""
    words = [filled(word, values) for word in shlex.split(text)]
    for word in words:
        place = word.partition("=")[2] if word.startswith("-") else word
        if place.startswith(f"{attempt.run.path}/") and not os.path.lexists(place):
            terminal.warn(f"{place} is not there yet: this start goes without launch.on_restart.")
            return []
    return words


def child_environment(
    config: Config, rank_env: RankEnv, attempt: Attempt | None, env: Mapping[str, str]
) -> dict[str, str]:
    """Environment of a script: torchrun's variables, SLURM's and the user's own."""
    script = config.script
    assert script is not None
    found = {name: value for name, value in env.items() if not name.startswith(_NOT_ITS)}
    if config.launch.interface is not None:
        for name, value in interface_variables(config.launch.interface).items():
            found.setdefault(name, value)
    if attempt is not None:
        found |= attempt.environment()
    found |= torchrun_variables(rank_env, attempt)
    found["PYTHONUNBUFFERED"] = "1"  # or a log would be silent for minutes
    found.setdefault("OMP_NUM_THREADS", str(granted_cpus()))
    found["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    own = env.get("PYTHONPATH", "").split(os.pathsep)
    places = list(filter(None, own))
    if attempt is not None:
        code = str(attempt.run.code)
        places = [*(place for place in places if place != code), code]  # trainkit, behind what is the user's
        if script.path is None and (attempt.run.code / PROJECT).is_dir():
            places.insert(0, str(attempt.run.code / PROJECT))
    if script.module is not None:
        places.append(os.getcwd())
    found["PYTHONPATH"] = os.pathsep.join(places)
    return found


def torchrun_variables(rank_env: RankEnv, attempt: Attempt | None) -> dict[str, str]:
    """The variables by which torchrun tells a process its place; ``env://`` of torch reads some of them."""
    number = 0 if attempt is None else attempt.number
    return {
        "RANK": str(rank_env.rank),
        "LOCAL_RANK": str(rank_env.local_rank),
        "WORLD_SIZE": str(rank_env.world_size),
        "LOCAL_WORLD_SIZE": str(rank_env.local_world_size),
        "GROUP_RANK": str(rank_env.node_rank),
        "GROUP_WORLD_SIZE": str(rank_env.num_nodes),
        "NODE_RANK": str(rank_env.node_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank_env.rank),
        "ROLE_WORLD_SIZE": str(rank_env.world_size),
        "MASTER_ADDR": rank_env.master_addr,
        "MASTER_PORT": str(rank_env.master_port),
        "TORCHELASTIC_RUN_ID": "none" if attempt is None else attempt.run.name,
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_MAX_RESTARTS": str(number),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens the store
    }
