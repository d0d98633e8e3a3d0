"""A plan in words: every value with its source and reason, and what a local run would start."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.config.loading import Loaded
from trainkit.launch.batch_script import TASK
from trainkit.launch.plan import Plan

Row = tuple[str, str, str, str]
"""Setting, value, source, reason."""


# What sbatch says of a job that it does not take -> the options that it may mean.
_SIZE = (
    "gpus-per-node",
    "gres",
    "constraint",
    "nodes",
    "ntasks-per-node",
    "cpus-per-task",
    "mem",
    "nodelist",
    "exclude",
)
_REFUSALS = {
    r"account/partition|invalid account": ("account", "partition"),
    r"accounting/qos policy|association|\w*(qos|assoc)(grp|max|min)\w*": ("qos", "account", "time", "nodes"),
    r"qos": ("qos",),
    r"time limit": ("time",),
    r"feature": ("constraint",),
    r"memory": ("mem",),
    r"more processors|cpu count": ("cpus-per-task", "ntasks-per-node", "nodes"),
    r"gres|generic resource": ("gres", "gpus-per-node"),
    r"reservation": ("reservation",),
    r"dependency": ("dependency",),
    r"license": ("licenses",),
    r"wckey": ("wckey",),
    r"array": ("array",),
    r"mail": ("mail-type", "mail-user"),
    r"node count": ("nodes",),
    r"node name|nodelist": ("nodelist", "exclude"),
    r"node configuration|nodes": _SIZE,
    r"partition": ("partition",),
}
_TOO_MANY = re.compile(r"submit ?job|job submit limit|jobs? limit|too many|max(jobs|submit)", re.IGNORECASE)


def way_out(words: str, plan: Plan) -> str:
    """What to change of a job that sbatch has refused with these words: each option, and who has said it."""
    named = tuple(re.findall(r"--([a-z][a-z-]+)", words))
    fits = (options for pattern, options in _REFUSALS.items() if re.search(pattern, words, re.IGNORECASE))
    options = named or next(fits, ())
    given = [item for item in plan.directives if item.name in options]
    # What nobody has asked for is rarely it.
    asked = [item for item in given if item.source.kind not in ("default", "derived", "trainkit")] or given
    what = ", ".join(f"--{item.name}{'' if item.value is None else f' {item.value}'} ({item.source})" for item in asked)
    ways = [f"Change {what}."] if what else []
    if "account" in options or "qos" in options:
        missing = [
            f"--{name}" for name in ("account", "qos") if name in options and name not in {i.name for i in given}
        ]
        ways += [f"No {' or '.join(missing)} is given: SLURM takes your default."] if missing else []
        ways += ["`python -m jobs.cluster show` lists your accounts and QOS."]
    if _TOO_MANY.search(words):
        ways += ["If you have too many jobs there, wait for some to end."]
    return " ".join([*ways, "`--dry-run` shows all that is submitted, and who has said it."])


def plan_rows(plan: Plan) -> list[Row]:
    """Value, source and reason of everything that the plan decided."""
    rows = [("launch." + item.name, _text(item.value), str(item.source), item.reason) for item in plan.decisions]
    return rows + [
        ("#SBATCH --" + item.name, _text(item.value), str(item.source), item.reason) for item in plan.directives
    ]


def config_rows(loaded: Loaded) -> list[Row]:
    """Value and source of every setting, but for the resources, which the plan explains."""
    rows: list[Row] = []
    for section, values in loaded.config.model_dump(mode="json").items():
        if section == "launch":
            continue
        pairs: Mapping[str, Any] = values if isinstance(values, dict) else {"": values}
        for key, value in pairs.items():
            name = f"{section}.{key}" if key else section
            # Of our own presets the name says it.
            source = str(loaded.source(name)).replace(f"{fileio.folder('configs')}/", "")
            rows.append((name, _text(value), source, ""))
    return rows


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def rank_commands(plan: Plan, folder: Path) -> list[str]:
    """What a local run would start, one line a rank, for a dry run."""
    lines = []
    for rank in range(plan.world_size):
        node, local_rank = divmod(rank, plan.ntasks_per_node)
        env = (
            f"TRAINKIT_SIMULATED_NODES={plan.nodes} SUBMITIT_LOCAL_NTASKS={plan.world_size} "
            f"SUBMITIT_LOCAL_NODEID={node} SUBMITIT_LOCAL_LOCALID={local_rank} SUBMITIT_LOCAL_GLOBALID={rank}"
        )
        lines.append(f"{env} {shlex.join([sys.executable, '-u', '-c', TASK, str(folder / '.submitit')])}")
    return lines
