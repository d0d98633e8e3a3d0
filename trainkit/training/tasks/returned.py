"""Values that the methods of a task return, refused where it is something else than `Task` says.

A scalar where one loss for each sample is asked for would give a wrong mean without a word, and a metric that is
missing would end a run at its first validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainkit.common.errors import UserError
from trainkit.training.tasks.base import Task


def losses_of(task: Task, output: Tensor, target: Tensor) -> Tensor:
    """The loss of each sample, [N]."""
    losses = task.loss(output, target, "none")
    if isinstance(losses, Tensor) and losses.shape == (len(target),):
        return losses
    fix = 'Pass `reduction` on: with "none" return one loss for each sample, [N]; with "mean" their mean.'
    raise _refused(task, 'loss(output, target, "none")', losses, len(target), fix)


def sums_of(task: Task, output: Tensor, target: Tensor) -> Tensor:
    """The numbers of each sample that add up, [N, K]."""
    sums = task.sums(output, target)
    if isinstance(sums, Tensor) and sums.dim() == 2 and len(sums) == len(target):
        return sums
    fix = "Return one row for each sample and one column for each sum, [N, K]: hits[:, None] for one sum."
    raise _refused(task, "sums(output, target)", sums, len(target), fix)


def metrics_of(task: Task, sums: Sequence[float], samples: int) -> dict[str, float]:
    """The metrics as numbers; all of them, but for a task that has `Task.pooled`."""
    found = task.metrics(sums, samples)
    numbers = {}
    if isinstance(found, Mapping):
        for name, value in found.items():
            numbers[name] = _number(value)
    if not numbers or None in numbers.values():
        fix = "Return a dictionary of numbers, by the names that METRICS states."
        raise _refused(task, "metrics(sums, samples)", found, samples, fix)
    if not task.has("pooled"):
        require_all(task, numbers)
    return {name: value for name, value in numbers.items() if value is not None}


def require_all(task: Task, found: Mapping[str, Any]) -> None:
    """Raises UserError where a metric is missing that the task's file states."""
    missing = [name for name in task.stated if name not in found]
    if missing:
        why = f"METRICS states {', '.join(task.stated)}, and it returned {', '.join(found) or 'none'}."
        fix = "Return each metric by the name that METRICS has for it, or take it out of METRICS."
        raise _error(f"{type(task).__name__} measures no {missing[0]}.", why, fix)


def _number(value: Any) -> float | None:
    """None of what is no single number."""
    try:
        return float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _refused(task: Task, call: str, found: Any, samples: int, fix: str) -> UserError:
    shown = f"{type(found).__name__}: {found!r}"[:200]
    if isinstance(found, Tensor):
        shown = f"a tensor of shape {list(found.shape)}"
    what = f"{type(task).__name__}.{call} returned something else than training asks for."
    return _error(what, f"For {samples} samples it returned {shown}.", fix)


def _error(what: str, why: str, fix: str) -> UserError:
    return UserError(what, why=why, fix=f"{fix} Then submit again.", key="task.name")
