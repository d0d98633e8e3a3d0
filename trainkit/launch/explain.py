"""A plan in words: every value with its source and reason, and what a local run would start."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit import packaged
from trainkit.config.loading import Loaded
from trainkit.launch.batch_script import TASK
from trainkit.launch.plan import Plan

Row = tuple[str, str, str, str]
"""Setting, value, source, reason."""


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
            source = str(loaded.source(name)).replace(f"{packaged.folder('configs')}/", "")
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
