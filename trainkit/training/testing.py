"""Metrics of all the weights that a run has: the model's own (raw), and their average (ema) if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from trainkit.checkpoint.save import Checkpoints
from trainkit.data.base import Samples
from trainkit.errors import UserError
from trainkit.training.confusion import ClassCounts, Confusion
from trainkit.training.evaluate import evaluate, sync_buffers
from trainkit.training.mistakes import Mistakes
from trainkit.training.parts import Parts

STEMS = {"raw": "model", "ema": "ema"}
"""Kind of weights -> where a checkpoint has them."""
_EMA = ("loss", "acc1", "acc5")


@dataclass(frozen=True)
class Measured:
    """What `evaluate` found of each kind of weights."""

    metrics: dict[str, float]
    """``loss``, ``acc1``, ``acc5``, ``samples``; of averaged weights ``ema_loss`` and so on."""
    counts: dict[str, ClassCounts]
    """Empty where nobody asked for them, and for data of too many classes."""
    mistakes: dict[str, Mistakes] = field(default_factory=dict)


def no_average(step: int) -> UserError:
    """The error for who asks for averaged weights where a checkpoint has none."""
    return UserError(
        f"The checkpoint of step {step} has no averaged weights.",
        why="The run, or this part of it, was trained with train.ema_decay=null.",
        fix="Leave --weights out.",
    )


def measure(
    parts: Parts,
    samples: Samples,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    confusion: bool = False,
) -> Measured | None:
    """Of the model as it is, and of its average; None if it was told to stop."""
    found = Measured({}, {})
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {"raw": nullcontext}
    if parts.ema is not None:
        kinds["ema"] = parts.ema.in_model
    for kind, weights in kinds.items():
        with weights():
            sync_buffers(parts.model, parts.dist)
            if not _add(found, kind, parts, samples, None, should_stop, beat, confusion):
                return None
    return found


def measure_saved(
    parts: Parts,
    checkpoints: Checkpoints,
    step: int,
    samples: Samples,
    *,
    kinds: Sequence[str],
    batch_size: int | None = None,
    beat: Callable[[], None] = lambda: None,
    or_newest: bool = True,
) -> tuple[int, Measured]:
    """Of the weights in the checkpoint of ``step``, which the model then has; and the step whose weights they were.

    Raises:
        UserError: as `Checkpoints.load_weights` does.
    """
    found = Measured({}, {})
    for kind in kinds:
        step = checkpoints.load_weights(parts.model, step, or_newest=or_newest, stem=STEMS[kind])
        _add(found, kind, parts, samples, batch_size, lambda: False, beat, confusion=True)
    return step, found


def _add(
    found: Measured,
    kind: str,
    parts: Parts,
    samples: Samples,
    batch_size: int | None,
    should_stop: Callable[[], bool],
    beat: Callable[[], None],
    confusion: bool,
) -> bool:
    counts = Confusion.of(parts.splits.info, parts.dist) if confusion else None
    found.mistakes[kind] = mistakes = Mistakes()
    result = evaluate(
        parts, samples, batch_size=batch_size, should_stop=should_stop, beat=beat, confusion=counts, mistakes=mistakes
    )
    if result is None:
        return False
    found.metrics.update(result if kind == "raw" else {f"ema_{key}": result[key] for key in _EMA if key in result})
    found.metrics.setdefault("samples", result["samples"])
    if counts is not None:
        found.counts[kind] = counts.read()
    return True
