"""Pruning of sweeps: which runs are compared, when, and which of them stop."""

import math
from collections.abc import Sequence
from pathlib import Path

from trainkit.common import fileio, jsonl
from trainkit.run.folder import PRUNING


def is_behind(own: float | None, others: Sequence[float | None], *, eta: int, higher_is_better: bool) -> bool:
    """Return whether a run is not among the best ``1 / eta`` (rounded up) of those that came so far, itself included.

    It is the rule of ASHA (Li et al., arXiv 1810.05934) in the form that stops runs and pauses none: nobody waits for
    another. The first that come there go on, whatever they are.

    Args:
        own, others: what they are judged by; None, or not finite: worse than any.
    """

    def worth(value: float | None) -> float:
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if higher_is_better else -value

    better = sum(worth(other) > worth(own) for other in others)
    return better >= math.ceil((len(others) + 1) / eta)


def is_rung(validations: float, eta: int) -> bool:
    """Return whether runs are compared after that many validations: 1, eta, eta^2, ..."""
    power = round(math.log(max(validations, 1.0), eta))
    return math.isclose(validations, float(eta) ** power)


def eta_of(sweep: Path) -> int:
    """Number of runs of which one goes on, by the sweep's file; 0: all do."""
    eta = fileio.read_object(sweep / PRUNING).get("eta")
    if jsonl.is_whole(eta) and eta > 1:
        return eta
    return 0
