"""sbatch's and srun's own words: times, and what ``slurm_options.yaml`` says of options and of variables."""

import re
from collections.abc import Mapping
from typing import Any

from trainkit.config import yaml


def time_minutes(text: str) -> float:
    """Minutes of a time as sbatch writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises ValueError for anything else, and for zero.
    """
    if (match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)) is None:
        raise ValueError("a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00")
    days, *parts = (int(part) if part else None for part in match.groups())
    if days is None and parts[2] is None:  # M:S
        parts = [0, *parts[:2]]
    hours, whole, seconds = (part or 0 for part in parts)
    minutes = (days or 0) * 1440 + hours * 60 + whole + seconds / 60
    if minutes <= 0:
        raise ValueError("a time above zero")
    return minutes


def slurm_time(minutes: float) -> str:
    """A time as sbatch writes it: ``30:00``, ``2:00:00``, ``1-12:00:00``."""
    days, rest = divmod(round(minutes * 60), 86400)
    hours, rest = divmod(rest, 3600)
    text = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else re.sub(r"^0:", "", text)


def objection(program: str, name: str, value: str) -> tuple[str, str] | None:
    """Why an option (by its long name) is not passed on, and what to do instead; None if it is."""
    table = yaml.packaged("slurm_options")
    harmless = table["harmless"].get(f"{program} {name}")
    rows = [(option, row) for row in table["refused"] for option in row["options"].split() if program in row["of"]]
    begun = [(option, row) for option, row in rows if option.startswith(name)]
    if not begun or (harmless is not None and value.startswith(harmless)):
        return None
    option, row = min(begun, key=lambda found: len(found[0]))
    return row["why"], row.get("fix", "Leave it out.").format(option=option)


def settings_of(env: Mapping[str, str]) -> tuple[list[tuple[str, str, Any]], list[str]]:
    """What sbatch's own variables say: each variable with the setting that it is and its value; and of those that are
    not passed on, why."""
    found: list[tuple[str, str, Any]] = []
    notes = []
    ours = ("SBATCH_", "SLURM_CLUSTERS", "SLURM_HINT")
    given = {name: text for name, text in sorted(env.items()) if text and name.startswith(ours)}
    table = yaml.packaged("slurm_options") if given else {"variables": {}}
    for name, text in given.items():
        option = table["variables"].get(name, "")
        if option == "launch.gpus_per_node":
            kind, colon, count = text.rpartition(":")
            found.append((name, option, yaml.parse_value(count)))
            found += [(name, "launch.gpu_type", kind)] if colon else []
        elif option.startswith("launch."):
            found.append((name, option, text))
        elif option and (refused := objection("sbatch", option, text)) is not None:
            notes.append(f"Note: {name}={text} is not passed on. {' '.join(refused)}")
        elif option:
            if option == "switches" and (longest := env.get("SBATCH_WAIT4SWITCH")):
                text = f"{text}@{longest}"
            is_bare = option in table["without_value"] or (option == "exclusive" and text not in ("user", "mcs"))
            found.append((name, "launch.sbatch", {option: "" if is_bare else text}))
    return found, notes
