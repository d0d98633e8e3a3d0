"""Points of a sweep: the settings of each run, as they were written."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.common import fileio, terminal
from trainkit.run.events import chosen_point
from trainkit.run.folder import SAMPLER, RunDir

SweepPoint = dict[str, str]
"""Settings of one run that a sweep varied: key -> value, as it was written."""


def submitted_points(sweep: Path) -> dict[str, list[str]]:
    """Overrides with which each run of a sweep was submitted, by ``sweep.json``; empty for other folders."""
    found: dict[str, list[str]] = {}
    try:
        for item in fileio.parse(fileio.read_text(sweep / "sweep.json")):
            run = fileio.inside(sweep, str(item["run"])).name
            found[run] = [terminal.one_line(str(word)) for word in item["overrides"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return found


def points_of(sweep: Path) -> dict[str, SweepPoint]:
    """Points of a sweep by run, without settings that all runs share; empty for other folders."""
    is_sampled = (sweep / SAMPLER).is_file()
    points: dict[str, SweepPoint] = {}
    for run, overrides in submitted_points(sweep).items():
        if is_sampled:
            overrides = [*overrides, *chosen_point(RunDir(sweep / run))]
        points[run] = {}
        for override in overrides:
            key, _, value = override.partition("=")
            points[run][key] = value
    if len(points) > 1:
        _remove_shared(list(points.values()))
    return points


def _remove_shared(points: Sequence[SweepPoint]) -> None:
    """Remove settings that have one value in all points."""
    for key, value in list(points[0].items()):
        if all(point.get(key) == value for point in points):
            for point in points:
                del point[key]


def name_of(point: Mapping[str, str]) -> str:
    """``lr=1e-3, schedule=wsd``: the last part of each key, or all of it where two would be alike."""
    short = [key.removesuffix(".name").rpartition(".")[2] for key in point]
    words = []
    for name, (key, value) in zip(short, point.items(), strict=True):
        words.append(f"{name}={value}" if short.count(name) == 1 else f"{key}={value}")
    return ", ".join(words)
