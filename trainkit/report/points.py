"""What ``sweep.json`` says was swept: by it the runs of a sweep have their names, which as folders are 0, 1, 2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainkit import fileio, terminal

Point = dict[str, str]
"""Swept keys and their values, as they were written."""


def points_of(sweep: Path) -> dict[str, Point]:
    """By run; empty if the folder is no sweep. Overrides that all runs share are left out."""
    try:
        told = fileio.parse(fileio.read_text(sweep / "sweep.json"))
        found = {str(item["run"]): dict(_pair(str(word)) for word in item["overrides"]) for item in told}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    first = next(iter(found.values()), {})
    shared = {key for key in first if len(found) > 1 and all(other.get(key) == first[key] for other in found.values())}
    return {run: {key: value for key, value in point.items() if key not in shared} for run, point in found.items()}


def name_of(point: Mapping[str, str]) -> str:
    """``lr=1e-3, schedule=wsd``: a key by its last part that says something, where no other of them has the same."""
    short = [key.removesuffix(".name").rpartition(".")[2] for key in point]
    return ", ".join(
        f"{last if short.count(last) == 1 else key}={value}"
        for last, (key, value) in zip(short, point.items(), strict=True)
    )


def _pair(override: str) -> tuple[str, str]:
    key, _, value = terminal.one_line(override).partition("=")
    return key, value
