"""``trainkit.log``: records of a script of the user's own, in the run that it trains for."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.common.process import variable
from trainkit.run.events import RUN_DIR
from trainkit.run.folder import RunDir
from trainkit.run.metrics import SPLITS


def log(*, step: int, split: str = "train", **values: Any) -> None:
    """Write a metrics record of a training script that trainkit has started; in any other process do nothing.

    Rank 0 writes it. `status`, `logs`, `report` and ``trainkit.open(run).metrics()`` show it, and a sweep judges by it.

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
    folder = variable(RUN_DIR)
    if not folder or _rank() != 0:
        return
    record: dict[str, Any] = {"time": round(time.time(), 3), "step": _plain(step), "split": split}
    for name, value in values.items():
        record[name] = _plain(value)
    if split not in SPLITS or not jsonl.is_whole(record["step"]):
        why = f"A record has a step, 0 or more, and a split: {', '.join(SPLITS)}."
        raise UserError(f"step={step!r}, split={split!r} is no record.", why=why, fix="For example step=100.")
    for name, value in record.items():
        if not isinstance(value, int | float | str | None):
            why = f"It is of type {type(value).__name__}."
            raise UserError(f"{name} is no number.", why=why, fix=f"Give one number: {name}=float(value).")
    jsonl.append_jsonl(RunDir(Path(folder).absolute()).metrics, record)


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
