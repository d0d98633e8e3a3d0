"""Learning rates: a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from trainkit.config.schema import OptimConfig, ScheduleConfig

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
    """
    peak = optim.lr
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


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
