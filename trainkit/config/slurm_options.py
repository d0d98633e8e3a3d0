"""sbatch's and srun's own words: times, and what ``slurm_options.yaml`` says of options and of variables."""

import re
from collections.abc import Mapping
from typing import Any

from trainkit.config import yaml


def time_minutes(text: str) -> float:
    """Minutes of a time as sbatch writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises ValueError for anything else, and for zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError("a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00")
    days, *parts = match.groups()
    if days is None and parts[2] is None:  # M:S
        parts = [None, *parts[:2]]
    hours, whole, seconds = (int(part or 0) for part in parts)
    minutes = int(days or 0) * 1440 + hours * 60 + whole + seconds / 60
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
    if harmless is not None and value.startswith(harmless):
        return None
    begun: dict[str, dict[str, str]] = {}
    for row in table["refused"]:
        if program in row["of"]:
            begun |= {option: row for option in row["options"].split() if option.startswith(name)}
    if not begun:
        return None
    option = min(begun, key=len)
    return begun[option]["why"], begun[option].get("fix", "Leave it out.").format(option=option)


def settings_of(env: Mapping[str, str]) -> tuple[list[tuple[str, str, Any]], list[str]]:
    """Settings that sbatch's own variables stand for: variable, setting and value; and notes on those not passed on."""
    found: list[tuple[str, str, Any]] = []
    notes = list[str]()
    for name, text in sorted(env.items()):
        if not text or not name.startswith(("SBATCH_", "SLURM_CLUSTERS", "SLURM_HINT")):
            continue
        table = yaml.packaged("slurm_options")
        option = table["variables"].get(name, "")
        if option == "launch.gpus_per_node":
            kind, colon, count = text.rpartition(":")
            found.append((name, option, yaml.parse_value(count)))
            if colon:
                found.append((name, "launch.gpu_type", kind))
        elif option.startswith("launch."):
            found.append((name, option, text))
        elif option:
            refused = objection("sbatch", option, text)
            longest = env.get("SBATCH_WAIT4SWITCH")
            if refused is not None:
                notes.append(f"Note: {name}={text} is not passed on. {' '.join(refused)}")
                continue
            if option == "switches" and longest:
                text = f"{text}@{longest}"
            if option in table["without_value"] or (option == "exclusive" and text not in ("user", "mcs")):
                text = ""
            found.append((name, "launch.sbatch", {option: text}))
    return found, notes
