"""The learning rate of each update: a pure function, which commands ask too, without torch."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.config.checks import given_to_own
from trainkit.config.schema import OptimConfig, ScheduleConfig

# OneCycleLR's defaults: the cycle starts at lr/25 and ends at a 10,000th of where it started.
_ONECYCLE_DIV = 25.0
_ONECYCLE_FINAL_DIV = 1e4


_MOST_ASKED = 10_000


def check_own_schedule(rate: Callable[[int], float], total_steps: int) -> None:
    """Ask a schedule of the user's own for the whole run before it begins: many lines only fall below 0 at its end.

    Raises UserError as `lr_at` does.
    """
    for step in range(0, total_steps, max(total_steps // _MOST_ASKED, 1)):
        rate(step)
    rate(total_steps - 1)


@cache
def _own_schedule(name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function and its options, looked up once: its file may change or go while the run goes on."""
    return plugins.load("trainkit.schedule", name), plugins.signature("trainkit.schedule", name).options


def lr_at(
    step: int, *, optim: OptimConfig, schedule: ScheduleConfig, steps_per_epoch: int, total_steps: int, falls: int = 0
) -> float:
    """Learning rate of update ``step`` (from 0) of ``total_steps``: a pure function, so that resuming needs no state.

    onecycle: cosine from lr/25 up to lr over the warm-up, cosine down to almost nothing (Smith and Topin,
    arXiv 1708.07120, with the annealing of `torch.optim.lr_scheduler.OneCycleLR`; momentum is left as it is). The last
    update has the lowest rate: almost nothing, or ``final_lr_ratio`` of lr if that is higher.
    cosine: linear warm-up, then half a cosine (Loshchilov and Hutter, arXiv 1608.03983). linear: then a straight line.
    These, and wsd, fall towards ``final_lr_ratio`` of lr, where the update after the last would be: the last one is a
    step above it, or with a ratio of 0 it would change nothing. constant: linear warm-up, then lr.
    step: linear warm-up, then lr times ``gamma`` after every ``step_epochs`` from the start on.
    wsd: linear warm-up, lr, and in the last ``decay_ratio`` of the run down by 1 - sqrt (Hu et al., arXiv 2404.06395;
    the shape is that of Haegele et al., arXiv 2405.18392).
    plateau: linear warm-up, then lr times ``gamma`` for each of ``falls``, which a run counts (`Progress.falls`), at
    least ``final_lr_ratio`` of lr.
    ``package.module:function``: what that gives, which has to be the same whenever it is asked.

    A schedule that was begun anew (``start_step``) goes over the updates from there on.
    """
    peak = optim.lr
    step = max(step - schedule.start_step, 0)
    total_steps = max(total_steps - schedule.start_step, 1)
    if schedule.is_own:
        function, asked = _own_schedule(schedule.name)
        rate = function(step, total_steps, peak, **given_to_own(schedule, asked, steps_per_epoch))
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            what = f"schedule.name={schedule.name} gives {rate!r} for update {step} of {total_steps}."
            why = "A learning rate must be at least 0."
            fix = "Return one, a number, for each step from 0 to total_steps - 1. Then submit again."
            raise UserError(what, why=why, fix=fix, key="schedule.name")
        return float(rate)
    if total_steps == 1:
        return peak  # the end of a curve would be its only point
    # At most half of the run, so that a preset made for many epochs can be tried for one.
    warmup = min(schedule.warmup_epochs * steps_per_epoch, total_steps / 2)
    floor = schedule.final_lr_ratio * peak
    if schedule.name == "onecycle":
        start = peak / _ONECYCLE_DIV
        # OneCycleLR's phases end on whole steps: the peak is reached at step warmup - 1.
        top = warmup - 1
        if step <= top:
            return _cosine(start, peak, step / top if top > 0 else 1.0)
        return _cosine(peak, max(floor, start / _ONECYCLE_FINAL_DIV), (step - top) / (total_steps - 1 - top))
    if step < warmup:
        return peak * (step + 1) / math.ceil(warmup)
    if schedule.name == "constant":
        return peak
    if schedule.name == "plateau":
        return max(floor, peak * schedule.gamma**falls)
    if schedule.name == "step":
        return peak * schedule.gamma ** math.floor(step / (schedule.step_epochs * steps_per_epoch))
    if schedule.name == "wsd":
        decay = min(schedule.decay_ratio * total_steps, total_steps - warmup)
        fallen = max(step - (total_steps - decay), 0.0) / decay
        return floor + (peak - floor) * (1 - math.sqrt(fallen))
    fraction = (step - warmup) / (total_steps - warmup)
    if schedule.name == "linear":
        return peak + (floor - peak) * fraction
    return _cosine(peak, floor, fraction)


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
