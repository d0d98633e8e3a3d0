"""Times as sbatch reads and writes them."""

from __future__ import annotations

import re


def time_minutes(text: str) -> float:
    """Minutes of a time as sbatch writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises ValueError for anything else, and for zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError("a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00")
    days, *rest = match.groups()
    a, b, c = (int(part) if part else 0 for part in rest)
    if days is not None:
        minutes = int(days) * 1440 + a * 60 + b + c / 60
    elif rest[2] is not None:
        minutes = a * 60 + b + c / 60
    else:
        minutes = a + b / 60
    if minutes <= 0:
        raise ValueError("a time above zero")
    return minutes


def slurm_time(minutes: float) -> str:
    """A time as sbatch writes it: ``30:00``, ``2:00:00``, ``1-12:00:00``."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    text = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else re.sub(r"^0:", "", text)
