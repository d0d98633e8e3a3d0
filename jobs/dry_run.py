"""What ``--dry-run`` prints: on stdout what would be submitted, on stderr every value with its source and reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.config.loading import Loaded
from trainkit.launch.plan import Plan
from trainkit.launch.submission import rank_commands

Row = tuple[str, str, str, str]


def show(plan: Plan, loaded: Loaded, folder: Path, script: str | None) -> None:
    """Print the script, or the commands of a local run, and the table of values."""
    if script is not None:
        sys.stdout.write(script)
    else:
        print(f"# {plan.executor}: {plan.nodes} x {plan.ntasks_per_node} ranks on this machine, run folder {folder}")
        print("\n".join(rank_commands(plan, folder)))
    sys.stdout.flush()
    rows = plan_rows(plan) + config_rows(loaded)
    if sys.stderr.isatty():
        _table(rows)
    else:
        for row in rows:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(row, _widths(rows), strict=True)).rstrip(), file=sys.stderr)


def plan_rows(plan: Plan) -> list[Row]:
    """Value, source and reason of everything that the plan decided."""
    rows = [("launch." + item.name, _text(item.value), str(item.source), item.reason) for item in plan.settings]
    return rows + [("#SBATCH --" + item.name, _text(item.value), str(item.source), item.reason) for item in plan.directives]


def config_rows(loaded: Loaded) -> list[Row]:
    """Value and source of every setting, but for the resources, which the plan explains."""
    rows: list[Row] = []
    for section, values in loaded.config.model_dump(mode="json").items():
        if section == "launch":
            continue
        pairs: Mapping[str, Any] = values if isinstance(values, dict) else {"": values}
        for key, value in pairs.items():
            name = f"{section}.{key}" if key else section
            rows.append((name, _text(value), str(loaded.source(name)), ""))
    return rows


def _widths(rows: list[Row]) -> list[int]:
    return [min(max(len(row[column]) for row in rows), 60) for column in range(4)]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "source", "reason", box=None)
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
