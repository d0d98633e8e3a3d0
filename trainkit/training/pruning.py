"""Pruning: of a sweep's runs, those that are behind the others at the same epoch stop there, and can go on later."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainkit import fileio
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.run.events import attempts_that
from trainkit.run.folder import PRUNING, RunDir, list_runs
from trainkit.run.metrics import read_metrics

_ROUNDED = 1e-3
"""By how much less a record may say than the epoch was."""


def is_behind(own: float | None, others: Sequence[float | None], *, eta: int, higher_is_better: bool) -> bool:
    """Whether a run is not among the best ``1 / eta`` (rounded up) of those that have come so far, itself included.

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
    """Whether runs are compared after that many validations: 1, eta, eta^2, ..."""
    power = round(math.log(max(validations, 1.0), eta))
    return math.isclose(validations, float(eta) ** power)


class Pruner:
    """Compares a run of a sweep with the others, on rank 0, for all ranks.

    Args:
        run: whose sweep says in its file `PRUNING` that it is to be pruned. One that was pruned and goes on, which
            somebody has asked for, is not pruned again.
    """

    def __init__(self, run: RunDir, dist: Distributed) -> None:
        self._run, self._dist = run, dist
        is_asked = dist.is_main and not attempts_that(run, "pruned")
        self._eta: int = dist.broadcast_json(eta_of(run.path.parent) if is_asked else 0)
        self.why = ""
        """Why the run is to stop, as soon as it is."""

    def look(
        self, metrics: Mapping[str, float], name: str, epoch: float, *, every: int, higher_is_better: bool
    ) -> None:
        """After a validation. Every rank must call it.

        Args:
            metrics: what it has found.
            name: of the metric that runs are judged by.
            every: epochs between two validations.
        """
        if not self._eta or not is_rung(epoch / every, self._eta):
            return
        why = ""
        if self._dist.is_main:
            others = self._others(name, epoch)
            if is_behind(metrics.get(name), others, eta=self._eta, higher_is_better=higher_is_better):
                why = f"at epoch {epoch:g} it is not among the best of {len(others) + 1} runs, 1 in {self._eta}"
        self.why = self._dist.broadcast_json(why)

    def _others(self, name: str, epoch: float) -> list[float | None]:
        """What the sweep's other runs had at that epoch, of those that have come so far."""
        found: list[float | None] = []
        for other in list_runs(self._run.path.parent):
            with suppress(UserError):  # its records cannot be read
                if other.path != self._run.path:
                    reached = (it for it in read_metrics(other, "val") if it.get("epoch", 0.0) >= epoch - _ROUNDED)
                    found += [record.get(name) for record in itertools.islice(reached, 1)]
        return found


def eta_of(sweep: Path) -> int:
    """Of how many runs one goes on, by the sweep's file; 0: all do."""
    eta = fileio.read_object(sweep / PRUNING).get("eta")
    return eta if fileio.is_whole(eta) and eta > 1 else 0
