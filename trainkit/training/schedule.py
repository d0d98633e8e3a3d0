"""Learning rates: a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from trainkit import plugins
from trainkit.config.optimizers import given_to_own
from trainkit.config.schema import OptimConfig, ScheduleConfig
from trainkit.errors import UserError

# OneCycleLR's defaults: the cycle starts at lr/25 and ends at a 10,000th of where it started.
_ONECYCLE_DIV = 25.0
_ONECYCLE_FINAL_DIV = 1e4


def lr_at(step: int, *, optim: OptimConfig, schedule: ScheduleConfig, steps_per_epoch: int, total_steps: int) -> float:
    """Learning rate of update ``step`` (from 0) of ``total_steps``.

    onecycle: cosine from lr/25 up to lr over the warm-up, cosine down to almost nothing (Smith and Topin,
    arXiv 1708.07120, with the annealing of `torch.optim.lr_scheduler.OneCycleLR`; momentum is left as it is).
    cosine: linear warm-up, then half a cosine (Loshchilov and Hutter, arXiv 1608.03983).
    Both end at ``final_lr_ratio`` of lr if that is higher. constant: linear warm-up, then lr.
    step: linear warm-up, then lr times ``gamma`` after every ``step_epochs`` from the start on.
    wsd: linear warm-up, lr, and in the last ``decay_ratio`` of the run down to ``final_lr_ratio`` of lr by 1 - sqrt (Hu
    et al., arXiv 2404.06395; the shape is that of Haegele et al., arXiv 2405.18392).
    ``package.module:function``: what that gives, which has to be the same whenever it is asked.
    """
    peak = optim.lr
    if schedule.is_own:
        return _own_rate(step, total_steps, peak, schedule, steps_per_epoch)
    if total_steps == 1:
        return peak  # the end of a curve would be its only point
    # At most half of the run, so that a preset made for many epochs can be tried for one.
    warmup = min(schedule.warmup_epochs * steps_per_epoch, total_steps / 2)
    floor = schedule.final_lr_ratio * peak
    if schedule.name == "onecycle":
        start = peak / _ONECYCLE_DIV
        end = max(floor, start / _ONECYCLE_FINAL_DIV)
        # OneCycleLR's phases end on whole steps: the peak is reached at step warmup - 1.
        top = warmup - 1
        if step <= top:
            return _cosine(start, peak, step / top if top > 0 else 1.0)
        return _cosine(peak, end, (step - top) / (total_steps - 1 - top))
    if step < warmup:
        return peak * (step + 1) / math.ceil(warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "step":
        return peak * schedule.gamma ** math.floor(step / (schedule.step_epochs * steps_per_epoch))
    if schedule.name == "wsd":
        decay = min(schedule.decay_ratio * total_steps, total_steps - warmup)
        fallen = max(step - (total_steps - decay), 0.0) / decay
        return floor + (peak - floor) * (1 - math.sqrt(fallen))
    return _cosine(peak, floor, (step - warmup) / (total_steps - warmup))


def _own_rate(step: int, total_steps: int, lr: float, schedule: ScheduleConfig, steps_per_epoch: int) -> float:
    rate = _own(schedule.name)(step, total_steps, lr, **given_to_own(schedule, steps_per_epoch))
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise UserError(
            f"schedule.name={schedule.name} gives {rate!r} for update {step} of {total_steps}.",
            why="A learning rate is a number of at least 0.",
            fix="Have function(step, total_steps, lr) return one.",
            key="schedule.name",
        )
    return float(rate)


@cache
def _own(name: str) -> Callable[..., Any]:
    return plugins.load("trainkit.schedule", name)


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
