"""Collection of the facts of several runs, each with its own label."""

from collections import Counter
from collections.abc import Callable, Sequence

from trainkit.common import terminal
from trainkit.report.facts import Facts
from trainkit.report.sweep_points import name_of, points_of
from trainkit.run.folder import RunDir


def collect(runs: Sequence[RunDir]) -> list[Facts]:
    """Facts of runs, each with its own label.

    Runs of a sweep are named by the settings that it varied; where two would have one name, the folder's is added.
    """
    sweeps = {run.path.parent: points_of(run.path.parent) for run in runs}
    found = []
    for run in runs:
        point = sweeps[run.path.parent].get(run.path.name, {})
        point = {key.removeprefix("script.values."): value for key, value in point.items()}
        found.append(Facts(run, name_of(point) or terminal.one_line(run.name), point))
    _tell_apart(found, lambda facts: f"{facts.run_dir.path.parent.name}/{facts.label}")
    _tell_apart(found, lambda facts: str(facts.run_dir.path))
    return found


def _tell_apart(runs: Sequence[Facts], longer: Callable[[Facts], str]) -> None:
    """Replace labels that several runs have by longer ones."""
    times = Counter(facts.label for facts in runs)
    for facts in runs:
        if times[facts.label] > 1:
            facts.label = longer(facts)


def of_one_sweep(runs: Sequence[Facts]) -> bool:
    """True if they are the runs of one sweep."""
    return len(runs) > 1 and all(facts.point for facts in runs)


def ranked(runs: Sequence[Facts]) -> list[Facts]:
    """Runs of a sweep with the best first; others in their order."""
    if of_one_sweep(runs):
        return sorted(runs, key=lambda facts: facts.rank)
    return list(runs)


def best_of(runs: Sequence[Facts], most: int) -> Sequence[Facts]:
    """Return the runs themselves, or of many the best by validation."""
    if len(runs) <= most:
        return runs
    return sorted(runs, key=lambda facts: facts.rank)[:most]
