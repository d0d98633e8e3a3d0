"""``trainkit.log``: records of a script of the user's own, in the run that it trains for."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.common.process import variable
from trainkit.run.events import NUMBER, RUN_DIR, Attempt, attempts_that
from trainkit.run.find import list_runs
from trainkit.run.folder import PRUNED, sweep_of
from trainkit.run.metrics import SPLITS, describe_names, read_metrics, task_metrics
from trainkit.run.pruning import eta_of, is_behind, is_rung

_DESCRIBED: set[tuple[Path, str]] = set()
"""Metrics that this process has added to the description of its run."""


def log(*, step: int, split: str = "train", **values: Any) -> None:
    """Write a metrics record of a training script that trainkit has started; in any other process do nothing.

    Rank 0 writes it. `status`, `logs`, `report` and ``trainkit.open(run).metrics()`` show it, and a sweep judges by it:
    by ``val/loss``, or by what `checkpoint.best` names.

    Args:
        step: updates done, of which a later record of the same split replaces an earlier one.
        split: ``train``, ``val`` or ``test``.
        values: numbers by name; tensors and arrays of one element count as such.

    Raises:
        UserError: it is no record: another split, a step that is no count, a value that is no number.

    Example:
        >>> trainkit.log(step=100, loss=0.25, lr=1e-3)
        >>> trainkit.log(step=100, split="val", acc1=91.5)
    """
    attempt = Attempt.named_in({name: variable(name) for name in (RUN_DIR, NUMBER)})
    if attempt is None or _rank() != 0:
        return
    found = {name: _plain(value) for name, value in values.items()}
    count = _plain(step)
    if split not in SPLITS or not jsonl.is_whole(count):
        why = f"A record has a step, 0 or more, and a split: {', '.join(SPLITS)}."
        raise UserError(f"step={step!r}, split={split!r} is no record.", why=why, fix="For example step=100.")
    for name, value in found.items():
        if not isinstance(value, int | float | str | None):
            why = f"It is of type {type(value).__name__}."
            raise UserError(f"{name} is no number.", why=why, fix=f"Give one number: {name}=float(value).")
    write_record(attempt, count, split, found)


def write_record(attempt: Attempt, step: int, split: str, values: dict[str, Any], when: float | None = None) -> None:
    """Write a record, describe metrics that are new, and stop the run where its sweep does without it.

    Args:
        when: seconds since 1970; None: now.
    """
    run = attempt.run
    new = [name for name, value in values.items() if jsonl.is_number(value) and (run.path, name) not in _DESCRIBED]
    if new:
        describe_names(run, new)
        _DESCRIBED.update((run.path, name) for name in new)
    seconds = round(time.time() if when is None else when, 3)
    jsonl.append_jsonl(run.metrics, {"time": seconds, "step": step, "split": split, **values})
    if split == "val":
        _prune(attempt, step)


def _prune(attempt: Attempt, step: int) -> None:
    """Tell the run's ranks to end if it is behind the others of its sweep after as many validations."""
    run = attempt.run
    sweep = sweep_of(run)
    eta = eta_of(sweep) if sweep is not None else 0
    if sweep is None or not eta or attempts_that(run, "pruned"):
        return
    metrics = task_metrics(run)
    own = read_metrics(run, "val")
    if not is_rung(len(own), eta):
        return
    others = list[float | None]()
    for other in list_runs(sweep):
        with suppress(UserError):  # its records cannot be read
            records = read_metrics(other, "val") if other.path != run.path else []
            if len(records) >= len(own):
                others.append(records[len(own) - 1].get(metrics.headline))
    value = own[-1].get(metrics.headline)
    better = metrics.metrics[metrics.headline].higher_is_better
    if is_behind(value, others, eta=eta, higher_is_better=better):
        count = f"after {len(own)} validations it is not among the best of {len(others) + 1} runs, 1 in {eta}"
        attempt.remark("pruned", step=step, why=count)
        PRUNED.send(attempt.logs, count, within=run.path)


def _rank() -> int:
    """This process among all that train: by torch where its ranks have met, for a script may have spawned them."""
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return int(torch.get_rank())
    text = variable("RANK")
    return int(text) if text.isdecimal() else 0


def _plain(value: Any) -> Any:
    """A number of Python's for one of another library's, as a tensor of one element."""
    item = getattr(value, "item", None)
    if item is None:
        return value
    try:
        return item()
    except (RuntimeError, ValueError):  # of several elements
        return value
